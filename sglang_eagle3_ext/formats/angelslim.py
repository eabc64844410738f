"""AngelSlim: the flat layout under the class of its trainer, the layer called ``midlayer``, no ids.

``rope_theta`` is the target's and is not what the draft was trained with (``Producer.reads_rope_theta``). Uploads that
were renamed to stock's architecture cannot be told from other drafts; ``"producer": "angelslim"`` says so.
"""

from __future__ import annotations

from sglang_eagle3_ext.formats.flat import IDS, claim_flat, nested
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.spec import DraftSpec

ARCHITECTURE = "Eagle3LlamaForCausalLM"


def find_trace(folder: Folder) -> str | None:
    """Name what sets AngelSlim apart from vLLM, which has a class of the same name: the layer's name and no ids."""
    if IDS in folder.config or IDS in nested(folder):
        return None
    is_named = any(name.startswith("midlayer.") for name in folder.tensors)
    return "the file has midlayer.* and config.json no ids, as AngelSlim writes" if is_named else None


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if AngelSlim wrote it."""
    return claim_flat(folder, "angelslim", (ARCHITECTURE,), find_trace, "it has ids, or no midlayer.*")
