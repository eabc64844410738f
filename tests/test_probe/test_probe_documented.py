"""docs/probe.md against the committed figures it is written from."""

from __future__ import annotations

import json

from benchmarks.probe import measure, render
from benchmarks.stamp import demo_draft

RESULT = json.loads(render.RESULT.read_text())


def test_every_part_was_measured_on_this_draft() -> None:
    parts = [RESULT["default"], RESULT["memory"], RESULT["told"], *RESULT["served"].values()]
    assert {part["draft_sha256"] for part in parts} == {demo_draft()}
    assert all({"date", "machine", "versions"} <= set(part) for part in (*parts, RESULT["pairs"]))


def test_what_the_page_promises() -> None:
    default, served = RESULT["default"], RESULT["served"]
    best = default["result"]["best"]
    assert best["sources"] == measure.RIGHT
    assert best["switches"] == {}
    low, high = best["ci95"]
    assert high - low <= 2 * 0.03
    assert default["text_included"]
    assert default["wall_s"] <= 300
    assert RESULT["memory"]["anonymous_mb"] <= 2048
    assert set(served) == set(measure.SERVED)
    assert all(abs(row["error"]) <= 0.02 for row in served.values())
    assert served["right"]["served"]["watch_rested_on"] is None


def test_the_page_says_what_was_measured() -> None:
    page = render.PAGE.read_text()
    assert render.render(page, json.loads(render.RESULT.read_text())) == page, "run: make docs"
