"""NeMo Automodel: the target's config with a few keys of the draft's, tensors below ``model.``, no ids.

Its serving helper renames the architecture to stock's and leaves the tensors' names.
"""

from __future__ import annotations

from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE, architecture, claim_flat
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.spec import DraftSpec

ARCHITECTURE = "LlamaEagle3DraftModel"


def find_trace(folder: Folder) -> str | None:
    """Name what only Automodel writes: its class, or ``fc`` inside ``model``."""
    if architecture(folder) == ARCHITECTURE:
        return f"config.json:architectures is {ARCHITECTURE}, Automodel's"
    return "the file has model.fc.weight, as Automodel writes" if "model.fc.weight" in folder.tensors else None


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if NeMo Automodel wrote it."""
    # The config is the target's, and the draft's attention knows no window.
    return claim_flat(
        folder,
        "automodel",
        (ARCHITECTURE, STOCK_ARCHITECTURE),
        find_trace,
        "the file has no model.fc.weight",
        own_windows=False,
    )
