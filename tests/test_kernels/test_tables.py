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
        assert row["bar"] is None or row["longest_chunk_of_ideal"] <= row["bar"], row


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["versions"]["triton"])
def test_no_figure_is_missing(run: dict[str, Any]) -> None:
    for kernel in ("tree_verify_gqa", "tree_verify_mla"):
        rows = [row for row in run["traffic"] if row["kernel"] == kernel]
        for load in ("32768 x 1", "8192 x 8"):
            assert any(load in row["shape"] for row in rows if "total" in row), (kernel, load)
        # Against SGLang's kernel the newest is enough: with an older Triton SGLang's own may not run.
        assert run is not RUNS[0] or any("of_sglang_extend" in row for row in rows), kernel


def test_the_runs_are_whole_and_of_one_tree() -> None:
    assert [run["versions"]["triton"].rpartition(".")[0] for run in RUNS] == ["3.8", "3.7", "3.6"]
    assert not any(run["dirty"] for run in RUNS)
    assert len({run["git_sha"] for run in RUNS}) == 1
    assert {run["kernels_sha256"] for run in RUNS} == {kernel_tables.kernels_sha256()}, "run make kernels anew"
    assert RUNS[0]["seconds"] < 600


@pytest.mark.parametrize("run", RUNS[1:], ids=lambda run: run["versions"]["triton"])
def test_every_triton_gives_the_same(run: dict[str, Any]) -> None:
    mine, newest = kernel_tables.results(run), kernel_tables.results(RUNS[0])
    assert mine.keys() == newest.keys()
    assert {case for case in newest if mine[case] != newest[case]} == set()
    assert kernel_tables.bytes_moved(run) == kernel_tables.bytes_moved(RUNS[0])
