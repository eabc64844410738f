"""The flat layout: all keys at the top level of ``config.json``; ids and a few flags also inside ``eagle_config``.

Most trainers write it. What they share is read here; what one of them means by it stands in the file of its dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from sglang_eagle3_ext.formats.eagle3_ext import PRODUCERS
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.layout import read
from sglang_eagle3_ext.formats.reading import Dialect, LatentConfig, LayerConfig, convert, report_unread
from sglang_eagle3_ext.spec import DraftSpec, IdMeaning, StockView, Verifier

STOCK_ARCHITECTURE = "LlamaForCausalLMEagle3"
STOCK_MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
IDS = "eagle_aux_hidden_state_layer_ids"

_RENAMED = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
"""Older names, as stock knows them too."""

_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")

_UNSERVED: dict[str, tuple[object, ...]] = {
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
    "parallel_drafting": (False, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_mtp_layernorm": (False, None),
}
"""Keys that change the draft's computation in a way that nothing here computes, and the values that do not."""


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


def architecture(folder: Folder) -> str | None:
    """Name the first architecture of a config, ``None`` where it names none."""
    names = folder.config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else None


def nested(folder: Folder) -> Mapping[str, Any]:
    """Give the ``eagle_config`` object; empty where there is none."""
    value = folder.config.get("eagle_config")
    return value if isinstance(value, Mapping) else {}


def refuse_architecture(folder: Folder, own: Collection[str]) -> str | None:
    """Say why a folder's architecture is none of a dialect's, ``None`` where it is one of them."""
    if architecture(folder) in own:
        return None
    return f"config.json:architectures is {folder.config.get('architectures')!r}, not {' or '.join(own)}"


def claim_flat(
    folder: Folder,
    format: str,
    own: Collection[str],
    find_trace: Callable[[Folder], str | None],
    without: str,
    **reading: Any,
) -> DraftSpec | str:
    """Read a folder if its architecture is one of a trainer's and it bears that trainer's trace.

    Args:
        folder: the opened checkpoint.
        format: name of the dialect, and of the trainer.
        own: the architectures under which the trainer writes, alone or beside others.
        find_trace: says what only this trainer writes, ``None`` where the folder has nothing of it.
        without: the reason for refusing a folder without a trace.
        reading: further arguments of :func:`read_flat`.

    Returns:
        The draft's facts, or the reason why the dialect refuses the folder.

    Raises:
        CheckpointError: the folder is this trainer's and cannot be read.
    """
    refusal = refuse_architecture(folder, own) or (without if find_trace(folder) is None else None)
    return refusal if refusal is not None else read_flat(folder, format, producer=format, **reading)


