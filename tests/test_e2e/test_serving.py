"""SGLang's own server with a real target and a trained draft; oracles: no speculation, stock, transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorder import TOKENS, Recorder
from servers import Answer

pytestmark = pytest.mark.e2e


def accept_length(answers: list[Answer]) -> float:
    return sum(len(a.ids) for a in answers) / sum(a.verify_steps for a in answers)


def histogram(answers: list[Answer], steps: int) -> list[int]:
    # The server leaves out the counts behind the last one that occurred.
    return [sum(a.histogram[i] for a in answers if i < len(a.histogram)) for i in range(steps + 1)]


@pytest.mark.parametrize("name", ["chain", "tree", "permuted", "plugin_on", "plugin_on_tree", "misread"])
def test_speculation_changes_no_token(answers: Recorder, name: str) -> None:
    plain = [a.ids[:TOKENS] for a in answers("baseline")]
    got = [a.ids for a in answers(name)]
    assert got == plain[: len(got)]
    if name in ("chain", "tree"):
        assert len(got) >= 20


def test_draft_is_served_as_trained_and_stock_misreads_it(answers: Recorder) -> None:
    misread = answers("misread")
    assert accept_length(misread) < 1.25
    assert accept_length(answers("chain")) > 1.6
    assert accept_length(answers("tree")) > accept_length(answers("chain"))


def test_blocks_in_another_order_give_the_same_steps(answers: Recorder) -> None:
    permuted = answers("permuted")
    assert permuted == answers("chain")[: len(permuted)]


@pytest.mark.parametrize(("ours", "stock"), [("plugin_on", "plugin_off"), ("plugin_on_tree", "plugin_off_tree")])
def test_stock_reading_is_bit_identical_to_stock(answers: Recorder, ours: str, stock: str) -> None:
    assert answers(ours) == answers(stock)
    # Both really ran what their name says.
    assert "EAGLE3_EXT_KERNELS=off" in answers.log(ours)
    assert "fc <-" not in answers.log(stock)


def test_reference_predicts_the_served_accept_counts(
    answers: Recorder, prompts: list[list[int]], target: Path, draft: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from sglang_eagle3_ext import reference

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    oracle = reference.load(draft, target=target)
    total = None
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers("baseline"), strict=True):
            tokens = torch.tensor([*prompt, *answer.ids])
            features = reference.capture_hf(model, tokens, [0, 4, 16])
            result = reference.simulate_chain(oracle, tokens, features, len(prompt), steps=3, completion_tokens=TOKENS)
            total = result if total is None else total + result
    assert total is not None
    served = histogram(answers("chain"), steps=3)
    difference = sum(abs(a - b) for a, b in zip(served, total.histogram, strict=True))
    assert difference <= 0.01 * sum(served), f"served {served}, predicted {list(total.histogram)}"


def test_start_up_block_names_the_assembly(answers: Recorder) -> None:
    log = answers.log("chain")
    assert "fc <- [embedding | layer 3 output | layer 15 output]" in log
    assert "[0, 4, 16]" in log
    assert "from eagle3_ext" in log
    assert "fc <- [layer 15 output | embedding | layer 3 output]" in answers.log("permuted")
