"""The layout of vLLM's ``speculators`` library: ``speculators_model_type: eagle3``.

The decoder layers are described in ``transformer_layer_config``; ids and flags stand at the top level, and
ids are boundaries.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_eagle3_ext.formats.flat import canonical, refuse_unserved_keys
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.layout import read
from sglang_eagle3_ext.formats.reading import IGNORED, Dialect, LayerConfig, convert, report_unread
from sglang_eagle3_ext.spec import DraftSpec, StockView, Verifier

_LAYER_PLACE = "config.json:transformer_layer_config."
_VERIFIER_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")


class SpeculatorsConfig(msgspec.Struct, frozen=True):
    """The top level of a speculators config."""

    transformer_layer_config: dict[str, Any]
    speculators_model_type: str
    architectures: list[str] | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    speculators_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class RecordedConfig(msgspec.Struct, frozen=True):
    """How speculators was to draft for the target."""

    verifier: dict[str, Any] | None = None


class VerifierConfig(msgspec.Struct, frozen=True):
    """What speculators records about the target."""

    name_or_path: str | None = None
    architectures: list[str] | None = None


def _canonical(name: str) -> str | None:
    """Give a tensor its canonical name; the target's head and norm, needed in training only, are left out."""
    return IGNORED + name if name in _VERIFIER_TENSORS else canonical(name)


def claim_and_read(folder: Folder) -> DraftSpec | str:
    """Read the folder if it is in the layout of speculators."""
    kind = folder.config.get("speculators_model_type")
    if kind is None:
        return "config.json has no speculators_model_type"
    if kind != "eagle3":
        return f"config.json:speculators_model_type is {kind!r}, not 'eagle3'"
    config = convert(folder, folder.config, SpeculatorsConfig, "config.json:")
    layer = convert(
        folder,
        # The head is tied, and the type written, for the whole draft, not for its layers.
        {
            **config.transformer_layer_config,
            "tie_word_embeddings": config.tie_word_embeddings,
            "dtype": config.dtype or config.torch_dtype or config.transformer_layer_config.get("dtype"),
        },
        LayerConfig,
        _LAYER_PLACE,
    )
    dtype_key = next((key for key in ("dtype", "torch_dtype") if getattr(config, key)), None)
    objects = {"": folder.config, "transformer_layer_config.": config.transformer_layer_config}
    refuse_unserved_keys(folder, objects)
    report_unread(folder, folder.config, "", SpeculatorsConfig)
    report_unread(folder, config.transformer_layer_config, "transformer_layer_config.", LayerConfig)
    recorded = convert(folder, config.speculators_config or {}, RecordedConfig, "config.json:speculators_config.")
    verifier = convert(folder, recorded.verifier or {}, VerifierConfig, "config.json:speculators_config.verifier.")
    architecture = config.architectures[0] if config.architectures else "Eagle3Speculator"
    ids = config.eagle_aux_hidden_state_layer_ids
    return read(
        folder,
        Dialect(
            format="speculators",
            architecture=architecture,
            layer=layer,
            layer_place=_LAYER_PLACE,
            canonical=_canonical,
            target_hidden_size=config.target_hidden_size,
            draft_vocab_size=config.draft_vocab_size,
            ids=None if ids is None else tuple(ids),
            ids_place="config.json:eagle_aux_hidden_state_layer_ids",
            layer_ids="boundary",
            order="ascending",
            num_aux=None,
            uses_aux=True,
            fc_norm=config.fc_norm,
            norm_before_fc=config.norm_before_fc,
            norm_output=config.norm_output,
            norm_before_residual=config.norm_before_residual,
            has_final_norm=True,
            producer="speculators",
            verifier=Verifier(verifier.name_or_path, tuple(verifier.architectures or ())),
            stock=StockView(loads=False, differences=(f"stock refuses the architecture {architecture}",)),
            dtype_place=None if dtype_key is None else f"config.json:{dtype_key}",
        ),
    )