def read_flat(
    folder: Folder,
    format: str,
    *,
    producer: str | None = None,
    ids_settled: bool = True,
    layer_ids: Literal["output", "boundary"] | None = None,
    own_windows: bool = True,
    latent: type[LatentConfig] | None = None,
    rename: Callable[[str], str | None] = canonical,
    rope_halves: bool = False,
    stock_differences: Iterable[str] = (),
) -> DraftSpec:
    """Read a folder in the flat layout.

    Args:
        folder: the opened checkpoint.
        format: name of the dialect that claims it.
        producer: the trainer that its traces tell, which settles what keys of two meanings say.
        ids_settled: whether they also tell what an id means; the trainer's table then says it.
        layer_ids: the same where the dialect is no trainer's.
        own_windows: whether keys about sliding windows speak of the draft rather than of its target.
        latent: the keys of its attention where that is MLA.
        rename: file tensor name -> canonical name.
        rope_halves: see ``Dialect``.
        stock_differences: sentences on what stock makes of it otherwise, beside those that are found here.

    Returns:
        The draft's facts.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    flat = convert(folder, folder.config, FlatConfig, "config.json:")
    mla = None if latent is None else convert(folder, folder.config, latent, "config.json:")
    inner = convert(folder, flat.eagle_config or {}, NestedConfig, "config.json:eagle_config.")
    habits = PRODUCERS[producer] if producer is not None and ids_settled else None
    meaning: IdMeaning | None = habits.layer_ids if habits is not None else layer_ids
    ids, ids_place, meaning = _ids(folder, flat, inner, meaning)
    refuse_unserved_keys(folder, {"": folder.config, "eagle_config.": nested(folder)})
    report_unread(folder, folder.config, "", FlatConfig, *([] if latent is None else [latent]))
    report_unread(folder, nested(folder), "eagle_config.", NestedConfig)
    flags = {
        key: _either(folder, key, getattr(flat, key), getattr(inner, key))
        for key in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "use_last_layernorm")
    }
    name = str(architecture(folder))
    uses_aux = inner.use_aux_hidden_state is not False
    stock_ids = inner.eagle_aux_hidden_state_layer_ids
    return read(
        folder,
        Dialect(
            format=format,
            architecture=name,
            layer=flat if own_windows else msgspec.structs.replace(flat, **dict.fromkeys(_WINDOW_KEYS)),
            layer_place="config.json:",
            canonical=rename,
            target_hidden_size=flat.target_hidden_size,
            draft_vocab_size=flat.draft_vocab_size,
            ids=ids,
            ids_place=ids_place,
            layer_ids=meaning,
            order=habits.order if habits is not None else "ascending",
            num_aux=flat.num_aux_hidden_states,
            uses_aux=uses_aux,
            fc_norm=flags["fc_norm"] or flat.use_aux_norm,
            norm_before_fc=flags["norm_before_fc"],
            norm_output=flags["norm_output"],
            norm_before_residual=flags["norm_before_residual"],
            has_final_norm=flags["use_last_layernorm"] is not False,
            producer=producer,
            verifier=Verifier(),
            stock=StockView(
                ids=None if stock_ids is None else tuple(stock_ids),
                uses_aux=uses_aux,
                loads=name in (STOCK_ARCHITECTURE, STOCK_MLA_ARCHITECTURE),
                differences=(
                    *_stock_differences(folder, name, flat, inner),
                    *([] if mla is not None else _llama_differences(folder, name, flat)),
                    *stock_differences,
                ),
            ),
            latent=mla,
            rope_halves=rope_halves,
        ),
    )


def _ids(
    folder: Folder, flat: FlatConfig, inner: NestedConfig, settled: IdMeaning | None
) -> tuple[tuple[int, ...] | None, str, IdMeaning]:
    """Read the id list from the two places where it may stand, and what its ids mean there."""
    nested_ids, outer = inner.eagle_aux_hidden_state_layer_ids, flat.eagle_aux_hidden_state_layer_ids
    if nested_ids is not None and outer is not None and nested_ids != outer:
        folder.add(
            "error",
            "ids_disagree",
            f"config.json:{IDS}",
            f"got {outer} at the top level and {nested_ids} in eagle_config; expected one list. "
            'Remove the wrong one, or declare "eagle3_ext": {"sources": [...]}.',
        )
    if nested_ids is not None or outer is None:
        listed = None if nested_ids is None else tuple(nested_ids)
        return listed, f"config.json:eagle_config.{IDS}", settled or "stock"
    declared = folder.declared
    if settled is None and declared.sources is None and not {"layer_ids", "producer"} & set(declared.origins):
        folder.add(
            "warning",
            "top_level_ids",
            f"config.json:{IDS}",
            f"got {outer} at the top level, where stock SGLang does not look; the ids were read as boundaries, as "
            'vLLM does. Settle it with "eagle3_ext": {"sources": [...]}.',
        )
    return tuple(outer), f"config.json:{IDS}", settled or "boundary"


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


def refuse_unserved_keys(folder: Folder, objects: Mapping[str, Mapping[str, Any]]) -> None:
    """Report keys that change the draft's computation in a way that nothing here computes.

    Args:
        folder: takes the findings.
        objects: where to look, by what stands before their keys.
    """
    for prefix, config in objects.items():
        for key, inert in _UNSERVED.items():
            value = config.get(key)
            if value not in inert:
                folder.add(
                    "error",
                    "unserved_key",
                    f"config.json:{prefix}{key}",
                    f"got {value!r}; expected {inert[0]!r} or nothing. Such a draft cannot be served.",
                )


def _stock_differences(folder: Folder, name: str, flat: FlatConfig, inner: NestedConfig) -> Iterator[str]:
    """Say in sentences what stock makes of the keys otherwise."""
    if name == "LlamaForCausalLM":
        yield f"stock takes architecture {name} for a plain language model"
    elif name not in (STOCK_ARCHITECTURE, STOCK_MLA_ARCHITECTURE):
        yield f"stock refuses the architecture {name}"
    for key in ("fc_norm", "norm_output"):
        if getattr(inner, key) and not getattr(flat, key):
            yield f"stock does not read {key} inside eagle_config"
    if folder.config.get("quantization_config"):
        yield "stock builds the layers as quantization_config says, and the file's weights are plain"


def _llama_differences(folder: Folder, name: str, flat: FlatConfig) -> Iterator[str]:
    """Say in sentences at what stock's Llama-type class stops."""
    if name == STOCK_ARCHITECTURE and "draft_vocab_size" not in folder.config:
        yield "stock stops without the key draft_vocab_size"
    if (
        folder.config.get("draft_vocab_size", 0) is None
        and not flat.tie_word_embeddings
        and "lm_head.weight" in folder.tensors
    ):
        yield "stock puts the target's head in the place of the draft's own, since draft_vocab_size is null"
    if "target_hidden_size" in folder.config and flat.target_hidden_size is None:
        yield "stock stops at target_hidden_size: null"
