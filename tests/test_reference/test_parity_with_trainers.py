"""Drafts as speculators and SpecForge write them, read by our readers and run by the reference, against their own
models in float32, over a covering design of everything they can vary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import (
    FORCED_EOL,
    SPECFORGE,
    SPECULATORS,
    STEPS,
    Trained,
    identify,
    specforge_design,
    speculators_design,
    train_specforge,
    train_speculators,
)

from sglang_eagle3_ext import formats, reference
from sglang_eagle3_ext.reference import Chains

CASES = [
    *(pytest.param(train_speculators, row, id=f"speculators-{identify(row)}") for row in speculators_design()),
    *(pytest.param(train_specforge, row, id=f"specforge-{identify(row)}") for row in specforge_design()),
]


@pytest.mark.parametrize(("design", "factors"), [(speculators_design(), SPECULATORS), (specforge_design(), SPECFORGE)])
def test_the_design_covers_every_pair(design: list[dict[str, Any]], factors: Mapping[str, tuple[Any, ...]]) -> None:
    for one, other in itertools.combinations(factors, 2):
        assert {(row[one], row[other]) for row in design} == set(itertools.product(factors[one], factors[other]))


def test_the_design_is_large_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(("train", "row"), CASES)
def test_parity(train: Callable[..., Trained], row: Mapping[str, Any], tmp_path: Path) -> None:
    theirs = train(row, tmp_path)
    spec = formats.read_draft(tmp_path, override={"producer": "specforge"} if train is train_specforge else None)
    assert [f.message for f in spec.findings if f.severity == "error"] == []
    assert spec.unconsumed == ()
    assert spec.missing == ()
    draft = reference.load(spec, embed=theirs.embed, dtype=torch.float32)

    here, cache = draft.feature_pass(
        draft.project(theirs.features), torch.cat([torch.tensor([FORCED_EOL]), theirs.inputs])
    )
    chains = Chains(draft, cache, torch.arange(len(cache)))
    steps = [here]
    for k in range(1, STEPS):
        shifted = torch.cat([theirs.inputs[k:], theirs.inputs.new_full((k,), FORCED_EOL)])
        steps.append(chains.advance(shifted, steps[-1].state))
    assert len(theirs.logits) == len(theirs.states) == STEPS
    for mine, logits, state in zip(steps, theirs.logits, theirs.states, strict=True):
        torch.testing.assert_close(mine.logits, logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.state, state, rtol=0, atol=1e-5)
