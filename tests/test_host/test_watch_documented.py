"""docs/watch.md and its committed figures: of this draft, these thresholds, and as good as the page says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.stamp import demo_draft
from benchmarks.watch import simulate
from benchmarks.watch.measure import walk

RESULT: dict[str, Any] = json.loads(simulate.RESULT.read_text())
GROSS = ("stock_default", "story", "order_210", "last")
WRONG = ("order_021", "order_102", "residual", "recurrent_state")


def test_the_page_shows_the_committed_figures() -> None:
    page = simulate.PAGE.read_text()
    assert simulate.render(page, RESULT) == page, "run: python -m benchmarks.watch.simulate --render"


def test_the_figures_are_of_this_draft_and_these_thresholds() -> None:
    replayed = json.loads(simulate.SEQUENCES.read_text())
    assert replayed["draft_sha256"] == RESULT["draft_sha256"] == demo_draft()
    assert RESULT["settings"].items() >= simulate.thresholds().items()
    for name, shares in RESULT["accept_per_position"].items():
        measured = simulate.recorded(simulate.texts(simulate.SEQUENCES, name))
        assert shares == pytest.approx(measured, abs=1e-4), name


def test_an_answer_is_walked_from_one_verify_step_to_the_next() -> None:
    assert walk([3, 9, 9, 9, 0, 1], completion_tokens=7) == "301"
    assert walk([], completion_tokens=1) == ""


def test_a_verify_step_costs_next_to_nothing() -> None:
    took = RESULT["microseconds_a_step"]
    assert took["1"] < 50, "a verify step takes milliseconds"
    assert took["64"] < 500


def test_what_the_page_promises() -> None:
    """Small errors are not among it: the page says that no threshold on accepted counts tells them apart."""
    fired = RESULT["fired"]
    for kind in ("mixed", "drift", "floor"):
        assert fired[kind]["right"]["30000"] <= 0.01
    for name in GROSS:
        assert fired["floor"][name]["2000"] >= 0.9, name
        assert all(fired[kind][name]["1000"] >= 0.95 for kind in ("mixed", "drift")), name
    for kind in ("mixed", "drift"):
        for name in WRONG:
            assert fired[kind][name]["5000"] >= 0.98, (kind, name)
        assert all(fired[kind][name]["1000"] >= 0.6 for name in ("order_021", "residual", "recurrent_state")), kind
        by_one = [name for name in fired[kind] if name.startswith(("up_", "down_"))]
        assert len(by_one) == 7
        assert max(fired[kind][name]["5000"] for name in by_one) <= 0.4
        assert fired[kind]["up_all"]["30000"] >= 0.85
        assert max(fired[kind][name]["30000"] for name in by_one if name != "up_all") <= 0.3
    assert fired["floor"]["weak"]["30000"] == 0
