"""Every symbol of SGLang that this package touches, and whether it still has the shape we need.

This table is the only ledger: a symbol that is not here is not touched. ``docs/compatibility.md`` is
generated from it.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

REFERENCE_VERSION = "0.5.23"
"""The SGLang release everything here was written and tested against."""


@dataclass(frozen=True)
class Row:
    """One symbol of SGLang.

    Attributes:
        target: dotted path.
        kind: ``hook`` (wrapped through HookRegistry), ``call``, ``value`` (read or set), ``subclass``.
        parameters: names its signature must have; empty when only its presence matters.
        when: ``start`` (checked in every process), ``models`` (checked when a draft loads; importing it
            earlier would cost every process seconds), ``cpu`` (checked on the CPU platform).
        why: what we need it for.
        delete_when: the upstream change that makes this row superfluous.
    """

    target: str
    kind: Literal["hook", "call", "value", "subclass"]
    parameters: tuple[str, ...]
    when: Literal["start", "models", "cpu"]
    why: str
    delete_when: str


LAUNCHER_SEAM = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
DRAFT_CONFIG_SEAM = "sglang.srt.configs.model_config.ModelConfig._config_draft_model"
CONFIG_PARSER_SEAM = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
MISTRAL_PARSER_SEAM = "sglang.srt.utils.hf_transformers.config.MistralModelConfigParser.parse"
MODEL_CLASS_SEAM = "sglang.srt.model_loader.utils.get_model_architecture"
PLAN_SEAM = (
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state.resolve_spec_aux_hidden_state_config"
)
CAPTURE_SEAM = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
)
FINAL_NORM_SEAM = "sglang.srt.layers.layer_boundary.residual.batch.final_norm"
REPORT_SEAM = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backends"

_UPSTREAM = "SGLang resolves, checks and prints a draft's assembly itself"
_LAYERS = "sglang.srt.layers"


def _part(target: str, *parameters: str) -> Row:
    """A building block of SGLang's that the draft class is made of."""
    return Row(target, "call", parameters, "models", "build the draft out of SGLang's own layers", _UPSTREAM)


