"""Hooks that wait for their module; oracle: plain imports of modules written for the test."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sglang_eagle3_ext.host import contract

pytestmark = pytest.mark.host

from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402

from sglang_eagle3_ext.host import seams  # noqa: E402

SOURCE = """
def answer():
    return 1


class Asked:
    def answer(self):
        return 10
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module to hook and one that takes a name from it, not imported yet."""
    (tmp_path / "seam_hooked.py").write_text(SOURCE)
    (tmp_path / "seam_taker.py").write_text("from seam_hooked import answer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(seams.Seams, "_hooks", type(seams.Seams._hooks)(list))
    monkeypatch.setattr(seams.Seams, "_patched", set())
    yield "seam_hooked"
    for name in ("seam_hooked", "seam_taker"):
        sys.modules.pop(name, None)


def add_one(result: int, *_: object) -> int:
    return result + 1


def hooks(module: str) -> list[seams.Hook]:
    names = (f"{module}.answer", f"{module}.Asked.answer")
    return [seams.Hook(name, add_one, HookType.AFTER) for name in names]


def test_a_module_is_hooked_when_it_arrives_and_not_imported_for_it(package: str) -> None:
    seams.on_import({package: partial(seams.place, hooks(package))})
    assert package not in sys.modules
    assert not seams.placed()
    taker = importlib.import_module("seam_taker")
    hooked = sys.modules[package]
    assert taker.answer is hooked.answer
    assert (taker.answer(), hooked.Asked().answer()) == (2, 11)
    assert seams.placed() == {f"{package}.answer", f"{package}.Asked.answer"}
    assert inspect.getsource(hooked) == SOURCE


def test_a_module_that_is_there_is_hooked_at_once(package: str) -> None:
    taker, hooked = importlib.import_module("seam_taker"), sys.modules[package]
    seams.on_import({package: partial(seams.place, hooks(package))})
    assert (taker.answer(), hooked.answer(), hooked.Asked().answer()) == (2, 2, 11)


def test_every_action_is_taken_once(package: str) -> None:
    taken: list[str] = []
    seams.on_import({name: partial(taken.append, name) for name in (package, "seam_taker", "json")})
    assert taken == ["json"]
    importlib.import_module("seam_taker")
    importlib.reload(sys.modules[package])
    assert taken == ["json", package, "seam_taker"]


def test_a_module_that_fails_is_tried_again(package: str, tmp_path: Path) -> None:
    (tmp_path / "seam_hooked.py").write_text("raise RuntimeError('not yet')\n")
    seams.on_import({package: partial(seams.place, hooks(package))})
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(package)
    assert not seams.placed()
    (tmp_path / "seam_hooked.py").write_text(SOURCE)
    importlib.invalidate_caches()
    sys.dont_write_bytecode, kept = True, sys.dont_write_bytecode
    try:
        assert importlib.import_module(package).answer() == 2
    finally:
        sys.dont_write_bytecode = kept


def test_another_plugin_at_the_same_seam_wraps_once(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    seams.on_import({package: partial(seams.place, hooks(package))})

    def ten_times(result: int) -> int:
        return 10 * result

    HookRegistry.register(f"{package}.answer", ten_times, HookType.AFTER)
    HookRegistry.apply_hooks()  # imports the module, so that ours are placed in the middle of it
    assert sys.modules[package].answer() == 20
    assert sys.modules[package].Asked().answer() == 11


def test_every_row_stands_in_the_module_that_its_name_says() -> None:
    for row in contract.ROWS:
        module = importlib.import_module(contract.module_of(row.target))
        first = row.target.removeprefix(f"{module.__name__}.").partition(".")[0]
        assert hasattr(module, first), row.target
        assert f"{module.__name__}.{first}" not in sys.modules, row.target
