"""``sglang-eagle3 probe`` as it is run: what it prints, writes, keeps and refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft, write_target
from planted import features, load
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_eagle3_ext import resave
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import read_draft
from sglang_eagle3_ext.host import watch
from sglang_eagle3_ext.probe import command
from sglang_eagle3_ext.probe.features import FeatureWriter

WRONG = {"eagle3_ext": {"sources": ["layer1", "layer4", "layer7"]}}


def run(*argv: object) -> int:
    """Run the command as the command line does, with ``configure`` beside it."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    command.add_command(commands)
    resave.add_command(commands)
    args = parser.parse_args(list(map(str, argv)))
    code: int = args.command(args)
    return code


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Write a draft with a wrong declaration, its target and a feature file."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    draft = write_draft(folder / "draft", config_changes=WRONG)
    with FeatureWriter(folder / "features", target="target", steps=3) as writer:
        for answer in features(load(draft, target), (0, 4, 7)).answers:
            writer.append(answer)
    return draft, target, folder / "features"


def test_prints_one_object_with_the_documented_keys(
    pair: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    draft, target, file = pair
    assert run("probe", draft, "--target", target, "--features", file, "--json") == 1
    got: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert got["verdict"] == "other_found"
    assert got["best"]["sources"] == ["embed", "layer3", "layer6"]
    assert got["best"]["boundaries"] == [0, 4, 7]
    assert got["declared"]["boundaries"] == [2, 5, 8]
    low, high = got["best"]["ci95"]
    assert low < got["best"]["accept_length"] < high
    assert got["gain"]["ci95"][0] > 0
    assert set(got["best"]["groups"]) == {"a", "b"}
    assert len(got["best"]["accept_per_position"]) == got["steps"] == 3
    documented = (Path(__file__).parents[2] / "docs/probe.md").read_text()
    assert [key for key in (*got, *got["best"]) if f"`{key}`" not in documented] == []


def test_writes_through_configure(tmp_path: Path, pair: tuple[Path, Path, Path]) -> None:
    _, target, file = pair
    draft = write_draft(tmp_path / "draft", config_changes=WRONG)
    before = (draft / "config.json").read_bytes()
    picture = tmp_path / "curves.png"
    argv = ("probe", draft, "--target", target, "--features", file, "--write", "--plot", picture)
    assert run(*argv) == 1
    spec = read_draft(draft)
    assert spec.sources is not None
    assert [s.text for s in spec.sources] == ["embed", "layer3", "layer6"]
    assert spec.expected is not None
    assert (spec.expected.steps, spec.expected.topk, spec.expected.draft_tokens) == (3, 1, 4)
    assert spec.expected.accept_length > 1.5
    assert (draft / "config.json.bak").read_bytes() == before
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CheckpointError, match=r"curves\.png: is there already"):
        run(*argv)
    assert run("probe", draft, "--target", target, "--features", file) == 0


def test_runs_a_target_and_keeps_its_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    draft = write_draft(tmp_path / "draft")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[i, i + 1] for i in range(8)]))
    argv = ("probe", draft, "--target", tmp_path / "target", "--prompts", prompts, "--max-new-tokens", 8)
    assert run(*argv, "--save-features", tmp_path / "kept", "--write") == 1
    first = capsys.readouterr()
    assert "none_explains: No assembly explains this draft" in first.out
    assert "8 prompts, up to 88 tokens to write" in first.err
    assert "nothing was written" in first.err
    assert not (draft / "config.json.bak").exists()
    assert run("probe", draft, "--target", tmp_path / "target", "--features", tmp_path / "kept") == 1
    assert capsys.readouterr().out == first.out


def test_refuses_all_that_is_wrong_at_once(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(CheckpointError) as caught:
        run("probe", "d", "--target", "t", "--features", "f", "--save-features", tmp_path / "there", "--plot",
            tmp_path / "nowhere" / "p.banana", "--tokens", 9)  # fmt: skip
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert any("p.banana: got a picture of kind .banana; expected one of" in line for line in lines)
    assert any("--tokens: got it with --features" in line for line in lines)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    (tmp_path / "prompts.json").write_text("[[1, 2], [96]]")
    with pytest.raises(CheckpointError, match=r"prompts\.json: got token 96; expected ids below the target's 96"):
        run("probe", write_draft(tmp_path / "draft"), "--target", target, "--prompts", tmp_path / "prompts.json")


def test_a_target_of_another_width_is_named_as_inspect_names_it(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", hidden=64)
    with pytest.raises(CheckpointError, match="got .*target with hidden_size 64"):
        run("probe", write_draft(tmp_path / "draft"), "--target", target, "--features", "f")


def test_states_of_another_target_and_few_steps_are_said(
    tmp_path: Path, pair: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, target, file = pair
    draft = write_draft(tmp_path / "draft", config_changes=WRONG)
    other = tmp_path / "another-model"
    other.symlink_to(target)
    assert run("probe", draft, "--target", other, "--features", file, "--write") == 1
    said = capsys.readouterr().err
    assert "was written by target, got --target" in said
    assert "the watch of a server trusts it as if it were 5000" in said


def test_the_trusted_steps_are_the_watchs() -> None:
    assert command.TRUSTED_STEPS == watch.RECORDED_STEPS
