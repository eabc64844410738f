"""Parts of a verdict: projections against ``ReferenceDraft.project``, intervals against their normal approximation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft, write_target
from planted import features, load

from sglang_eagle3_ext.probe.search import Candidates
from sglang_eagle3_ext.probe.verdict import Outcome, interval, measure
from sglang_eagle3_ext.reference import ChainResult, simulate_chain


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target")


@pytest.mark.parametrize("around", ["none", "per_source", "concatenation"])
@pytest.mark.parametrize("bias", [False, True])
def test_projections_add_up_to_what_the_draft_projects(tmp_path: Path, target: Path, around: str, bias: bool) -> None:
    g = torch.Generator().manual_seed(1)
    changes: dict[str, Any] = {"fc_norm": around == "per_source", "norm_before_fc": around == "concatenation"}
    tensors: dict[str, torch.Tensor | None] = {}
    if around == "per_source":
        tensors = {f"fc_norm.{k}.weight": torch.rand(32, generator=g) for k in range(3)}
    elif around == "concatenation":
        tensors = {"input_norm.weight": torch.rand(96, generator=g)}
    if bias:
        tensors["fc.bias"] = torch.randn(32, generator=g)
    folder = write_draft(tmp_path / "draft", config_changes=changes | {"bias": bias}, tensor_changes=tensors)
    candidates = Candidates(folder, target)
    assert candidates.spec.norms.around_fc == around
    assert candidates.spec.fc_bias == bias
    planted = features(load(folder, target), (0, 4, 7), answers=2)
    for places in ((0, 4, 7), (9, 2, 2)):
        for answer in planted.answers:
            expected = candidates.draft(()).project(answer.states[:-1, list(places)].flatten(1))
            torch.testing.assert_close(candidates.hidden(answer, places, ()), expected, rtol=1e-4, atol=1e-5)


def test_measures_what_simulate_chain_counts(tmp_path: Path, target: Path) -> None:
    folder = write_draft(tmp_path / "draft")
    draft = load(folder, target)
    planted = features(draft, (0, 4, 7), answers=4)
    outcome = measure(Candidates(folder, target), planted.answers, (0, 4, 7), (), steps=2)
    for answer, got in zip(planted.answers, outcome.results, strict=True):
        states = answer.states[:, [0, 4, 7]].flatten(1)
        length = answer.completion_tokens
        assert got == simulate_chain(draft, answer.tokens, states, answer.prompt_length, 2, completion_tokens=length)
    assert outcome.total.accept_length > 1.5


def outcome(counts: list[tuple[int, int]]) -> Outcome:
    return Outcome((), (), tuple(ChainResult((steps, 0), tokens) for tokens, steps in counts))


def test_the_interval_is_that_of_a_ratio() -> None:
    """Two groups of different means: the spread within them counts, the one between them does not."""
    g = torch.Generator().manual_seed(0)
    steps = torch.randint(20, 60, (400,), generator=g)
    rates = torch.where(torch.arange(400) < 200, 1.2, 2.2) + 0.2 * torch.randn(400, generator=g)
    tokens = (steps * rates).round().long()
    groups = ["a"] * 200 + ["b"] * 200
    measured = outcome(list(zip(tokens.tolist(), steps.tolist(), strict=True)))
    ratio = tokens.sum() / steps.sum()
    residuals = tokens - ratio * steps
    within = torch.cat([part - part.mean() for part in residuals.split(200)])
    expected = 1.96 * float(within.std()) * math.sqrt(400) / float(steps.sum())
    low, high = interval(measured, groups)
    assert low < float(ratio) < high
    assert (high - low) / 2 == pytest.approx(expected, rel=0.1)
    pooled = interval(measured, [None] * 400)
    assert pooled[1] - pooled[0] > 2 * (high - low)


def test_a_difference_is_taken_on_the_same_draws() -> None:
    g = torch.Generator().manual_seed(0)
    counts = [(int(t), 30) for t in torch.randint(31, 90, (60,), generator=g)]
    better = outcome([(tokens + 3, steps) for tokens, steps in counts])
    low, high = interval(better, [None] * 60, minus=outcome(counts))
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    assert all(math.isnan(end) for end in interval(outcome([(3, 2)]), [None]))
