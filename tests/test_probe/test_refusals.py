"""What ``sglang-eagle3 probe`` cannot do ends in one clear line, before the target writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_draft, write_target
from planted import features, load
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from sglang_eagle3_ext.cli import main
from sglang_eagle3_ext.probe.features import FeatureWriter


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run ``probe``, which must refuse; return its one line."""
    assert main(["probe", *map(str, argv)]) == 1
    out, err = capsys.readouterr()
    *others, line = err.splitlines()
    assert out == ""
    assert not [other for other in others if other.strip() and "Loading weights" not in other]  # transformers' bar
    return line.removeprefix("sglang-eagle3: ")


@pytest.mark.parametrize("word", ["abc", "1.5", "", "9" * 5000], ids=["text", "fraction", "nothing", "endless"])
@pytest.mark.parametrize("flag", ["--tokens", "--max-new-tokens", "--steps", "--seed"])
def test_a_word_that_is_no_number(capsys: pytest.CaptureFixture[str], flag: str, word: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["probe", "d", "--target", "t", flag, word])
    assert capsys.readouterr().err.endswith(
        f"error: argument {flag}: got {word[:40]!r}; expected a whole number. Write one.\n"
    )


def test_prompts_of_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_target(tmp_path / "target")
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1}, []))  # silent about what it does not know
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(target)
    prompts = tmp_path / "prompts.json"
    prompts.write_text('["a b", "?", [3], "!"]')
    line = refused(capsys, write_draft(tmp_path / "draft"), "--target", target, "--prompts", prompts)
    assert line == (
        f'--prompts: got 2 of which {target} makes no token: "?", "!"; expected at least one token of each. Leave them '
        "out, or give lists of token ids."
    )


def test_a_target_without_a_module_named_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, prompts = tmp_path / "target", tmp_path / "prompts.json"
    config = GPTNeoXConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4
    )
    GPTNeoXForCausalLM(config).save_pretrained(target)
    prompts.write_text("[[1, 2]]")
    capsys.readouterr()
    own = {"embed_tokens.weight": torch.ones(96, 32)}
    draft = write_draft(tmp_path / "draft", tensor_changes=own)
    line = refused(capsys, draft, "--target", target, "--prompts", prompts)
    assert line.startswith(
        f"{target}: got GPTNeoXModel without a module named norm; expected one behind the last layer"
    )
    assert line.endswith(
        "Let SGLang run this target (probe --sglang), or capture its states elsewhere (probe --features)."
    )


def test_more_blocks_than_there_are_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_target(tmp_path / "target", num_layers=2)
    draft = write_draft(tmp_path / "draft", num_sources=5)
    line = refused(capsys, draft, "--target", target)
    assert line.startswith(f"{draft}:fc.weight: got 5 blocks of columns; expected at most 4, one for each boundary of ")
    assert line.endswith(" Check --target.")


@pytest.mark.parametrize("steps", [65, 10**30])
def test_chains_longer_than_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    assert refused(capsys, tmp_path, "--target", tmp_path, "--steps", steps) == (
        f"--steps: got {steps}; expected at most 64, the tokens of an answer. Give fewer, or more --max-new-tokens."
    )


def test_chains_longer_than_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft, file = write_target(tmp_path / "target"), write_draft(tmp_path / "draft"), tmp_path / "features"
    with FeatureWriter(file, target="target", steps=3) as writer:
        for answer in features(load(draft, target), (0, 4, 7)).answers:
            writer.append(answer)
    assert main(["probe", str(draft), "--target", str(target), "--features", str(file), "--steps", str(10**12)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"sglang-eagle3: --steps: got {10**12} with texts of up to ")
    assert line.endswith(" tokens; expected chains that are shorter. Give fewer.")


def test_a_feature_file_without_an_answer_to_draft_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = write_target(tmp_path / "target", num_layers=8), write_draft(tmp_path / "draft")
    with FeatureWriter(tmp_path / "features", target="target", steps=3) as writer:
        for answer in features(load(draft, target), (0, 4, 7), answers=2).answers:
            writer.append(replace(answer, completion_tokens=1))
    line = refused(capsys, draft, "--target", target, "--features", tmp_path / "features")
    assert "features: got no answer of two tokens or more" in line


def test_a_draft_that_cannot_be_run_is_refused_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_target(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("sglang_eagle3_ext.probe.features.load_target", load_target)
    target = write_target(tmp_path / "target", num_layers=8)
    draft = write_draft(tmp_path / "draft", config_changes={"intermediate_size": 41})
    assert main(["probe", str(draft), "--target", str(target)]) == 1
    assert "by the config. Correct either one." in capsys.readouterr().err
