"""The flat layout: ``LlamaForCausalLMEagle3`` (SpecForge and others) and the EAGLE repository's own files.

All keys stand at the top level of ``config.json``; ids and a few flags may stand in ``eagle_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.layout import read
from sglang_eagle3_ext.formats.reading import Dialect, LayerConfig, convert, report_unread
from sglang_eagle3_ext.spec import DraftSpec, IdMeaning, StockView, Verifier

STOCK_ARCHITECTURE = "LlamaForCausalLMEagle3"

_RENAMED = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
"""Older names, as stock knows them too."""


class FlatConfig(LayerConfig, frozen=True):
    """The keys of the flat layout besides those of the decoder layers."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    eagle_config: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    num_aux_hidden_states: int | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    use_last_layernorm: bool | None = None


class NestedConfig(msgspec.Struct, frozen=True):
    """The keys of ``eagle_config``."""

    use_aux_hidden_state: bool | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    use_last_layernorm: bool | None = None


def canonical(name: str) -> str | None:
    """Give a tensor of the flat layout its canonical name."""
    name = name.removeprefix("model.")
    first, _, rest = name.partition(".")
    return f"{_RENAMED.get(first, first)}.{rest}" if rest else name


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if it is in the flat layout.

    Args:
        folder: the opened checkpoint.

    Returns:
        The draft's facts, or the reason why this dialect refuses the folder.

    Raises:
        CheckpointError: the folder is in this dialect and cannot be read.
    """
    config = folder.config
    if "speculators_model_type" in config:
        return "config.json has speculators_model_type, which the flat layout does not know"
    architectures = config.get("architectures") or []
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture == "LlamaForCausalLM":
        refusal = _plain_llama(folder)
        if refusal is not None:
            return refusal
    elif architecture != STOCK_ARCHITECTURE:
        return (
            f"config.json:architectures is {architectures!r}; the flat layout calls itself {STOCK_ARCHITECTURE}, the "
            "EAGLE repository LlamaForCausalLM"
        )
    place = f"{folder.path}/config.json"
    flat: FlatConfig = convert(config, FlatConfig, place)
    nested: NestedConfig = convert(flat.eagle_config or {}, NestedConfig, f"{place}:eagle_config")
    ids, ids_place, layer_ids = _ids(folder, flat, nested)
    _refuse_unserved_keys(folder)
    report_unread(folder, config, FlatConfig, "")
    report_unread(folder, flat.eagle_config or {}, NestedConfig, "eagle_config.")

    differences: list[str] = []
    if architecture != STOCK_ARCHITECTURE:
        differences.append(f"stock takes architecture {architecture} for a plain language model")
    elif "draft_vocab_size" not in config:
        differences.append("stock stops without the key draft_vocab_size")
    if "target_hidden_size" in config and flat.target_hidden_size is None:
        differences.append("stock stops at target_hidden_size: null")
    flags = {
        key: _either(folder, key, getattr(flat, key), getattr(nested, key))
        for key in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "use_last_layernorm")
    }
    differences += [
        f"stock does not read {key} inside eagle_config"
        for key in ("fc_norm", "norm_output")
        if getattr(nested, key) and not getattr(flat, key)
    ]
    nested_ids = nested.eagle_aux_hidden_state_layer_ids
    uses_aux = nested.use_aux_hidden_state is not False
    return read(
        folder,
        Dialect(
            format="eagle",
            architecture=str(architecture),
            layer=flat,
            layer_place="config.json:",
            canonical=canonical,
            target_hidden_size=flat.target_hidden_size,
            draft_vocab_size=flat.draft_vocab_size,
            ids=ids,
            ids_place=ids_place,
            layer_ids=layer_ids,
            order="ascending",
            num_aux=flat.num_aux_hidden_states,
            uses_aux=uses_aux,
            fc_norm=flags["fc_norm"] or flat.use_aux_norm,
            norm_before_fc=flags["norm_before_fc"],
            norm_output=flags["norm_output"],
            norm_before_residual=flags["norm_before_residual"],
            has_final_norm=flags["use_last_layernorm"] is not False,
            producer=None,
            verifier=Verifier(),
            stock=StockView(
                ids=None if nested_ids is None else tuple(nested_ids),
                uses_aux=uses_aux,
                loads=architecture == STOCK_ARCHITECTURE,
                differences=tuple(differences),
            ),
        ),
    )


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


def _ids(folder: Folder, flat: FlatConfig, nested: NestedConfig) -> tuple[tuple[int, ...] | None, str, IdMeaning]:
    """Read the id list from the two places where it may stand."""
    inner, outer = nested.eagle_aux_hidden_state_layer_ids, flat.eagle_aux_hidden_state_layer_ids
    key = "eagle_aux_hidden_state_layer_ids"
    if inner is not None and outer is not None and inner != outer:
        folder.add(
            "error",
            "ids_disagree",
            f"config.json:{key}",
            f"got {outer} at the top level and {inner} in eagle_config; expected one list. Remove the wrong one, or "
            'declare "eagle3_ext": {"sources": [...]}.',
        )
    if inner is not None:
        return tuple(inner), f"config.json:eagle_config.{key}", "stock"
    if outer is None:
        return None, f"config.json:eagle_config.{key}", "stock"
    if folder.declared.sources is None:
        folder.add(
            "warning",
            "top_level_ids",
            f"config.json:{key}",
            f"got {outer} at the top level, where stock SGLang does not look; the ids were read as boundaries, as "
            "vLLM "
            'does. Settle it with "eagle3_ext": {"sources": [...]}.',
        )
    return tuple(outer), f"config.json:{key}", "boundary"


def _either(folder: Folder, key: str, outer: bool | None, inner: bool | None) -> bool | None:
    """Read a flag that may stand at the top level or in ``eagle_config``."""
    if outer is not None and inner is not None and outer != inner:
        folder.add(
            "error",
            "flags_disagree",
            f"config.json:{key}",
            f"got {outer} at the top level and {inner} in eagle_config; expected one value. Correct one of the two.",
        )
    return outer if inner is None else inner


def _refuse_unserved_keys(folder: Folder) -> None:
    """Report keys that change the draft's computation in a way that nothing here computes."""
    nested = folder.config.get("eagle_config")
    for config, prefix in (
        (folder.config, ""),
        (nested if isinstance(nested, Mapping) else {}, "eagle_config."),
    ):
        for key, inert in (
            ("use_input_layernorm_in_first_layer", (True, None)),
            ("next_layer_regular", (True, None)),
            ("parallel_draft_step", (1, None)),
            ("parallel_draft_heads_num_layers", (0, None)),
        ):
            value = config.get(key)
            if value not in inert:
                folder.add(
                    "error",
                    "unserved_key",
                    f"config.json:{prefix}{key}",
                    f"got {value!r}; expected {inert[0]!r} or nothing. Such a draft cannot be served.",
                )
