"""The committed figures of the kernels: within their bars, equal in every version of Triton, and those of the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import kernel_tables

RUNS: list[dict[str, Any]] = json.loads(kernel_tables.RESULT.read_text())["runs"]


def test_the_page_shows_the_committed_figures() -> None:
    page = kernel_tables.PAGE.read_text()
    assert kernel_tables.render(page, {"runs": RUNS}) == page


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["versions"]["triton"])
def test_every_figure_is_within_its_bar(run: dict[str, Any]) -> None:
    assert run["tests"]["failed"] == 0
    for row in run["errors"]:
        assert row.get("bar") is None or row["error"] <= row["bar"], row
    for row in run["traffic"]:
        for figure in ("total", "of_sglang_extend"):
            assert row.get("bar") is None or row.get(figure, 0) <= row["bar"], row
    for row in run["balance"]:
        assert row["longest_chunk_of_ideal"] <= row["bar"], row


@pytest.mark.parametrize("run", RUNS[1:], ids=lambda run: run["versions"]["triton"])
def test_every_triton_gives_the_same(run: dict[str, Any]) -> None:
    mine, newest = kernel_tables.results(run), kernel_tables.results(RUNS[0])
    assert mine.keys() == newest.keys()
    assert {case for case in newest if mine[case] != newest[case]} == set()
    assert kernel_tables.bytes_moved(run) == kernel_tables.bytes_moved(RUNS[0])
