"""Every finding code of the source has its entry in docs/findings.md and a test that provokes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sglang_eagle3_ext.assembly import AMBIGUITIES

ROOT = Path(__file__).parents[2]
# Callee -> the position of the code among its arguments.
REPORTERS = {"Finding": 1, "add": 1, "fatal": 0, "read_json": 1}


def codes_in_source() -> set[str]:
    """Collect the codes from the calls that report them, and from the table of the vocabulary map's problems."""
    found: set[str] = set()
    package = ROOT / "sglang_eagle3_ext"
    files = [*(package / "formats").glob("*.py"), package / "assembly.py", package / "host/launcher.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in REPORTERS and len(node.args) > REPORTERS[name]:
                    found |= {
                        part.value
                        for part in ast.walk(node.args[REPORTERS[name]])
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    }
            elif isinstance(node, ast.FunctionDef) and node.name == "_map_problem":
                found |= {
                    part.value.elts[0].value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Return) and isinstance(part.value, ast.Tuple)
                }
    return found


def entries() -> dict[str, str]:
    text = (ROOT / "docs/findings.md").read_text()
    parts = re.split(r"^### `(\w+)`\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_scan_finds_codes():
    assert {
        "fc_width",
        "config_unreadable",
        "vocab_map_repeats",
        "target_unreadable",
        "not_finite",
    } <= codes_in_source()


def test_every_code_has_an_entry_and_no_entry_is_left_over():
    assert set(entries()) == codes_in_source()


def test_the_entries_mark_the_ambiguities():
    assert {code for code, text in entries().items() if "**ambiguity**" in text} == AMBIGUITIES


def test_every_code_is_provoked_by_a_test():
    texts = [
        path.read_text()
        for room in ("test_formats", "test_assembly", "test_cli", "test_host")
        for path in (ROOT / "tests" / room).glob("test_*.py")
        if path != Path(__file__)
    ]
    words = set(re.findall(r"\w+", "".join(texts)))
    assert codes_in_source() - words == set()
