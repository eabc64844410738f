"""NVIDIA ModelOpt, its Hugging Face and its Megatron exporter: the flat layout with ModelOpt's own ``eagle_config``.

Later layers have ``input_layernorm`` alone, there is no ``t2d``, and a draft of several layers from Megatron calls
itself ``LlamaForCausalLMEagle3Deep``.
"""

from __future__ import annotations

from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE, architecture, claim_flat, nested
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.spec import DraftSpec

DEEP = "LlamaForCausalLMEagle3Deep"


def find_trace(folder: Folder) -> str | None:
    """Name what only ModelOpt writes: the switch of its MTP variant, or the architecture of deep drafts."""
    if architecture(folder) == DEEP:
        return f"config.json:architectures is {DEEP}, ModelOpt's"
    return (
        "config.json:eagle_config has use_mtp_layernorm, ModelOpt's" if "use_mtp_layernorm" in nested(folder) else None
    )


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if ModelOpt exported it."""
    # ModelOpt trains with outputs, but drafts that were published in this layout list outputs or boundaries.
    return claim_flat(
        folder,
        "modelopt",
        (STOCK_ARCHITECTURE, DEEP),
        find_trace,
        "config.json:eagle_config has no use_mtp_layernorm",
        ids_settled=False,
    )
