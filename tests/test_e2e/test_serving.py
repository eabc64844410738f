"""SGLang's own server with a real target and a trained draft; oracles: no speculation, stock, transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from recorder import TOKENS, Recorder
from servers import Answer

from sglang_eagle3_ext.spec import Boundary

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


@pytest.mark.parametrize("name", ["completed", "exported"])
def test_commands_lead_to_the_same_steps(answers: Recorder, name: str) -> None:
    """``sglang-eagle3 serve``, which adds flags; and stock on what ``export`` wrote of the draft in another order."""
    assert answers(name) == answers("chain")[: len(answers(name))]
    assert ("fc <- [embedding | layer 3 output | layer 15 output]" in answers.log(name)) is (name == "completed")


def test_what_stock_reads_right_by_ids_is_the_same_to_the_token(answers: Recorder) -> None:
    """The draft with ids for stock, on stock's operators, against the same draft as it stands, on ours."""
    by_ids = answers("plugin_off")
    assert by_ids == answers("chain")[: len(by_ids)]


@pytest.mark.parametrize(("name", "boundaries"), [("chain", [0, 4, 16]), ("misread", [2, 15, 27])])
def test_reference_predicts_the_served_accept_counts(
    answers: Recorder, prompts: list[list[int]], target: Path, draft: Path, name: str, boundaries: list[Boundary]
) -> None:
    """Also of stock SGLang, which reads the draft its own way."""
    from transformers import AutoModelForCausalLM

    from sglang_eagle3_ext import reference

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    oracle = reference.load(draft, target=target)
    total = None
    got = answers(name)
    assert len(got) == answers.KINDS[name].prompts
    with torch.inference_mode():
        plain = answers("baseline")[: len(got)]
        for prompt, answer in zip(prompts[: len(got)], plain, strict=True):
            tokens = torch.tensor([*prompt, *answer.ids])
            features = reference.capture_hf(model, tokens, boundaries)
            result = reference.simulate_chain(oracle, tokens, features, len(prompt), steps=3, completion_tokens=TOKENS)
            total = result if total is None else total + result
    assert total is not None
    served = histogram(got, steps=3)
    difference = sum(abs(a - b) for a, b in zip(served, total.histogram, strict=True))
    assert difference <= 0.01 * sum(served), f"served {served}, predicted {list(total.histogram)}"


def test_start_up_block_names_the_assembly(answers: Recorder) -> None:
    log = answers.log("chain")
    assert "fc <- [embedding | layer 3 output | layer 15 output]" in log
    assert "[0, 4, 16]" in log
    assert "from eagle3_ext" in log
    assert "fc <- [layer 15 output | embedding | layer 3 output]" in answers.log("permuted")
    (seconds,) = re.findall(r"equal the residual stream, \d+ tokens, ([0-9.]+) s", log)
    assert float(seconds) < 2


def test_draft_tokens_that_sglang_adjusts_are_said_once(answers: Recorder) -> None:
    (line,) = [line for line in answers.log("wrong").splitlines() if "--speculative-num-draft-tokens: got 7" in line]
    assert "SGLang serves with steps 3, topk 1, draft tokens 4; give 4, or other steps." in line


# ---- the watch ----------------------------------------------------------------------------------------------


def test_the_watch_warns_of_a_wrong_assembly_and_not_of_the_right_one(answers: Recorder) -> None:
    (line,) = [line for line in answers.log("wrong").splitlines() if "sglang-eagle3 probe" in line]
    assert "acceptance of the first draft token, got 0." in line
    assert "expected 0.15 and more" in line
    assert " --target " in line
    assert "sglang-eagle3 probe" not in answers.log("chain")


def test_every_position_is_counted_beside_sglangs_own_metrics(answers: Recorder) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    samples = [s for family in text_string_to_metric_families(answers.metrics("wrong")) for s in family.samples]
    (own,) = [s for s in samples if s.name == "sglang:spec_accept_length"]
    counts = histogram(answers("wrong"), steps=3)
    for kind, expected in (
        ("correct", [sum(counts[i:]) for i in (1, 2, 3)]),
        ("proposed", [sum(counts)] * 3),
    ):
        found = [s for s in samples if s.name == f"sglang:spec_num_{kind}_drafts_per_position_total"]
        assert {s.labels["position"]: s.value for s in found} == dict(zip("123", expected, strict=True)), kind
        assert all(own.labels.items() <= s.labels.items() for s in found)
