"""docs/targets.md against the table of target classes and the committed results."""

from __future__ import annotations

from benchmarks import targets
from sglang_eagle3_ext.spec import STOCK_READINGS


def test_every_target_class_has_a_result() -> None:
    assert set(STOCK_READINGS) <= set(targets.read_results()["classes"]["classes"])


def test_no_figure_lacks_its_machine() -> None:
    results = targets.read_results()
    for part in targets.PARTS:
        assert {"date", "machine", "versions"} <= set(results[part]), f"run: python -m benchmarks.targets --only {part}"


def test_the_page_is_what_table_and_results_say() -> None:
    assert targets.PAGE.read_text() == targets.page(targets.read_results()), (
        "run: python -m benchmarks.targets --render"
    )
