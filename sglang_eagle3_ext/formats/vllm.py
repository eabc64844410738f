"""The flat layout under a class name of vLLM's: ids are boundaries, at the top level or in ``eagle_config``."""

from __future__ import annotations

from sglang_eagle3_ext.formats import angelslim
from sglang_eagle3_ext.formats.flat import architecture, read_flat, refuse_architecture
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.spec import DraftSpec

ARCHITECTURES = (
    angelslim.ARCHITECTURE,
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
"""Names under which vLLM knows one and the same class of Llama-type drafts; only the first is shared with AngelSlim."""


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if it was written for vLLM."""
    refusal = refuse_architecture(folder, ARCHITECTURES)
    if refusal is not None:
        return refusal
    if architecture(folder) == angelslim.ARCHITECTURE:
        trace = angelslim.find_trace(folder)
        if trace is not None:
            return trace
    return read_flat(folder, "vllm", layer_ids="boundary")
