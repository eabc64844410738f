"""Who may import whom: a scan of every source file, and fresh interpreters in which a package is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_eagle3_ext"

# room -> the rooms it may import (its own is always allowed)
ALLOWED = {
    "__init__": set(),
    "errors": {"spec"},
    "spec": set(),
    "kernels": set(),
    "formats": {"errors", "spec"},
    "assembly": {"errors", "spec", "formats"},
    "reference": {"errors", "spec", "formats", "assembly"},
    "json_text": set(),
    "resave": {"errors", "spec", "formats", "assembly", "json_text"},
    "probe": {"errors", "spec", "formats", "assembly", "reference"},
    "host": {"errors", "spec", "formats", "assembly", "reference", "kernels"},
    "cli": {"errors", "spec", "formats", "assembly", "reference", "resave", "probe", "host"},
}
FOREIGN_TO_KERNELS = {"torch", "triton"} | set(sys.stdlib_module_names)
STANDARD_LIBRARY_ONLY = {"__init__", "spec", "errors", "json_text"}


def module_files() -> dict[str, Path]:
    """Map every module of the package, `kernels` included, to its file."""
    files = {}
    for base, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "kernels", f"{PACKAGE}.kernels")):
        for path in sorted(base.rglob("*.py")):
            parts = [prefix, *path.relative_to(base).with_suffix("").parts]
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


MODULES = module_files()


def room_of(module: str) -> str:
    """Name the room a module of the package stands in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(module: str, source: str, is_package: bool) -> Iterator[tuple[str, ast.AST, bool]]:
    """Yield (absolute name, node, whether it runs when the module is imported) for every import."""
    tree = ast.parse(source)
    lazy = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            lazy.update(id(child) for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        eager = id(node) not in lazy
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node, eager
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            keep = len(parts) + is_package - node.level
            base = ".".join([*parts[:keep], *filter(None, [node.module])]) if node.level else node.module or ""
            for alias in node.names:
                yield f"{base}.{alias.name}", node, eager
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            # importlib.import_module("x"), __import__("x"), find_spec("x")
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in {"import_module", "__import__", "find_spec"}:
                yield str(node.args[0].value), node, eager


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """List every import of one module that the rules forbid."""
    room = room_of(module)
    if room not in ALLOWED:
        return [f"{module}: a room that the import rules do not know; add it to ALLOWED and to the design"]
    found = []
    for name, node, eager in imports_of(module, source, is_package):
        top = name.split(".")[0]
        where = f"{module}:{node.lineno}: imports {name}"
        if top == PACKAGE:
            other = room_of(name)
            if other not in ALLOWED:  # `from sglang_eagle3_ext import __version__`
                continue
            if other != room and other not in ALLOWED[room]:
                found.append(f"{where}; {room} may not know {other}")
            if room == "cli" and other == "host" and eager:
                found.append(f"{where}; cli imports host inside functions only")
        elif top == "sglang" and room != "host":
            found.append(f"{where}; only host/ may name sglang")
        elif room == "kernels" and top not in FOREIGN_TO_KERNELS:
            found.append(f"{where}; kernels know torch and triton only")
        elif room in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names | {"__future__"}:
            found.append(f"{where}; {room} knows the standard library only")
    return found


def test_every_import_follows_the_rules():
    bad = [
        line
        for module, path in MODULES.items()
        for line in violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_eagle3_ext.assembly", "import sglang.srt"),
        ("sglang_eagle3_ext.assembly", "def f():\n    from sglang import x"),
        ("sglang_eagle3_ext.probe", "import importlib\nimportlib.import_module('sglang.srt')"),
        ("sglang_eagle3_ext.assembly", "from sglang_eagle3_ext.reference import load"),
        ("sglang_eagle3_ext.assembly", "from .reference import load"),
        ("sglang_eagle3_ext.formats.eagle", "from .. import assembly"),
        ("sglang_eagle3_ext.reference", "from sglang_eagle3_ext import kernels"),
        ("sglang_eagle3_ext.kernels.fc_proj", "from sglang_eagle3_ext.spec import DraftSpec"),
        ("sglang_eagle3_ext.kernels.fc_proj", "import numpy"),
        ("sglang_eagle3_ext.cli", "from sglang_eagle3_ext.host import contract"),
        ("sglang_eagle3_ext.spec", "import torch"),
        ("sglang_eagle3_ext.utils", "import os"),
    ],
)
def test_the_scan_finds_a_forbidden_import(module: str, source: str):
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sglang_eagle3_ext.cli", "def f():\n    from sglang_eagle3_ext.host import contract"),
        ("sglang_eagle3_ext.host.plugin", "import sglang.srt\nfrom ..kernels import fc_proj"),
        ("sglang_eagle3_ext.kernels.fc_proj", "import torch\nfrom . import norm_concat"),
        ("sglang_eagle3_ext.errors", "from typing import Any\nfrom .spec import Finding"),
    ],
)
def test_the_scan_lets_a_good_import_pass(module: str, source: str):
    assert not violations(module, source)


BLOCK = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        # Absent means not found: torch itself asks whether there is a triton.
        if name.split(".")[0] in {blocked!r}:
            return None
        found = (finder.find_spec(name, path, target) for finder in FINDERS)
        return next((spec for spec in found if spec is not None), None)
FINDERS = list(sys.meta_path)
sys.meta_path[:] = [Block()]
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted(set(m.split(".")[0] for m in sys.modules)))
"""


def import_without(blocked: set[str], modules: list[str]) -> set[str]:
    """Import modules where some packages are missing; return the top-level names that got loaded."""
    code = BLOCK.format(blocked=blocked, modules=modules)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def modules_of(*rooms: str) -> list[str]:
    """List the modules of some rooms."""
    return [module for module in MODULES if room_of(module) in rooms]


def test_everything_but_the_host_imports_without_sglang():
    import_without({"sglang"}, modules_of(*(ALLOWED.keys() - {"host"})))


def test_everything_but_host_and_kernels_imports_without_triton():
    # torch itself looks for triton, so nothing that imports torch may be broken by its absence either
    import_without({"triton", "sglang"}, modules_of(*(ALLOWED.keys() - {"host", "kernels"})))


def test_nouns_formats_and_command_line_import_without_torch():
    loaded = import_without({"torch", "triton", "sglang"}, modules_of("__init__", "spec", "errors", "formats", "cli"))
    assert not loaded & {"torch", "triton", "sglang"}


def test_the_plugin_module_imports_without_torch():
    # SGLang loads it in every one of its processes, also for models that are no concern of ours.
    loaded = import_without({"torch", "triton"}, ["sglang_eagle3_ext.host.plugin"])
    assert "sglang" not in loaded
