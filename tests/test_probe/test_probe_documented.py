"""docs/probe.md against the committed figures it is written from."""

from __future__ import annotations

import json

from benchmarks.probe import render


def test_the_page_says_what_was_measured() -> None:
    page = render.PAGE.read_text()
    assert render.render(page, json.loads(render.RESULT.read_text())) == page, "run: make docs"