ROWS: tuple[Row, ...] = (
    Row(
        LAUNCHER_SEAM,
        "hook",
        ("server_args",),
        "start",
        "check draft, target and flags in the launcher, before any weight loads",
        "SGLang offers a validation hook for built-in algorithms",
    ),
    Row(
        "sglang.srt.arg_groups.model_override_base.resolving_view",
        "call",
        ("server_args",),
        "start",
        "read the flags as resolution has decided them so far",
        "the launcher seam passes resolved values",
    ),
    Row(
        DRAFT_CONFIG_SEAM,
        "hook",
        ("self",),
        "start",
        "give SGLang the draft's real layer count, widths and vocabulary; it sizes pools and buffers from them",
        "SGLang asks the draft class for these",
    ),
    Row(
        CONFIG_PARSER_SEAM,
        "hook",
        ("self", "model", "trust_remote_code", "revision"),
        "start",
        "parse speculators configs, which have no model_type",
        "SGLang parses speculators configs",
    ),
    Row(
        MISTRAL_PARSER_SEAM,
        "hook",
        ("self", "model", "trust_remote_code", "revision"),
        "start",
        "keep a draft whose path names both EAGLE and Mistral from being parsed as Mistral's own format",
        "SGLang parses speculators configs",
    ),
    Row(
        "sglang.srt.configs.model_config_parser_registry.get_model_config_parser",
        "call",
        ("name",),
        "start",
        "hand such a draft to the ordinary parser",
        "SGLang parses speculators configs",
    ),
    Row(
        "sglang.srt.arg_groups.model_override_base.model_config_of",
        "call",
        ("server_args",),
        "start",
        "know the target in the launcher as SGLang itself reads it",
        "the launcher seam passes it",
    ),
    Row(
        MODEL_CLASS_SEAM,
        "hook",
        ("model_config",),
        "start",
        "put our draft class into the model registry when the first class is resolved (the registry costs "
        "seconds to import, so not earlier)",
        "the registry can be extended without importing every model",
    ),
    Row(
        PLAN_SEAM,
        "hook",
        ("server_args", "model_config", "spec_algorithm", "is_draft_worker"),
        "start",
        "resolve the plan where both configs are in hand and no weight is loaded",
        _UPSTREAM,
    ),
    Row(
        CAPTURE_SEAM,
        "hook",
        ("model", "eagle_use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"),
        "start",
        "install the capture points before CUDA graphs are captured",
        "SGLang captures by boundary, in the order asked for",
    ),
    Row(
        FINAL_NORM_SEAM,
        "hook",
        ("hidden_states", "forward_batch", "layernorm", "capture"),
        "start",
        "capture boundary n and the state after the final norm",
        "SGLang captures the state after the last layer on every class",
    ),
    Row(
        REPORT_SEAM,
        "hook",
        ("self",),
        "start",
        "log the start-up block once embeddings, heads and attention backends are settled",
        _UPSTREAM,
    ),
    Row(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        "call",
        ("target", "hook", "hook_type"),
        "start",
        "place the hooks above",
        "never; it is the plugin interface",
    ),
    Row(
        "sglang.srt.runtime_context.get_parallel",
        "call",
        (),
        "start",
        "log the start-up block on the first rank only",
        "never; it is SGLang's runtime interface",
    ),
    Row(
        "sglang.srt.models.registry.ModelRegistry.register",
        "call",
        ("package_name", "overwrite", "strict"),
        "models",
        "register the draft classes",
        "never; it is the plugin interface",
    ),
    Row(
        "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3",
        "subclass",
        (),
        "models",
        "the class we replace; worker code asks for its attributes",
        _UPSTREAM,
    ),
    Row(
        "sglang.srt.models.llama_eagle3.LlamaDecoderLayer",
        "subclass",
        ("config", "layer_id", "quant_config", "prefix"),
        "models",
        "attention, MLP and norms of a draft layer",
        _UPSTREAM,
    ),
    Row(
        "sglang.srt.models.llama_eagle3.LlamaModel",
        "subclass",
        ("config", "quant_config", "prefix"),
        "models",
        "the draft's module tree, whose attribute names worker code relies on",
        _UPSTREAM,
    ),
    Row(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode",
        "call",
        (),
        "models",
        "tell feature passes from recurrent passes",
        "never; passes are known from it",
    ),
    Row(
        "sglang.srt.layers.layer_boundary.stage.StageBoundary.prepare",
        "call",
        ("hidden_states", "forward_batch"),
        "models",
        "hands out boundary b before layer b (capture= of an attention stage)",
        "SGLang captures by boundary, in the order asked for",
    ),
    Row(
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        "call",
        ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
        "models",
        "receives the captured states",
        "SGLang captures by boundary, in the order asked for",
    ),
    _part(f"{_LAYERS}.layer_boundary.layer_stack"),
    _part(f"{_LAYERS}.layernorm.RMSNorm", "hidden_size", "eps"),
    _part(f"{_LAYERS}.linear.QKVParallelLinear", "hidden_size", "head_size", "total_num_heads", "bias", "prefix"),
    _part(f"{_LAYERS}.linear.MergedColumnParallelLinear", "input_size", "output_sizes", "bias", "prefix"),
    _part(f"{_LAYERS}.linear.RowParallelLinear", "input_size", "output_size", "bias", "prefix"),
    _part(f"{_LAYERS}.vocab_parallel_embedding.ParallelLMHead", "num_embeddings", "embedding_dim", "prefix"),
    _part(
        f"{_LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding",
        "num_embeddings",
        "embedding_dim",
        "prefix",
    ),
    _part(f"{_LAYERS}.logits_processor.LogitsProcessor", "config"),
    _part("sglang.srt.model_loader.weight_utils.default_weight_loader", "param", "loaded_weight"),
    _part("sglang.srt.runtime_context.get_spec"),
    _part("sglang.srt.utils.add_prefix", "name", "prefix"),
    Row(
        "sglang.srt.plugins.hook_registry.HookType",
        "call",
        (),
        "start",
        "say how a hook wraps its target",
        "never; it is the plugin interface",
    ),
    Row(
        "sglang.srt.plugins.hook_registry.HookSource",
        "call",
        ("plugin_name", "dist_name"),
        "cpu",
        "say whose the CPU platform's hooks are, which are placed after the plugins were loaded",
        "never; it is the plugin interface",
    ),
    Row(
        "sglang.srt.speculative.eagle_utils.TreeMaskMode",
        "call",
        (),
        "cpu",
        "choose the layout of the tree mask",
        "SGLang serves EAGLE-3 on CPUs without a compiled kernel package",
    ),
    Row(
        "sglang.srt.platforms.device_mixin.CpuArchEnum",
        "call",
        (),
        "cpu",
        "answer which CPU this is",
        "SGLang serves EAGLE-3 on CPUs without a compiled kernel package",
    ),
)


def all_rows() -> tuple[Row, ...]:
    """Return the whole contract, the CPU platform's rows included."""
    from sglang_eagle3_ext.host import cpu

    known = {row.target for row in ROWS}
    return ROWS + tuple(
        Row(s.target, s.kind, s.parameters or (), "cpu", s.why, s.delete_when)
        for s in cpu.CONTRACT
        if s.target not in known
    )


def problems(*stages: str, rows: tuple[Row, ...] | None = None) -> list[str]:
    """List what is missing or shaped otherwise in the installed SGLang.

    Args:
        stages: which rows to check by their ``when``; all of them when empty.
        rows: the table, :func:`all_rows` unless given.

    Returns:
        One sentence per problem, empty when the contract holds.
    """
    found: list[str] = []
    for row in all_rows() if rows is None else rows:
        if stages and row.when not in stages:
            continue
        try:
            symbol = pkgutil.resolve_name(row.target)
        except (ImportError, AttributeError) as error:
            found.append(f"{row.target}: not found ({error}); needed to {row.why}.")
            continue
        if not row.parameters:
            continue
        try:
            have = inspect.signature(symbol).parameters
        except (TypeError, ValueError):
            found.append(f"{row.target}: has no readable signature; needed to {row.why}.")
            continue
        missing = [p for p in row.parameters if p not in have]
        if missing:
            found.append(
                f"{row.target}: lacks the parameter(s) {', '.join(missing)}, got ({', '.join(have)}); "
                f"needed to {row.why}."
            )
    return found


def installed_version() -> str | None:
    """Return the installed SGLang's version, ``None`` when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None
