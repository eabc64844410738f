"""Drafts trained for seconds on tiny targets of other families: the probe is told nothing and finds all.

Run by hand, but for one: ``pytest -m soak tests/test_probe``, or ``python -m benchmarks.probe.measure pairs``, which
keeps what is found: ``PAIRS_RESULTS`` names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from checkpoints import write_draft
from planted import make_target
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.formats import read_draft, read_tensors
from sglang_eagle3_ext.probe.features import Features, FeatureWriter, capture
from sglang_eagle3_ext.probe.search import Candidates, Scorer, beyond_chance
from sglang_eagle3_ext.probe.verdict import Probe, probe, sources
from sglang_eagle3_ext.reference import ReferenceDraft

VOCAB, WIDTH = 64, 24


class Pair(NamedTuple):
    """A target's family and depth, and what its draft is trained on."""

    family: str
    layers: int
    places: tuple[int, ...]
    draft_vocab: int = VOCAB
    absolute: bool = False
    residual: str = "pre_norm"
    norms: str = "none"


PAIRS = (
    Pair("llama", 4, (0, 2, 4)),
    Pair("llama", 7, (5,), 48),
    Pair("qwen2", 5, (4, 1, 3)),
    Pair("qwen3", 6, (6, 2)),
    Pair("qwen3", 6, (7, 0, 3), 40, True),
    Pair("llama", 9, (8, 0, 5, 2, 6)),
    Pair("gemma3", 6, (6, 2, 4)),
    Pair("qwen2", 8, (1, 7, 4, 8)),
    Pair("qwen3", 4, (5,)),
    Pair("qwen2", 6, (0, 3, 6)),
    Pair("llama", 5, (1, 4, 0), residual="post_norm"),
    Pair("qwen2", 7, (3, 6, 0), residual="post_norm"),
    Pair("llama", 6, (0, 3, 5), norms="per_source"),
    Pair("qwen2", 5, (1, 4, 2), norms="concatenation"),
)
QUICK = PAIRS[1]
"""The one that is trained and found in every run of the tests."""
ALIKE = (
    Pair("gemma2", 4, (1, 4)),
    Pair("gemma2", 5, (5, 2)),
    Pair("gemma3", 6, (5, 0, 2, 3, 1)),
)
"""Pairs whose drafts do not tell boundaries apart: what they were trained on scores no better than what is found, on
all 240 answers. Gemma scales its embedding up, so that it is still most of the stream behind the first layers."""


UNSURE = Pair("qwen3", 4, (2, 4), residual="post_norm")
"""A pair whose answers do not tell the residual for sure, and with the other one the state behind the last layer is
taken for the one after the final norm."""


def write_texts(family: str, layers: int, folder: Path, seed: int = 0) -> tuple[Path, Features, Features]:
    """Write a target, and its answers to train on and to probe with."""
    target = make_target(family, seed, num_hidden_layers=layers, initializer_range=0.2)
    # No end, so that every answer is long.
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder / "target")
    g = torch.Generator().manual_seed(seed)
    texts = []
    for name, count in (("train", 2048), ("probe", 240)):
        prompts = torch.randint(3, VOCAB, (count, 6), generator=g).tolist()
        with FeatureWriter(folder / name, target="target", steps=3) as writer:
            capture(target, prompts, [None] * count, writer, max_new_tokens=24, steps=3)
        texts.append(Features.open(folder / name))
    return folder / "target", texts[0], texts[1]


def train(folder: Path, target: Path, features: Features, pair: Pair, updates: int = 900) -> None:
    """Train a draft towards the target's distribution on what it wrote, one feature pass deep."""
    spec = read_draft(folder)
    embed = reference.load(spec, target=target).embed
    tensors = dict(read_tensors(spec))
    learned = {name: t.requires_grad_() for name, t in tensors.items() if t.is_floating_point() and "embed" not in name}
    targets = tensors["d2t"] if "d2t" in tensors else torch.arange(VOCAB)
    targets = targets + torch.arange(len(targets)) if spec.vocab.map == "offset" else targets
    head = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).lm_head.weight.detach()[targets]
    optimizer = torch.optim.AdamW(learned.values(), lr=4e-3)
    g = torch.Generator().manual_seed(1)
    places = list(pair.places)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - update / updates)
        draft = ReferenceDraft(spec, tensors, embed=embed)
        losses = []
        for i in torch.randint(len(features.answers), (6,), generator=g).tolist():
            answer = features.answers[i]
            hidden = draft.project(answer.states[:-1, places].flatten(1))
            step, _ = draft.feature_pass(hidden, answer.tokens)
            wanted = F.linear(answer.states[answer.rows + 1, -1], head).softmax(-1)
            losses.append(F.cross_entropy(step[answer.rows].logits, wanted))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    names = {canonical: file for file, canonical in spec.weights.items()}
    if pair.absolute and "d2t" in tensors:
        tensors["d2t"] = targets
    save_file({names[name]: tensor.detach() for name, tensor in tensors.items()}, folder / "model.safetensors")


