"""Where the hooks of this package stand: in each module of SGLang from the moment it has been imported on.

SGLang's own registry imports the module of every hook when it applies them. The launcher and the detokenizer would
import the scheduler's and the workers' modules for it, seconds and hundreds of megabytes that they never need.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType
from typing import Any, ClassVar, Final, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

SOURCE: Final = HookSource("eagle3_ext", "sglang-eagle3-ext")
"""Whose hooks they are, in SGLang's log."""


class Hook(NamedTuple):
    """One function of ours at a seam, and how it wraps what stands there."""

    seam: str
    function: Callable[..., Any]
    kind: HookType


_one_at_a_time = RLock()
"""Several threads may import at once, and a registry is not made for that."""


class Seams(HookRegistry):
    """SGLang's registry with tables of its own, applied as often as a module arrives."""

    _hooks: ClassVar[dict[str, list[tuple[HookType, Callable[..., Any], HookSource | None]]]] = defaultdict(list)
    _patched: ClassVar[set[str]] = set()


def place(hooks: Sequence[Hook]) -> None:
    """Place hooks whose modules are imported.

    Args:
        hooks: all hooks of every seam that is named; a seam is wrapped once.
    """
    with _one_at_a_time:
        for hook in hooks:
            Seams.register(hook.seam, hook.function, hook.kind, source=SOURCE)
        Seams.apply_hooks()


def placed() -> frozenset[str]:
    """Return the seams that are wrapped by now."""
    return frozenset(Seams._patched)


def problems(seams: Collection[str]) -> Iterator[str]:
    """Name seams that another plugin of SGLang's replaces, by which our hooks would never be called.

    Args:
        seams: where hooks stand or will stand.
    """
    for target, hooks in HookRegistry._hooks.items():
        replacing = [source for kind, _, source in hooks if kind is HookType.REPLACE]
        hidden = [seam for seam in seams if seam == target or seam.startswith(f"{target}.")]
        if replacing and hidden:
            whose = replacing[-1].plugin_name if replacing[-1] else "of an unknown name"
            yield (
                f"{target}: replaced by the plugin {whose}; expected SGLang's own, in which this package wraps "
                f"{', '.join(hidden)}. Leave that plugin out of SGLANG_PLUGINS."
            )


def on_import(actions: Mapping[str, Callable[[], None]]) -> None:
    """Act on modules: at once on what is imported, on the others right after they will have been.

    Whoever imports a name from such a module gets what the action put in its place.

    Args:
        actions: by module.
    """
    present = [name for name in actions if name in sys.modules]
    absent = {name: act for name, act in actions.items() if name not in sys.modules}
    if absent:
        sys.meta_path.insert(0, _Arrivals(absent))
    for name in present:
        actions[name]()


class _Arrivals(importlib.abc.MetaPathFinder):
    """Find modules as the other finders do, and act on some of them once each has been executed."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the others find the module, and have it announced."""
        if fullname not in self._actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((s for s in found if s is not None), None)
        if spec is not None and spec.loader is not None:
            # On this one loader, so that the module keeps it, with all that readers of source text ask of it.
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        act = self._actions.pop(module.__name__, None)
        if act is not None:
            act()
