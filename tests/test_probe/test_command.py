"""``sglang-eagle3 probe`` as it is run: what it prints, writes, keeps and refuses."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
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
from sglang_eagle3_ext.probe import command, search
from sglang_eagle3_ext.probe.features import Engine, Features, FeatureWriter, state_bytes
from sglang_eagle3_ext.reference import capture_hf

WRONG = {"eagle3_ext": {"sources": ["layer1", "layer4", "layer7"]}}


def no_engine(*_: object, **__: object) -> list[list[int]]:
    raise AssertionError("SGLang was asked to write")


def run(*argv: object, engine: Engine = no_engine) -> int:
    """Run the command as the command line does, with ``configure`` beside it."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    command.add_command(commands, engine)
    resave.add_command(commands)
    args = parser.parse_args(list(map(str, argv)))
    code: int = args.command(args)
    return code


def write_target_of_8_layers(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Write a draft with a wrong declaration, its target and a feature file."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    draft = write_draft(folder / "a draft", config_changes=WRONG)
    with FeatureWriter(folder / "features", target="target", steps=3) as writer:
        for answer in features(load(draft, target), (0, 4, 7)).answers:
            writer.append(answer)
    return draft, target, folder / "features"


def test_prints_one_object_with_the_documented_keys(
    pair: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target, file = pair
    bound = search.search_bound(8, 3, search.sizes(len(Features.open(file).answers) // 2))
    monkeypatch.setattr(search, "seconds_per_answer", lambda candidates, tokens: 12 / bound)
    assert run("probe", draft, "--target", target, "--features", file, "--json") == 1
    printed = capsys.readouterr()
    assert "answers, in about 0.2 min; usually less than a tenth" in printed.err
    assert "memory: 0.0 GB for the draft and up to" in printed.err
    got: dict[str, Any] = json.loads(printed.out)
    assert got["verdict"] == "other_found"
    assert f"run sglang-eagle3 configure '{draft}' --set sources=embed,layer3,layer6, or probe" in got["advice"]
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
    write_target_of_8_layers(tmp_path / "target")
    draft = write_draft(tmp_path / "draft")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[i, i + 1] for i in range(8)]))
    argv = ("probe", draft, "--target", tmp_path / "target", "--prompts", prompts, "--max-new-tokens", 8)
    assert run(*argv, "--save-features", tmp_path / "kept", "--write") == 1
    first = capsys.readouterr()
    assert "none_explains: No assembly explains this draft" in first.out
    assert "8 prompts, up to 104 tokens with their answers" in first.err
    assert "nothing was written" in first.err
    assert not (draft / "config.json.bak").exists()
    assert run("probe", draft, "--target", tmp_path / "target", "--features", tmp_path / "kept") == 1
    assert capsys.readouterr().out == first.out


def test_a_disk_without_room_is_said_before_the_target_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target_of_8_layers(tmp_path / "target")
    draft = write_draft(tmp_path / "draft")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[i, i + 1] for i in range(8)]))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr("sglang_eagle3_ext.probe.features.capture", lambda *_, **__: pytest.fail("the target ran"))
    with pytest.raises(CheckpointError, match=r"the states need up to 0\.\d GB, got 0\.0 GB free; expected room"):
        run("probe", draft, "--target", tmp_path / "target", "--prompts", prompts, "--max-new-tokens", 8)


def test_the_size_of_a_large_targets_states_is_what_the_page_says() -> None:
    assert 4096 * state_bytes(61, 7168, torch.bfloat16) == 3_699_376_128
    assert "about 3.7 GB" in (Path(__file__).parents[2] / "docs/probe.md").read_text()


