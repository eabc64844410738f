"""TorchSpec: the flat layout with the version of its exporter.

Layers are called ``midlayer`` or, exported for vLLM, ``layers.0``; the embedding is always stored.
"""

from __future__ import annotations

from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE, claim_flat
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.spec import DraftSpec


def find_trace(folder: Folder) -> str | None:
    """Name what only TorchSpec writes: its version."""
    return "config.json has _torchspec_version" if "_torchspec_version" in folder.config else None


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if TorchSpec exported it."""
    return claim_flat(folder, "torchspec", (STOCK_ARCHITECTURE,), find_trace, "config.json has no _torchspec_version")