def write_pair(pair: Pair, tmp_path: Path) -> tuple[Path, Path, Features]:
    target, to_train, to_probe = write_texts(pair.family, pair.layers, tmp_path)
    ext = {"residual": pair.residual, "norms": pair.norms}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle3_ext": ext}
    tensors: dict[str, Any] = {"t2d": None} if pair.draft_vocab != VOCAB else {}
    tensors |= norms_of(pair)
    draft = write_draft(
        tmp_path / "draft", "vllm", hidden=WIDTH, num_sources=len(pair.places), vocab=VOCAB,
        draft_vocab=pair.draft_vocab, config_changes=config, tensor_changes=tensors,
    )  # fmt: skip
    train(draft, target, to_train, pair)
    told = json.loads((draft / "config.json").read_text())
    del told["eagle3_ext"]
    told |= UNTOLD[pair.norms]
    (draft / "config.json").write_text(json.dumps(told))
    return draft, target, to_probe


UNTOLD: dict[str, dict[str, bool]] = {
    "none": {},
    "per_source": {"fc_norm": False},
    "concatenation": {"norm_before_fc": False},
}
"""What a config says that leaves the norms around fc out."""


def norms_of(pair: Pair) -> dict[str, torch.Tensor]:
    """Give the norms around fc that a pair's draft begins with."""
    g, count = torch.Generator().manual_seed(2), len(pair.places)
    drawn = 1 + 0.3 * torch.randn(count, WIDTH, generator=g)
    if pair.norms == "per_source":
        return {f"fc_norm.{k}.weight": norm for k, norm in enumerate(drawn)}
    return {"input_norm.weight": drawn.flatten()} if pair.norms == "concatenation" else {}


def name(pair: Pair) -> str:
    switched = "" if pair.residual == "pre_norm" else f", residual {pair.residual}"
    switched += "" if pair.norms == "none" else f", norms {pair.norms}"
    return f"{pair.family}-{pair.layers}-{'-'.join(map(str, pair.places))}{switched}"


def switches(pair: Pair) -> dict[str, str]:
    """What a probe has to find beside the sources, where it is told nothing."""
    found = {} if pair.residual == "pre_norm" else {"residual": pair.residual}
    found |= {} if pair.norms == "none" else {"norms": pair.norms}
    return found | ({"vocab_map": "absolute"} if pair.absolute else {})


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, Any]]:
    """Collect what was found of each pair."""
    found: dict[str, Any] = {}
    yield found
    if file := os.environ.get("PAIRS_RESULTS"):
        Path(file).write_text(json.dumps(found))


def note(pair: Pair, result: Probe) -> dict[str, Any]:
    """Put down what was found of a pair."""
    return {
        "trained": sources(pair.places, pair.layers),
        "vocabulary": f"{pair.draft_vocab} of {VOCAB}{', absolute map' if pair.absolute else ''}",
        "found": sources(result.best.places, pair.layers),
        "switches": {"trained": switches(pair), "found": dict(result.best.switches)},
        "verdict": result.verdict,
        "accept_length": round(result.best.total.accept_length, 3),
        "first_choice": [round(share, 3) for share in result.agreement],
        "alike": [sources(alike, pair.layers) for alike in result.alike],
        "undecided": {key: list(values) for key, values in result.undecided.items() if key != "rope_theta"},
    }


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=pytest.mark.e2e if pair is QUICK else pytest.mark.soak) for pair in PAIRS],
    ids=name,
)
def test_finds_what_a_draft_was_trained_on(tmp_path: Path, pair: Pair, results: dict[str, Any]) -> None:
    draft, target, features = write_pair(pair, tmp_path)
    result = probe(draft, target, features)
    results[name(pair)] = note(pair, result)
    # Only a draft that has learned something says which assembly it wants.
    assert result.agreement[0] > 0.3, result.agreement
    assert result.best.places == pair.places
    assert dict(result.best.switches) == switches(pair)
    assert result.verdict == "other_found"


@pytest.mark.soak
@pytest.mark.parametrize("pair", ALIKE, ids=name)
def test_names_what_a_draft_does_not_tell_apart(tmp_path: Path, pair: Pair, results: dict[str, Any]) -> None:
    draft, target, features = write_pair(pair, tmp_path)
    result = probe(draft, target, features)
    results[name(pair)] = note(pair, result)
    assert result.verdict == "other_found"
    for place, best, alike in zip(pair.places, result.best.places, result.alike, strict=True):
        assert place in (best, *alike)
    others = len(pair.places) * (pair.layers + 1)
    assert sum(map(len, result.alike)) <= others / 3
    # No search could do better: the truth itself proposes no better, on the answers that were kept from it included.
    scorer = Scorer(Candidates(draft, target), features.answers)
    best = scorer.per_answer(result.best.places, result.best.switches)
    assert not beyond_chance(scorer.per_answer(pair.places, ()) - best, 2.0)


@pytest.mark.soak
def test_names_a_switch_that_answers_do_not_tell(tmp_path: Path, results: dict[str, Any]) -> None:
    draft, target, features = write_pair(UNSURE, tmp_path)
    result = probe(draft, target, features)
    results[name(UNSURE)] = note(UNSURE, result)
    assert result.undecided["residual"] == ("post_norm",)
    assert result.best.places in (UNSURE.places, (2, 5))


@pytest.mark.soak
def test_a_draft_of_another_target_is_explained_by_nothing(tmp_path: Path, results: dict[str, Any]) -> None:
    draft, _, _ = write_pair(PAIRS[0], tmp_path)
    (tmp_path / "other").mkdir()
    target, _, features = write_texts("llama", 4, tmp_path / "other", seed=5)
    result = probe(draft, target, features)
    results[f"{name(PAIRS[0])}, another target"] = note(PAIRS[0], result)
    assert result.verdict == "none_explains", result.agreement
