"""Kimi-K2.5 in miniature on SGLang's own server: both kinds of draft, trained here, in chains and in trees.

Oracles: transformers' greedy text of the same weights, and what the reference predicts on that text.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import kimi
import pytest
import servers
import torch
from simulated_trees import simulate_tree

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.reference import ChainResult, ReferenceDraft

pytestmark = pytest.mark.e2e

STEPS, TOKENS = 3, 28
LENGTHS = (4, 11, 26)
"""Tokens of an answer, and of the prompts."""


class Target(NamedTuple):
    """A target, and its texts: some to train on, some to serve, which run on beyond the answer."""

    folder: Path
    to_train: list[kimi.Text]
    to_serve: list[kimi.Text]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    model = kimi.make_target()
    folder = kimi.write_target(tmp_path_factory.mktemp("kimi") / "target", model)
    generator = torch.Generator().manual_seed(1)
    to_train, *to_serve = (
        kimi.write_texts(model, torch.randint(3, kimi.VOCAB, (count, length), generator=generator), new)
        for count, length, new in ((128, 6, 26), *((4, length, TOKENS + STEPS) for length in LENGTHS))
    )
    return Target(folder, to_train, [text for texts in to_serve for text in texts])


@pytest.fixture(scope="module")
def drafts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Train a draft of each kind when it is first asked for."""

    @functools.cache
    def trained(kind: str) -> Path:
        folder = kimi.write_draft(tmp_path_factory.mktemp("draft") / kind, kind)
        kimi.train(folder, target.folder, target.to_train, updates=300)
        return folder

    return trained


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """Collect what was measured; kept in the file that ``KIMI_RESULTS`` names."""
    found: dict[str, Any] = {
        "layers": kimi.LAYERS,
        "sources": kimi.SOURCES,
        "boundaries": list(kimi.BOUNDARIES),
        "tokens": TOKENS,
        "served": {},
    }
    yield found
    if file := os.environ.get("KIMI_RESULTS"):
        Path(file).write_text(json.dumps(found, indent=1) + "\n")


def predict(draft: ReferenceDraft, text: kimi.Text, flags: tuple[str, ...]) -> ChainResult:
    """Replay one answer by the reference."""
    if flags == servers.CHAIN:
        return reference.simulate_chain(
            draft, text.ids, text.features, text.prompt, steps=STEPS, completion_tokens=TOKENS
        )
    return simulate_tree(draft, text.ids, text.features, text.prompt, STEPS, 4, 8, TOKENS)


# A Llama-type draft in trees is served in test_host/features_under_load.py.
@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param("latent", "chain", marks=pytest.mark.soak), ("latent", "tree"), ("grouped", "chain")],
)
def test_a_draft_is_served_as_the_reference_predicts(
    kind: str, shape: str, target: Target, drafts: Callable[[str], Path], results: dict[str, Any], tmp_path: Path
) -> None:
    flags = {"chain": servers.CHAIN, "tree": servers.TREE}[shape]
    folder, texts = drafts(kind), target.to_serve
    words = servers.arguments(target.folder, folder, "--skip-tokenizer-init", *flags)
    log = tmp_path / "server.log"
    prompts = [text.ids[: text.prompt].tolist() for text in texts]
    with servers.serve(log, words) as server, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda prompt: servers.complete(server, prompt, TOKENS), prompts))
    written = log.read_text(errors="replace")
    assert "fc <- [embedding | layer 3 output | layer 31 output]" in written
    (proved,) = re.findall(r"3 of 3 state\(s\) equal the residual stream, \d+ tokens, ([0-9.]+) s", written)
    assert float(proved) < 2
    assert [list(a.ids) for a in answers] == [t.ids[t.prompt : t.prompt + TOKENS].tolist() for t in texts]

    draft = reference.load(folder, target=target.folder)
    total = None
    with torch.inference_mode():
        for text in texts:
            one = predict(draft, text, flags)
            total = one if total is None else total + one
    assert total is not None
    served = [sum(a.histogram[i] for a in answers if i < len(a.histogram)) for i in range(STEPS + 1)]
    results["served"][f"{kind} {shape}"] = {
        "answers": len(answers),
        "verify_steps": sum(served),
        "accept_length": round(len(answers) * TOKENS / sum(served), 3),
        "predicted": round(total.accept_length, 3),
        "proof_s": float(proved),
    }
    difference = sum(abs(a - b) for a, b in zip(served, total.histogram, strict=True))
    assert difference <= 0.01 * sum(served), f"served {served}, predicted {list(total.histogram)}"
    # Drafts have learned something, and are accepted beyond the first token.
    assert total.accept_length > 1.25
    assert sum(served[2:]) > 0.05 * sum(served)