def test_what_another_engine_writes_is_what_transformers_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine in this test is ``generate`` and ``capture_hf``, which share nothing with ``capture``."""
    model = write_target_of_8_layers(tmp_path / "target")
    given: dict[str, Any] = {}

    def engine(
        target: Path, prompts: Sequence[Sequence[int]], new: int, file: Path, at: int, **options: Any
    ) -> list[list[int]]:
        given.update(options, target=target)
        options["say"]("the engine is up")
        answers, row = [], 0
        rows = sum(len(p) + new for p in prompts)
        states = torch.from_file(str(file), shared=True, size=at + rows * 10 * 32 * 4, dtype=torch.uint8)[at:]
        states = states.view(torch.float32).view(rows, 10, 32)
        for prompt in prompts:
            ids = torch.tensor([prompt])
            tokens = model.generate(ids, do_sample=False, max_new_tokens=new, eos_token_id=[], pad_token_id=0)[0]
            here = capture_hf(model, tokens, [*range(9), "final_norm"]).unflatten(1, (10, -1))
            states[row : row + len(tokens) - 1 - left_out] = here[: len(tokens) - 1 - left_out]
            answers.append(tokens[len(prompt) :].tolist())
            row += len(tokens)
            options["progress"](1)
        return answers

    left_out = 0
    draft = write_draft(tmp_path / "draft")
    # From short to long, so that both write them in the same order.
    (tmp_path / "p.json").write_text(json.dumps({"a": [[5], [7, 8], [1, 9, 4]], "b": [[6], [9, 3], [5, 5, 5]]}))
    argv = ("probe", draft, "--target", tmp_path / "target", "--prompts", tmp_path / "p.json", "--max-new-tokens", 8)
    assert run(*argv, "--save-features", tmp_path / "one") == 1
    first = capsys.readouterr()
    code = run(*argv, "--save-features", tmp_path / "two", "--sglang", "--tp-size", "2", engine=engine)
    second = capsys.readouterr()
    assert (code, second.out) == (1, first.out)
    assert "the engine is up" in second.err
    assert given["flags"] == ["--tp-size", "2"]
    assert given["dtype"] == torch.float32
    by_prompt = {tuple(a.tokens[: a.prompt_length].tolist()): a for a in Features.open(tmp_path / "one").answers}
    for answer in Features.open(tmp_path / "two").answers:
        same = by_prompt.pop(tuple(answer.tokens[: answer.prompt_length].tolist()))
        known = len(same.tokens)
        assert answer.tokens[:known].tolist() == same.tokens.tolist()
        assert (answer.completion_tokens, answer.group) == (same.completion_tokens, same.group)
        torch.testing.assert_close(answer.states[: known - 1], same.states[:-1], rtol=1e-4, atol=1e-4)
    assert by_prompt == {}

    left_out = 1
    with pytest.raises(CheckpointError, match="got no state for 1 of 12 tokens; expected all"):
        run(*argv, "--save-features", tmp_path / "three", "--sglang", engine=engine)
    assert not (tmp_path / "three").exists()
    assert list(tmp_path.glob(".three*")) == []


def test_a_draft_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, pair: tuple[Path, Path, Path]
) -> None:
    _, target, _ = pair
    draft = write_draft(tmp_path / "draft")
    draft.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="draft: is read-only"):
            run("probe", draft, "--target", target, "--write")
    finally:
        draft.chmod(0o755)


def test_the_draft_is_read_once(pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take gigabytes."""
    made = []
    read = search.Candidates.__init__

    def count(self: search.Candidates, *args: Any) -> None:
        made.append(args)
        read(self, *args)

    monkeypatch.setattr(search.Candidates, "__init__", count)
    draft, target, file = pair
    run("probe", draft, "--target", target, "--features", file)
    assert len(made) == 1


@pytest.mark.parametrize("device", ["meta", "nonsense"])
def test_a_device_that_computes_nothing_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(CheckpointError, match=f"--device: got {device}, which PyTorch cannot compute on"):
        run("probe", tmp_path, "--target", tmp_path, "--device", device)


def test_progress_is_said_where_there_is_no_terminal(
    pair: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_LINES_S", 0.0)
    draft, target, file = pair
    run("probe", draft, "--target", target, "--features", file)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("search: the draft reads at most ")
    searched = [line for line in lines if re.fullmatch(r"search: [\d,]+ of at most [\d,]+, \d+ s", line)]
    done = [int(line.split()[1].replace(",", "")) for line in searched]
    assert len(done) > 5
    assert done == sorted(done)
    bounds = {line.split(" of at most ")[1].split(",  ")[0].rpartition(", ")[0] for line in searched}
    (bound,) = bounds
    assert done[-1] <= int(bound.replace(",", ""))
    assert any(re.fullmatch(r"measure: \d+ of \d+, \d+ s", line) for line in lines)


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
    assert run("probe", draft, "--target", other, "--features", file, "--write", "--json") == 1
    printed = capsys.readouterr()
    said = printed.err
    assert "got states of target for --target" in said
    written = json.loads((draft / "config.json").read_text())["eagle3_ext"]["expected"]
    assert written["verify_steps"] == json.loads(printed.out)["best"]["verify_steps"]
