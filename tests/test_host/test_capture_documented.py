"""docs/targets.md against the table of target classes and the committed results."""

from __future__ import annotations

from benchmarks import targets
from sglang_eagle3_ext.spec import STOCK_READINGS


def test_every_target_class_has_a_result() -> None:
    assert set(STOCK_READINGS) <= {*targets.read_results()["classes"], targets.BROKEN}


def test_the_page_is_what_table_and_results_say() -> None:
    assert targets.PAGE.read_text() == targets.page(targets.read_results()), (
        "run: python -m benchmarks.targets --render"
    )
