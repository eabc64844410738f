"""The flat layout without a trace of who wrote it: SpecForge and others, and the EAGLE repository's own files.

An id means what stock SGLang reads on the target at hand; ``producer`` in ``eagle3_ext`` settles what is left open.
"""

from __future__ import annotations

from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE, architecture, canonical, read_flat, refuse_architecture
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.traces import find_traces
from sglang_eagle3_ext.spec import DraftSpec

_NO_EAGLE3 = {
    "Glm4MoeForCausalLMEagle3": "its MLP is a mixture of experts",
    "KimiK3Eagle3DraftModel": "its attention is MLA with an output gate and without a rotary embedding",
    "LlamaForCausalLMEagle": "an EAGLE-1 draft",
    "PEagleDraftModel": "P-EAGLE, which drafts all tokens in one pass",
    "PeagleLlamaForCausalLM": "P-EAGLE, which drafts all tokens in one pass",
}
"""Drafts of a kin that no dialect here serves."""


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if it is in the flat layout and no trace tells the trainer."""
    if "speculators_model_type" in folder.config:
        return "config.json has speculators_model_type, which the flat layout does not know"
    refusal = refuse_architecture(folder, (STOCK_ARCHITECTURE, "LlamaForCausalLM"))
    if refusal is not None:
        kin = _NO_EAGLE3.get(architecture(folder) or "")
        return f"{refusal}{f' ({kin})' if kin else ''}"
    traces = find_traces(folder)
    if traces:
        return next(iter(traces.values()))
    if architecture(folder) == "LlamaForCausalLM" and not folder.unreadable:
        refusal = _plain_llama(folder)
        if refusal is not None:
            return refusal
    return read_flat(folder, "eagle")


def _plain_llama(folder: Folder) -> str | None:
    """Tell an EAGLE-3 draft that calls itself a Llama from a Llama and from an EAGLE-1 draft."""
    by_name = {canonical(name): info for name, info in folder.tensors.items()}
    query = by_name.get("layers.0.self_attn.q_proj.weight")
    hidden = folder.config.get("hidden_size")
    if "fc.weight" not in by_name:
        return "architecture LlamaForCausalLM and no fc.weight: a plain language model, not a draft"
    if query is None or len(query.shape) != 2 or query.shape[1] != 2 * (hidden if isinstance(hidden, int) else 0):
        return "its attention does not read 2 x hidden_size columns, as EAGLE-3 does: an EAGLE-1 draft"
    return None
