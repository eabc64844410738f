"""The demo checks its own claims: accept lengths fail a run, speeds are only remarked upon."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.demo.demo import missed_claims, speed_doubts


def result(
    ours: float | None = 1.9,
    stock: float | None = 1.1,
    speeds: tuple[float, float, float] = (10.0, 8.0, 12.0),
) -> dict[str, Any]:
    lengths = (None, stock, ours)
    names = ("baseline", "stock", "ours")
    return {
        "runs": [
            {"name": n, "spec_accept_length": length, "tok_s": speed}
            for n, length, speed in zip(names, lengths, speeds, strict=True)
        ]
    }


def test_a_good_run_misses_nothing():
    assert missed_claims(result()) == []
    assert missed_claims(result(ours=1.6, stock=1.25)) == []
    assert speed_doubts(result()) == []


@pytest.mark.parametrize(
    ("figures", "starts"),
    [
        ({"ours": 1.59}, ["ours: got accept length 1.59; expected at least 1.6 from this draft"]),
        ({"ours": None}, ["ours: got no drafts at all;"]),
        ({"ours": float("nan")}, ["ours: got accept length nan;"]),
        ({"stock": 1.26}, ["stock: got accept length 1.26; expected at most 1.25"]),
        ({"stock": None}, ["stock: got no drafts at all;"]),
        ({"ours": 1.0, "stock": 2.0}, ["ours: ", "stock: "]),
    ],
)
def test_accept_lengths_are_claims(figures: dict[str, Any], starts: list[str]):
    missed = missed_claims(result(**figures))
    assert len(missed) == len(starts)
    assert all(line.startswith(start) for line, start in zip(missed, starts, strict=True))


@pytest.mark.parametrize(
    ("speeds", "starts"),
    [
        ((10.0, 9.9, 10.0), ["NOT FASTER"]),
        ((10.0, 10.0, 10.1), ["NOT SLOWER"]),
        ((10.0, 11.0, 9.0), ["NOT FASTER", "NOT SLOWER"]),
    ],
)
def test_speeds_are_remarked_upon(speeds: tuple[float, float, float], starts: list[str]):
    assert [line.split(":")[0] for line in speed_doubts(result(speeds=speeds))] == starts
    assert missed_claims(result(speeds=speeds)) == []
