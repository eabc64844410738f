"""The text that the demo's draft is trained on: what the target answers, and how it is kept; oracle: transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoints import write_target

TRAIN = Path(__file__).parents[2] / "benchmarks" / "demo" / "train"
PROMPTS = [[1, 7, 9, 11], [1, 7, 30], [1, 7, 9, 44, 45, 46, 47]]
LAYERS = 17  # the draft reads the states before layers 0, 4 and 16


@pytest.fixture(scope="module")
def train() -> Iterator[dict[str, ModuleType]]:
    """The scripts, which stand beside one another and import each other by name."""
    sys.path.insert(0, str(TRAIN))
    try:
        import answers
        import generate
        import target

        yield {"answers": answers, "generate": generate, "target": target}
    finally:
        sys.path.remove(str(TRAIN))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(
        tmp_path_factory.mktemp("target"), num_layers=LAYERS, config_changes={"tie_word_embeddings": True}
    )


def test_the_committed_file_holds_what_the_page_says(train: dict[str, ModuleType]) -> None:
    chats = train["answers"].chats(TRAIN / "answers.npz")
    generated = sum(len(answer) for _, answer in chats)
    assert f"{generated:,} tokens more".replace(",", " ") in (TRAIN / "README.md").read_text()
    assert all(prompt and answer and max(prompt + answer) < 49152 for prompt, answer in chats)


def test_the_target_answers_as_transformers_does(train: dict[str, ModuleType], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight  # the demo's target has one matrix for both
    for answer in train["target"].Target(folder, 4).answer(PROMPTS, 9):
        ids = torch.tensor([answer.prompt + answer.completion])
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        chosen = out.logits[0, len(answer.prompt) - 1 : -1].argmax(-1)
        assert chosen.tolist() == answer.completion
        states = torch.cat([out.hidden_states[b][0] for b in (0, 4, 16)], -1)
        rows = len(ids[0]) - 1
        torch.testing.assert_close(answer.features[:rows].float(), states[:rows], rtol=0.01, atol=0.01)
        torch.testing.assert_close(answer.final[:rows].float(), out.hidden_states[-1][0, :rows], rtol=0.01, atol=0.01)


def test_draws_are_those_of_the_targets_distribution(train: dict[str, ModuleType], folder: Path) -> None:
    target = train["target"].Target(folder, 4)

    def firsts(temperature: float, seed: int) -> list[int]:
        return [a.completion[0] for a in target.answer([PROMPTS[0]] * 2000, 1, temperature, seed)]

    assert firsts(0.7, 1) == firsts(0.7, 1) != firsts(0.7, 2)
    (greedy,) = target.answer([PROMPTS[0]], 1)
    logits = greedy.final[len(PROMPTS[0]) - 1].float() @ target.embedding.T
    expected = (logits / 0.7).softmax(-1)
    seen = torch.bincount(torch.tensor(firsts(0.7, 3)), minlength=len(expected)) / 2000
    assert float((seen - expected).abs().max()) < 5 * float((expected * (1 - expected) / 2000).sqrt().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_made_again_from_ids(
    train: dict[str, ModuleType], folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    answers, generate, target = train["answers"], train["generate"], train["target"].Target(folder, 4, dtype)
    said = target.answer(PROMPTS, 9, 0.7, 5)
    generate.store(tmp_path / "sampled-00000.safetensors", said[:2])
    generate.store(tmp_path / "questions-00003.safetensors", said[2:])
    generate.store(tmp_path / "validation-00000.safetensors", said)  # which is not to be learned from
    kept = tmp_path / "answers.npz"
    assert answers.keep(tmp_path, kept) == (3, sum(len(a.completion) for a in said))
    chats = answers.chats(kept)
    assert sorted(chats) == sorted((a.prompt, a.completion) for a in said)
    again = target.answer([prompt + completion for prompt, completion in chats], 1)
    for (prompt, completion), made in zip(chats, again, strict=True):
        (first,) = (a for a in said if (a.prompt, a.completion) == (prompt, completion))
        rows = len(prompt) + len(completion) - 1
        for name in ("features", "final"):
            one, two = (getattr(a, name)[:rows].float() for a in (first, made))
            torch.testing.assert_close(one, two, rtol=0.05, atol=0.05 * float(one.abs().max()))
