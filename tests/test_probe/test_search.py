"""``probe`` against texts that were written by the draft itself from an assembly that it is not told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DELETE, write_draft, write_target
from planted import features, load
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.probe.features import Features
from sglang_eagle3_ext.probe.report import as_text
from sglang_eagle3_ext.probe.search import Candidates, beyond_chance, seconds_per_answer
from sglang_eagle3_ext.probe.verdict import Probe, _advise, probe, sources

LAYERS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target", num_layers=LAYERS)


def found(result: Probe) -> list[str]:
    return sources(result.best.places, LAYERS)


@pytest.mark.parametrize(
    ("planted", "declared"),
    [
        pytest.param((0, 4, 7), None, id="told nothing"),
        pytest.param((0, 4, 7), ["embed", "layer3", "layer6"], id="told right"),
        pytest.param((0, 4, 7), ["layer1", "layer4", "layer7"], id="told wrong", marks=pytest.mark.soak),
        pytest.param((7, 0, 4), ["embed", "layer3", "layer6"], id="permuted"),
        pytest.param((5,), None, id="one source", marks=pytest.mark.e2e),
        pytest.param((3, 8), None, id="two, the last boundary", marks=pytest.mark.e2e),
        pytest.param((9, 1, 2), None, id="final norm first", marks=pytest.mark.e2e),
        pytest.param((1, 8, 3, 6, 0), None, id="five", marks=pytest.mark.soak),
    ],
)
def test_finds_the_planted_assembly(
    tmp_path: Path, target: Path, planted: tuple[int, ...], declared: list[str] | None
) -> None:
    changes = {"eagle3_ext": {"sources": declared}} if declared else {}
    folder = write_draft(tmp_path / "draft", num_sources=len(planted), config_changes=changes)
    # With more blocks each of them matters less.
    answers = 24 if len(planted) < 4 else 64
    result = probe(folder, target, features(load(folder, target), planted, answers=answers))
    assert result.best.places == planted
    assert result.best.switches == ()
    right = declared == sources(planted, LAYERS)
    assert result.verdict == ("declared_right" if right else "other_found")
    if right:
        assert result.gain is None
        assert result.declared == result.best
        assert "The assembly is right" in result.advice
    else:
        command = f"--set sources={','.join(sources(planted, LAYERS))}"
        assert f"{command}, or probe with --write." in result.advice
        # What the Hub's cache holds is not written to.
        advice = _advise(result, "config", "org/draft", None)
        assert f"configure org/draft {command} --out DIR, and serve DIR." in advice
        advice = _advise(result, "config", "org/draft", "a branch")
        assert f"configure org/draft {command} --revision 'a branch' --out DIR, and serve DIR." in advice


QUICK_SWITCHES = ("recurrent_state", "vocab_map")
"""The others, and more sources, run with the end-to-end tests: they take half a minute together."""
SWITCHES: list[tuple[str, Any, dict[str, Any]]] = [
    ("residual", "post_norm", {}),
    ("recurrent_state", "post_norm", {}),
    ("rope_theta", 10000.0, {"rope_theta": 3.0}),
    ("vocab_map", "absolute", {}),
    ("norms", "per_source", {"fc_norm": False}),
    ("norms", "concatenation", {"norm_before_fc": False}),
]


@pytest.mark.parametrize(
    ("key", "truth", "changes"),
    [pytest.param(*s, id=f"{s[0]}={s[1]}", marks=[pytest.mark.e2e] * (s[0] not in QUICK_SWITCHES)) for s in SWITCHES],
)
def test_finds_the_switch(tmp_path: Path, target: Path, key: str, truth: Any, changes: dict[str, Any]) -> None:
    folder = write_draft(tmp_path / "draft", config_changes={"rope_theta": 10000.0, **changes})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if key == "vocab_map":
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if key == "recurrent_state":
        # A norm that scales each direction by its own factor, so that it matters which side of it recurs.
        tensors["norm.weight"] = torch.rand(32, generator=torch.Generator().manual_seed(4)) * 3
    if key == "norms":
        g = torch.Generator().manual_seed(5)
        norms = [1 + 0.3 * torch.randn(32, generator=g) for _ in range(3)]
        tensors |= (
            {f"fc_norm.{k}.weight": norm for k, norm in enumerate(norms)}
            if truth == "per_source"
            else {"input_norm.weight": torch.cat(norms)}
        )
    save_file(tensors, file)
    answers = 96 if key == "recurrent_state" else 48
    result = probe(folder, target, features(load(folder, target, **{key: truth}), (2, 4, 5), answers=answers))
    assert dict(result.best.switches) == {key: truth}
    assert key not in result.undecided
    assert result.best.places == (2, 4, 5)
    assert result.verdict == "other_found"
    assert f"--set {key}={truth:g}" in result.advice if key == "rope_theta" else f"--set {key}={truth}" in result.advice


@pytest.mark.parametrize("what", ["another draft", pytest.param("random text", marks=pytest.mark.soak)])
def test_says_when_no_assembly_explains_the_draft(tmp_path: Path, target: Path, what: str) -> None:
    folder = write_draft(tmp_path / "draft")
    if what == "another draft":
        other = write_draft(tmp_path / "other", seed=9)
        planted = features(load(other, target), (0, 4, 7))
    else:
        planted = features(load(folder, target), (0, 4, 7), agree=0.0)
    result = probe(folder, target, planted)
    assert result.verdict == "none_explains"
    assert "No assembly explains this draft" in result.advice


@pytest.mark.e2e
def test_a_weak_draft_is_told_from_a_wrong_assembly(tmp_path: Path, target: Path) -> None:
    folder = write_draft(tmp_path / "draft", config_changes={"eagle3_ext": {"sources": ["embed", "layer3", "layer6"]}})
    result = probe(folder, target, features(load(folder, target), (0, 4, 7), agree=0.25, answers=40))
    assert result.verdict == "declared_right"
    assert "the draft is weak on this text" in result.advice


STUDENT = {3: 9.22, 4: 6.62, 5: 5.51, 8: 4.28, 10: 3.96, 20: 3.42, 50: 3.16}
"""Errors that hold 99.73 % between them, by degrees of freedom: JCGM 100:2008, table G.2."""


@pytest.mark.parametrize(("free", "errors"), STUDENT.items())
def test_few_answers_must_differ_by_more_of_their_errors(free: int, errors: float) -> None:
    g = torch.Generator().manual_seed(free)
    noise = torch.randn(free + 1, generator=g, dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std() * math.sqrt(free + 1)  # the error of its mean is 1
    assert not beyond_chance(noise + 0.98 * errors)
    assert beyond_chance(noise + 1.08 * errors)
    assert not beyond_chance(torch.tensor([5.0]))


def test_says_what_the_texts_do_not_tell(tmp_path: Path, target: Path) -> None:
    """Without a key that heeds its position, no base of the rotary embedding can be told from another."""
    sources_told = {"eagle3_ext": {"sources": ["embed", "layer3", "layer6"]}}
    folder = write_draft(tmp_path / "draft", config_changes={"rope_theta": 10000.0, **sources_told})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "q_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file)
    result = probe(folder, target, features(load(folder, target), (0, 4, 7), answers=32))
    assert result.verdict == "declared_right"
    assert result.undecided["rope_theta"] == (500_000.0, 1_000_000.0)
    assert any("do not tell whether it is rope_theta=500000 or rope_theta=1e+06" in line for line in as_text(result))


def test_names_blocks_that_may_change_places(tmp_path: Path, target: Path) -> None:
    """Two equal blocks of fc add up to the same whichever of two states each of them reads."""
    folder = write_draft(tmp_path / "draft")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    first, _, last = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([first, first, last], dim=1)
    save_file(tensors, file)
    result = probe(folder, target, features(load(folder, target), (0, 4, 7), answers=24))
    one, other, third = result.best.places
    assert ({one, other}, third) == ({0, 4}, 7)
    assert other in result.alike[0]
    assert one in result.alike[1]
    assert not {0, 4} & set(result.alike[2])


def test_ids_are_tried_in_every_convention(tmp_path: Path, target: Path) -> None:
    """A list that its trainer meant as boundaries is read as outputs, and the probe says so."""
    changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}}
    folder = write_draft(tmp_path / "draft", config_changes=changes)
    result = probe(folder, target, features(load(folder, target), (1, 4, 6)))
    assert result.declared is not None
    assert result.declared.places == (2, 5, 7)
    assert result.best.places == (1, 4, 6)
    assert result.verdict == "other_found"
    assert result.gain is not None
    assert result.gain[1] > 0


def test_states_of_another_target_are_refused(tmp_path: Path, target: Path) -> None:
    folder = write_draft(tmp_path / "draft", config_changes={"eagle3_ext": DELETE})
    planted = features(load(folder, target), (0, 4, 5), layers=6, answers=3)
    with pytest.raises(CheckpointError, match="features: got 6 layers of width 32; expected the 8 of width 32"):
        probe(folder, target, planted)
    with pytest.raises(CheckpointError, match="features: got no answer of two tokens or more"):
        probe(folder, target, Features((), LAYERS, 3, ""))


def test_drafts_of_all_switches_hold_one_copy_of_everything(tmp_path: Path, target: Path) -> None:
    folder = write_draft(tmp_path / "draft", tensor_changes={"lm_head.weight": None}, dtype=torch.bfloat16)
    candidates = Candidates(folder, target)
    assert candidates.spec.lm_head == "target"
    one, other = candidates.draft(()), candidates.draft((("residual", "post_norm"),))
    assert one is not other
    assert one.head.data_ptr() == other.head.data_ptr()
    assert one.embed.data_ptr() == other.embed.data_ptr()
    own = {"lm_head.weight": None, "embed_tokens.weight": torch.ones(96, 32).bfloat16(), "d2t": None, "t2d": None}
    sizes = {"tie_word_embeddings": True, "draft_vocab_size": 96}
    tied = Candidates(write_draft(tmp_path / "tied", config_changes=sizes, tensor_changes=own), target)
    assert tied.spec.lm_head == "tied"
    assert tied.draft(()).head.data_ptr() == tied.draft((("residual", "post_norm"),)).head.data_ptr()
    held = {tensor.data_ptr() for tensor in candidates.tensors.values()}
    for draft in (one, other):
        layer = draft._layers[0]
        assert {layer.gate.weight.data_ptr(), layer.down.weight.data_ptr(), draft._fc.weight.data_ptr()} <= held  # type: ignore[union-attr]


def test_another_reading_of_the_vocabulary_takes_other_rows_of_the_targets_head(tmp_path: Path, target: Path) -> None:
    folder = write_draft(tmp_path / "draft", tensor_changes={"lm_head.weight": None})
    candidates = Candidates(folder, target)
    head, ids = load_file(target / "model.safetensors")["lm_head.weight"], candidates.tensors["d2t"]
    for reading, rows in (("offset", ids + torch.arange(len(ids))), ("absolute", ids)):
        assert torch.equal(candidates.draft((("vocab_map", reading),)).head, head[rows])


def test_a_trial_says_how_long_an_answer_takes(tmp_path: Path, target: Path) -> None:
    candidates = Candidates(write_draft(tmp_path / "draft"), target)
    assert 0 < seconds_per_answer(candidates, 4) < 10
