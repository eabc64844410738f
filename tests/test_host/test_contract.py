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


class Imports(ast.NodeVisitor):
    """The symbols of SGLang that a module imports when it runs; imports for type checkers touch nothing."""

    def __init__(self) -> None:
        self.symbols: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        """Skip the body under ``if TYPE_CHECKING``."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note ``from sglang.module import symbol``."""
        if (node.module or "").split(".")[0] == "sglang":
            self.symbols |= {f"{node.module}.{alias.name}" for alias in node.names}

    def visit_Import(self, node: ast.Import) -> None:
        """Note ``import sglang.module``."""
        self.symbols |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"}


def test_every_symbol_imported_from_sglang_is_a_row() -> None:
    """What host/ imports from SGLang is a row or holds what a row names, so that nothing is touched in silence."""
    covered = {r.target for r in contract.ROWS}
    missing: dict[str, list[str]] = {}
    for file in sorted(HOST.rglob("*.py")):
        imports = Imports()
        imports.visit(ast.parse(file.read_text()))
        for symbol in imports.symbols:
            if not any(target == symbol or target.startswith(f"{symbol}.") for target in covered):
                missing.setdefault(symbol, []).append(str(file.relative_to(HOST)))
    assert not missing


def test_every_row_says_why() -> None:
    rows = contract.ROWS
    for r in rows:
        assert r.why
        assert r.delete_when
    assert len({r.target for r in rows}) == len(rows)
