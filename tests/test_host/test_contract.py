"""The contract with SGLang; oracle: the installed SGLang itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_eagle3_ext.host import contract
from sglang_eagle3_ext.host.contract import Row

pytestmark = pytest.mark.host

HOST = Path(contract.__file__).parent


def test_installed_sglang_keeps_the_contract() -> None:
    assert contract.problems() == []


def row(target: str, *parameters: str) -> tuple[Row, ...]:
    return (Row(target, "call", parameters, "start", "test the check", "never"),)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param(row("sglang.srt.server_args.gone"), "sglang.srt.server_args.gone: not found", id="name"),
        pytest.param(row("sglang.srt.gone.thing"), "sglang.srt.gone.thing: not found", id="module"),
        pytest.param(row(contract.CAPTURE_SEAM, "model", "boundaries"), "boundaries", id="parameter"),
    ],
)
def test_reports_what_is_missing(rows: tuple[Row, ...], words: str) -> None:
    problems = contract.problems(rows=rows)
    assert len(problems) == 1
    assert words in problems[0]


def test_every_symbol_imported_from_sglang_is_a_row() -> None:
    """A module of SGLang that host/ imports from must be covered by a row, so that nothing is touched in silence."""
    covered = {r.target for r in contract.ROWS}
    touched = set()
    for file in HOST.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                touched |= {(f"{node.module}.{alias.name}", file.name) for alias in node.names}
    missing = {
        (symbol, file)
        for symbol, file in touched
        if not any(t == symbol or t.startswith(f"{symbol}.") for t in covered)
    }
    assert not missing


def test_every_row_says_why() -> None:
    for r in contract.ROWS:
        assert r.why
        assert r.delete_when
    assert len({r.target for r in contract.ROWS}) == len(contract.ROWS)
