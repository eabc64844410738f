"""Shared by the kernel tests: memory that a wrapper allocates is poisoned, so that what it fails to write shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

POISON = 101
"""What fresh integers hold; floats hold NaN."""


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the kernels' modules take from ``torch.empty`` and ``torch.empty_like``."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            fresh = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("sglang_eagle3_ext.kernels."):
                fresh.fill_(float("nan") if fresh.is_floating_point() else POISON)
            return fresh

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
