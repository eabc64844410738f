"""Drafts with DeepSeek's multi-head latent attention (MLA): the flat layout with MLA's keys and tensors.

TorchSpec, ModelOpt and NeMo Automodel write them; their traces are those of their other drafts. TorchSpec trains with
outputs and published drafts of it list boundaries, so that no trace settles what an id means.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.flat import (
    STOCK_MLA_ARCHITECTURE,
    canonical,
    nested,
    read_flat,
    refuse_architecture,
)
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.reading import LatentConfig
from sglang_eagle3_ext.formats.traces import declared_producer, find_traces
from sglang_eagle3_ext.spec import DraftSpec

ARCHITECTURES = (
    STOCK_MLA_ARCHITECTURE,
    "Eagle3DeepseekV3ForCausalLM",
    "DeepSeekForCausalLMEagle3",
    "DeepseekV3Eagle3DraftModel",
)
"""Stock's name and vLLM's further one for the same class; TorchSpec's class and Automodel's."""

_EARLY_KV = ".self_attn.kv_a_proj."
"""What TorchSpec called ``kv_a_proj_with_mqa`` while it rotated halves of a head rather than neighbours."""


class DeepseekConfig(LatentConfig, frozen=True):
    """The keys of an MLA draft that other drafts do not have.

    ``mla_use_output_gate`` is Kimi-K3's gate on the output of attention. ``mla_use_nope`` says of that target that it
    rotates nothing; TorchSpec copies it, and its drafts are rotated all the same.
    """

    mla_use_nope: bool | None = None
    mla_use_output_gate: bool | None = None


def _canonical(name: str) -> str | None:
    """Give a tensor its canonical name."""
    home = canonical(name)
    return None if home is None else home.replace(_EARLY_KV, ".self_attn.kv_a_proj_with_mqa.")


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if it holds an MLA draft."""
    refusal = refuse_architecture(folder, ARCHITECTURES)
    if refusal is not None:
        return refusal
    traces = find_traces(folder)
    producer = declared_producer(folder)
    if producer in traces:
        traces = {producer: traces[producer]}
    traced = list(traces)
    if len(traced) > 1:
        folder.add(
            "error",
            "dialect_ambiguous",
            "config.json",
            f"bears the traces of {' and '.join(traced)}, got {', '.join(traces.values())}; expected those of one "
            "trainer. Remove the keys of the other, or name the trainer in eagle3_ext.producer.",
        )
        raise CheckpointError.from_findings(folder.findings)
    if folder.config.get("mla_use_output_gate"):
        folder.add(
            "error",
            "unserved_key",
            "config.json:mla_use_output_gate",
            "got true; expected false or nothing. A draft with a gate on its attention cannot be served.",
        )
    if folder.config.get("mla_use_nope"):
        folder.add(
            "warning",
            "mla_use_nope",
            "config.json:mla_use_nope",
            "got true, which TorchSpec copies from the target and does not read; the draft is rotated, as there and in "
            "stock. A draft that was trained without rotation cannot be served.",
        )
    return read_flat(
        folder,
        "deepseek",
        producer=traced[0] if traced else None,
        ids_settled=False,
        own_windows="automodel" not in traced,
        latent=DeepseekConfig,
        rename=_canonical,
        rope_halves=any(_EARLY_KV in name for name in folder.tensors),
        stock_differences=tuple(_stock_differences(folder)),
    )


def _stock_differences(folder: Folder) -> Iterator[str]:
    """Say in sentences what stock's MLA class makes of the folder otherwise."""
    names = folder.tensors
    if folder.config.get("norm_before_fc") or nested(folder).get("norm_before_fc"):
        yield "stock does not apply norm_before_fc in an MLA draft"
    if folder.config.get("draft_vocab_size") is None and "lm_head.weight" in names:
        yield "stock puts the target's head in the place of the draft's own, since draft_vocab_size is absent"
    if any(_EARLY_KV in name for name in names):
        yield "stock drops kv_a_proj and leaves the projection of keys and values random"
    if any(name.startswith("model.") for name in names):
        yield "stock drops the tensors below model."
