"""Captured answers against transformers' own ``generate`` and ``capture_hf``, one prompt at a time and unpadded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import FAMILIES, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.probe.features import (
    Answer,
    Features,
    FeatureWriter,
    Prompt,
    capture,
    encode,
    load_target,
    read_prompts,
)
from sglang_eagle3_ext.reference import capture_hf

PROMPTS = [[5, 9], [3], [7, 8, 9, 10, 11, 12, 13], [40, 41, 42], [50]]
NEW, STEPS = 9, 2


def captured(model: Any, file: Path, prompts: list[list[int]] = PROMPTS) -> Features:
    with FeatureWriter(file, target="t", steps=STEPS) as writer:
        groups = ["even" if i % 2 == 0 else None for i in range(len(prompts))]
        capture(model, prompts, groups, writer, max_new_tokens=NEW, steps=STEPS)
    return Features.open(file)


def check(features: Features, model: Any, prompts: list[list[int]]) -> None:
    """Compare with what a model writes to each prompt alone, and with its states."""
    assert len(features.answers) == len(prompts)
    assert (features.num_layers, features.steps) == (3, STEPS)
    by_prompt = {tuple(a.tokens[: a.prompt_length].tolist()): a for a in features.answers}
    for i, prompt in enumerate(prompts):
        answer = by_prompt[tuple(prompt)]
        alone = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW + STEPS, eos_token_id=[])[0]
        ends = [k for k in range(len(prompt), len(prompt) + NEW) if alone[k] == 2]
        completion = ends[0] + 1 - len(prompt) if ends else NEW
        assert answer.completion_tokens == completion
        assert answer.tokens.tolist() == alone[: len(prompt) + completion + STEPS].tolist()
        assert answer.group == ("even" if i % 2 == 0 else None)
        expected = capture_hf(model, answer.tokens, [0, 1, 2, 3, "final_norm"]).unflatten(1, (5, -1))
        torch.testing.assert_close(answer.states[:-1], expected[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = make_target(family)
    check(captured(model, tmp_path / "f.safetensors"), model, PROMPTS)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        pytest.param("gemma2", {"sliding_window": 8}, id="gemma2-short_window"),
        pytest.param("gemma2", {"attn_logit_softcapping": 0.05}, id="gemma2-low_cap"),
    ],
)
def test_prompts_may_begin_alike(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """What they begin with runs once where padding behind it does no harm; the target is loaded as the command does."""
    make_target(family, **changes).save_pretrained(tmp_path / "target")
    prompts = [[9, 33, 7, 21, *prompt] for prompt in PROMPTS]
    features = captured(load_target(tmp_path / "target"), tmp_path / "f", prompts)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32, attn_implementation="eager")
    check(features, plain, prompts)


def test_no_token_is_computed_in_vain(tmp_path: Path) -> None:
    model, fed, done = make_target("llama"), 0, 0

    def count(module: Any, args: Any, options: dict[str, Any]) -> None:
        nonlocal fed
        fed += options["input_ids"].numel()

    def count_done(tokens: int) -> None:
        nonlocal done
        done += tokens

    model.register_forward_pre_hook(count, with_kwargs=True)
    prompts = [[9, 33, 7, 21, last] for last in range(30, 38)]
    for name, eos in (("whole", []), ("ended", [2])):
        fed = done = 0
        model.generation_config.eos_token_id = eos
        with FeatureWriter(tmp_path / name, target="t", steps=STEPS) as writer:
            capture(model, prompts, [None] * 8, writer, max_new_tokens=40, steps=STEPS, progress=count_done)
        lengths = [len(a.tokens) - a.prompt_length for a in Features.open(tmp_path / name).answers]
        assert (min(lengths) < 40 + STEPS) == (name == "ended")
        assert fed == 4 + sum(lengths)
        assert done == 8 * 40


def test_an_answer_ends_where_the_target_ends_it(tmp_path: Path) -> None:
    """Any token that the target writes early can be made the end; what follows is kept as far as a chain looks."""
    model = make_target("llama")
    first = captured(model, tmp_path / "a.safetensors", [[5, 9]]).answers[0]
    model.generation_config.eos_token_id = [int(first.tokens[2 + 3]), 63]
    early = captured(model, tmp_path / "b.safetensors", [[5, 9]]).answers[0]
    written = first.tokens[2:].tolist()
    assert early.completion_tokens == written.index(written[3]) + 1 < NEW
    assert early.tokens.tolist() == first.tokens[: 2 + early.completion_tokens + STEPS].tolist()


def answer(length: int, prompt: int = 2, dtype: torch.dtype = torch.float32) -> Answer:
    g = torch.Generator().manual_seed(length)
    states = torch.randn(length, 4, 6, generator=g).to(dtype)
    return Answer(torch.randint(50, (length,), generator=g), states, prompt, length - prompt - 1, "g")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_file_is_one_that_safetensors_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    written = [answer(7, dtype=dtype), answer(5, dtype=dtype)]
    with FeatureWriter(tmp_path / "f", target="t", steps=1) as writer:
        for one in written:
            writer.append(one)
    tensors = load_file(tmp_path / "f")
    assert torch.equal(tensors["states"], torch.cat([a.states for a in written]))
    assert tensors["starts"].tolist() == [0, 7, 12]
    assert torch.equal(tensors["tokens"], torch.cat([a.tokens for a in written]))
    for got, one in zip(Features.open(tmp_path / "f").answers, written, strict=True):
        assert torch.equal(got.tokens, one.tokens)
        assert torch.equal(got.states, one.states)
        assert (got.prompt_length, got.completion_tokens, got.group) == (2, one.completion_tokens, "g")
    with pytest.raises(CheckpointError, match="is there already; expected a free name"):
        FeatureWriter(tmp_path / "f", target="t", steps=1)


def test_nothing_is_left_of_a_capture_that_fails(tmp_path: Path) -> None:
    def write() -> None:
        with FeatureWriter(tmp_path / "f", target="t", steps=1) as writer:
            writer.append(answer(5))
            writer.append(replace(answer(6), states=torch.zeros(6, 3, 6)))

    with pytest.raises(ValueError, match=r"got states \[3, 6\]; expected \[4, 6\]"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_rejects_a_file_whose_parts_do_not_fit(tmp_path: Path) -> None:
    parts = {
        "states": torch.zeros(6, 4, 5),
        "tokens": torch.zeros(5, dtype=torch.int64),
        "starts": torch.tensor([1, 6]),
        "prompt_lengths": torch.tensor([2]),
        "completion_tokens": torch.tensor([2]),
    }
    file = tmp_path / "f"
    save_file(parts, file, metadata={"schema": "1", "steps": "3"})
    with pytest.raises(CheckpointError, match="5 tokens, expected one for each of 6 states; starts that do not begin"):
        Features.open(file)
    save_file({"states": parts["states"]}, file, metadata={"schema": "1", "steps": "3"})
    with pytest.raises(CheckpointError, match="completion_tokens, prompt_lengths, starts, tokens missing"):
        Features.open(file)
    file.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Features.open(file)


def test_the_built_in_prompts_are_varied() -> None:
    prompts = read_prompts()
    assert len({p.content for p in prompts}) == len(prompts) == 296
    assert len({p.group for p in prompts[:8]}) == 8
    assert prompts[:8] != prompts[8:16]


def test_reads_texts_objects_and_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"a": ["x", {"prompt": "y"}, [1, 2]], "b": [[3]]}))
    assert read_prompts(file) == (Prompt("x", "a"), Prompt((3,), "b"), Prompt("y", "a"), Prompt((1, 2), "a"))
    file.write_text(json.dumps([" ", 3, [1, -1], "good"]))
    with pytest.raises(CheckpointError) as caught:
        read_prompts(file)
    assert str(caught.value).count("\n") == 2
    assert encode([Prompt((4, 5))], "nowhere") == [[4, 5]]
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        encode([Prompt("text")], tmp_path)
