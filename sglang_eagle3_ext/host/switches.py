"""The four environment variables that say how a deployment runs (what a draft *is* lives in its config)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang_eagle3_ext.errors import UnsupportedError

_ON = {"on", "1", "true", "yes"}
_OFF = {"off", "0", "false", "no"}

STOCK_INSTEAD = (
    "serve what `sglang-eagle3 export DRAFT --for stock --target TARGET --out DIR` writes, with EAGLE3_EXT=off"
)
"""How stock SGLang serves a draft right where this package cannot; switching off alone leaves it to be misread."""


@dataclass(frozen=True)
class Switches:
    """What is switched on in this process; every switch is on unless its variable says ``off``.

    Attributes:
        ext: ``EAGLE3_EXT``; off leaves stock SGLang untouched apart from the CPU platform.
        kernels: ``EAGLE3_EXT_KERNELS``; off computes with stock's own operators.
        proof: ``EAGLE3_EXT_PROOF``; off skips the comparison of captured states at start.
        watch: ``EAGLE3_EXT_WATCH``; off skips the acceptance watch while serving.
    """

    ext: bool
    kernels: bool
    proof: bool
    watch: bool


def read_switches() -> Switches:
    """Read the switches from the environment.

    Raises:
        UnsupportedError: a variable holds something that is neither on nor off; names all such variables.
    """
    values: dict[str, bool] = {}
    problems: list[str] = []
    for field, name in (
        ("ext", "EAGLE3_EXT"),
        ("kernels", "EAGLE3_EXT_KERNELS"),
        ("proof", "EAGLE3_EXT_PROOF"),
        ("watch", "EAGLE3_EXT_WATCH"),
    ):
        text = os.environ.get(name, "on").strip().lower()
        if text not in _ON | _OFF:
            problems.append(
                f"environment:{name}: got {os.environ[name]!r}; expected on or off. Unset it or set one of the two."
            )
        values[field] = text not in _OFF
    if problems:
        raise UnsupportedError("\n".join(problems))
    return Switches(**values)
