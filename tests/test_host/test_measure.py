"""The figures of a comparison: rounds, rates and rows, against counting by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_eagle3_ext.host import measure
from sglang_eagle3_ext.host.measure import (
    Answer,
    Record,
    accept_length,
    accept_rate_per_position,
    first_difference,
    sum_up,
)
from sglang_eagle3_ext.host.servers import Server, ServerError


def answer(question: int, round: int, tokens: tuple[int, ...], accepted: tuple[int, ...] = ()) -> Answer:
    """Make an answer whose verify steps accepted the given numbers of drafts."""
    histogram = tuple(accepted.count(k) for k in range(max(accepted) + 1)) if accepted else ()
    return Answer(question, round, (7, 8), tokens, len(accepted) or None, histogram)


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
    baseline = Record(
        [answer(0, 0, (1, 2, 3)), answer(1, 0, (4, 5, 6)), answer(0, 1, (1, 2, 3)), answer(1, 1, (4, 5, 6))],
        [2.0, 2.0],
    )
    ours = Record(
        [
            answer(0, 0, (1, 2, 3), accepted=(1, 0)),
            answer(1, 0, (4, 5, 6), accepted=(2,)),
            answer(0, 1, (1, 2, 3), accepted=(1, 0)),
            answer(1, 1, (4, 9, 6), accepted=(0, 1)),
        ],
        [1.0, 3.0],
    )
    row = sum_up("ours", ours, baseline, steps=3)
    assert row.tok_s_rounds == [6.0, 2.0]
    assert row.tok_s == 4.0
    assert row.spec_accept_length == pytest.approx(12 / 7)
    assert row.spec_accept_rate_per_position == pytest.approx([4 / 7, 1 / 7, 0.0])
    assert (row.identical, row.prompts, row.output_tokens, row.verify_steps) == (0.75, 2, 12, 7)
    # 7 verify steps in 4 s against 12 tokens in 4 s
    assert row.cycle_cost == pytest.approx(12 / 7)
    base = sum_up("baseline", baseline, baseline, steps=3)
    assert base.spec_accept_length is base.cycle_cost is base.verify_steps is None


def test_accept_length_of_no_drafts_is_unknown():
    assert accept_length([answer(0, 0, (1, 2))]) is None
    assert accept_length([]) is None
    assert accept_length([answer(0, 0, (1, 2, 3), accepted=(0, 1))]) == 1.5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace what goes over the wire by a list of (server, question or "flush")."""
    seen: list[tuple[str, str]] = []
    extra = {"meta_info": {"completion_tokens": 1}, "prompt_token_ids": [1], "response_token_ids": [2]}

    def fake_ask(client, question, max_tokens):
        seen.append((client, question))
        return SimpleNamespace(model_extra=extra)

    monkeypatch.setattr(measure, "client_of", lambda server: server.name)
    monkeypatch.setattr(measure, "ask", fake_ask)
    monkeypatch.setattr(measure, "flush_cache", lambda server: seen.append((server.name, "flush")))
    return seen


SERVERS = [SimpleNamespace(name=name) for name in ("a", "b", "c")]
QUESTIONS = ["q0", "q1", "q2"]


def test_servers_take_turns_and_start_every_answer_without_a_cache(calls: list[tuple[str, str]]):
    records = measure.measure(SERVERS, QUESTIONS, rounds=2, max_tokens=4, warmup="w")

    assert calls[:3] == [("a", "w"), ("b", "w"), ("c", "w")]
    asked = calls[3:]
    assert all(flush == (name, "flush") for flush, (name, _) in zip(asked[::2], asked[1::2], strict=True))
    asked = asked[1::2]
    by_turn = [asked[i : i + 3] for i in range(0, len(asked), 3)]
    assert [{question for _, question in turn} for turn in by_turn] == [{q} for q in QUESTIONS * 2]
    # every server is first, second and last equally often
    assert Counter((place, name) for turn in by_turn for place, (name, _) in enumerate(turn)) == Counter(
        {(place, name): 2 for place in range(3) for name in "abc"}
    )
    assert {name: len(record.answers) for name, record in records.items()} == {"a": 6, "b": 6, "c": 6}
    assert all(len(record.seconds) == 2 and min(record.seconds) > 0 for record in records.values())


def test_several_at_a_time_the_servers_take_turns_at_every_round(calls: list[tuple[str, str]]):
    records = measure.measure(SERVERS, QUESTIONS, rounds=3, max_tokens=4, warmup="w", concurrency=2)

    assert Counter(calls[:6]) == Counter({(name, "w"): 2 for name in "abc"})
    blocks = [calls[i : i + 4] for i in range(6, len(calls), 4)]
    assert all(block[0] == (block[0][0], "flush") for block in blocks)
    assert all(set(block[1:]) == {(block[0][0], q) for q in QUESTIONS} for block in blocks)
    assert "".join(block[0][0] for block in blocks) == "abcbcacab"
    for record in records.values():
        assert [(a.round, a.question) for a in record.answers] == [(r, q) for r in range(3) for q in range(3)]


def test_a_server_that_gives_no_answer_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(client, question, max_tokens):
        raise ConnectionError("gone")

    monkeypatch.setattr(measure, "client_of", lambda server: None)
    monkeypatch.setattr(measure, "ask", refuse)
    (tmp_path / "log").write_text("the reason\n")
    with pytest.raises(ServerError, match="(?s)'a' gave no answer, got ConnectionError: gone.*the reason"):
        measure.measure([Server("a", [], tmp_path / "log")], QUESTIONS, rounds=1, max_tokens=4, warmup="w")
