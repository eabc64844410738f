"""The demo's figures: rounds, rates and rows, against counting by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.demo import measure
from benchmarks.demo.measure import Answer, accept_rate_per_position, first_difference, sum_up


def answer(
    question: int, round: int, tokens: tuple[int, ...], seconds: float = 1.0, accepted: tuple[int, ...] = ()
) -> Answer:
    """Make an answer whose verify steps accepted the given numbers of drafts."""
    histogram = tuple(accepted.count(k) for k in range(max(accepted) + 1)) if accepted else ()
    return Answer(question, round, (7, 8), tokens, seconds, len(accepted) or None, histogram)


@given(st.lists(st.integers(0, 3), min_size=1))
def test_accept_rate_counts_the_steps_that_reached_a_position(accepted: list[int]):
    histogram = [accepted.count(k) for k in range(max(accepted) + 1)]
    by_hand = [sum(1 for count in accepted if count >= i) / len(accepted) for i in (1, 2, 3)]
    assert accept_rate_per_position(histogram, 3) == pytest.approx(by_hand)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_first_difference_is_where_the_common_prefix_ends(a: list[int], b: list[int]):
    at = first_difference(a, b)
    if at is None:
        assert a == b
    else:
        assert a[:at] == b[:at]
        assert a[at : at + 1] != b[at : at + 1]


def test_row_sums_up_rounds_steps_and_equal_outputs():
    baseline = [
        answer(0, 0, (1, 2, 3)),
        answer(1, 0, (4, 5, 6)),
        answer(0, 1, (1, 2, 3)),
        answer(1, 1, (4, 5, 6)),
    ]
    ours = [
        answer(0, 0, (1, 2, 3), 0.5, accepted=(1, 0)),
        answer(1, 0, (4, 5, 6), 0.5, accepted=(2,)),
        answer(0, 1, (1, 2, 3), 1.0, accepted=(1, 0)),
        answer(1, 1, (4, 9, 6), 2.0, accepted=(0, 1)),
    ]
    row = sum_up("ours", ours, baseline, steps=3)
    assert row.tok_s_rounds == [6.0, 2.0]
    assert row.tok_s == 4.0
    assert row.spec_accept_length == pytest.approx(12 / 7)
    assert row.spec_accept_rate_per_position == pytest.approx([4 / 7, 1 / 7, 0.0])
    assert (row.identical, row.prompts, row.output_tokens) == (0.75, 2, 12)
    assert sum_up("baseline", baseline, baseline, steps=3).spec_accept_length is None


def test_servers_take_turns_and_start_every_answer_without_a_cache(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, str]] = []
    servers = [SimpleNamespace(name=name) for name in ("a", "b", "c")]
    extra = {"meta_info": {"completion_tokens": 1}, "prompt_token_ids": [1], "response_token_ids": [2]}

    def fake_ask(server, question, max_tokens):
        calls.append((server.name, question))
        return SimpleNamespace(model_extra=extra), 0.1

    monkeypatch.setattr(measure, "ask", fake_ask)
    monkeypatch.setattr(measure, "flush_cache", lambda server: calls.append((server.name, "flush")))
    questions = ["q0", "q1", "q2"]
    answers = measure.measure(servers, questions, rounds=2, max_tokens=4, warmup="w")

    assert calls[:3] == [("a", "w"), ("b", "w"), ("c", "w")]
    asked = calls[3:]
    assert all(flush == (name, "flush") for flush, (name, _) in zip(asked[::2], asked[1::2], strict=True))
    asked = asked[1::2]
    by_turn = [asked[i : i + 3] for i in range(0, len(asked), 3)]
    assert [{question for _, question in turn} for turn in by_turn] == [{q} for q in questions * 2]
    # every server is first, second and last equally often
    assert Counter((place, name) for turn in by_turn for place, (name, _) in enumerate(turn)) == Counter(
        {(place, name): 2 for place in range(3) for name in "abc"}
    )
    assert {name: len(given) for name, given in answers.items()} == {"a": 6, "b": 6, "c": 6}
