"""Every symbol of SGLang that this package touches, and whether it still has the shape we need.

This table is the only ledger: a symbol that is not here is not touched. ``docs/compatibility.md`` is
generated from it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from sglang_eagle3_ext.errors import UnsupportedError, first_line

REFERENCE_VERSION = "0.5.23"
"""The SGLang release everything here was written and tested against."""


@dataclass(frozen=True)
class Row:
    """One symbol of SGLang.

    Attributes:
        target: dotted path.
        kind: ``hook`` (wrapped through SGLang's hook registry), ``call``, ``value`` (read or set), ``subclass``.
        parameters: names its signature must have; empty when only its presence matters.
        when: ``start`` (checked in every process once SGLang has imported its module), ``models`` (checked when a
            draft loads; importing it earlier would cost every process seconds), ``cpu`` (checked in the workers of the
            CPU platform), ``features`` (checked where ``probe`` lets SGLang's engine write).
        why: what we need it for.
        delete_when: the upstream change that makes this row superfluous.
    """

    target: str
    kind: Literal["hook", "call", "value", "subclass"]
    parameters: tuple[str, ...]
    when: Literal["start", "models", "cpu", "features"]
    why: str
    delete_when: str


LAUNCHER_SEAM = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
DRAFT_CONFIG_SEAM = "sglang.srt.configs.model_config.ModelConfig._config_draft_model"
QUANTISATION_FILE_SEAM = "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config"
QUANTISATION_SEAM = "sglang.srt.configs.model_config.ModelConfig._verify_quantization"
CONTEXT_SEAM = "sglang.srt.configs.model_config.ModelConfig._derive_context_length"
CONFIG_PARSER_SEAM = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
MISTRAL_PARSER_SEAM = "sglang.srt.utils.hf_transformers.config.MistralModelConfigParser.parse"
MODEL_CLASS_SEAM = "sglang.srt.model_loader.utils.get_model_architecture"
PLAN_SEAM = (
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state.resolve_spec_aux_hidden_state_config"
)
CAPTURE_SEAM = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
)
EMBED_SEAM = "sglang.srt.speculative.pp_draft_embedding.resolve_target_embed_and_head"
FINAL_NORM_SEAM = "sglang.srt.layers.layer_boundary.residual.batch.final_norm"
BACKENDS_SEAM = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.build_attention_backends"
REPORT_SEAM = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backends"
ACCEPT_SEAM = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
)
WEIGHTS_SEAM = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.record_weight_version_after_update"
)

_UPSTREAM = "SGLang resolves, checks and prints a draft's assembly itself"
_LAYERS = "sglang.srt.layers"


def _part(target: str, *parameters: str) -> Row:
    """A building block of SGLang's that the draft class is made of."""
    return Row(target, "call", parameters, "models", "build the draft out of SGLang's own layers", _UPSTREAM)


def _stream(target: str, parameters: tuple[str, ...], why: str) -> Row:
    """What the capture of the target's residual stream relies on."""
    return Row(target, "call", parameters, "models", why, "SGLang captures by boundary, in the order asked for")


def _probe(target: str, *parameters: str) -> Row:
    """What one prefill of our own, outside SGLang's scheduler, needs."""
    why = "run and watch a prefill of a few tokens before a graph is captured, to prove the captured states"
    return Row(target, "call", parameters, "models", why, _UPSTREAM)


def _kept(target: str, *parameters: str) -> Row:
    """What launches SGLang's server with schedulers that keep every state of the target."""
    why = "let SGLang's own engine write the texts of `probe`, and keep every state of its target"
    return Row(target, "call", parameters, "features", why, "SGLang hands out states by boundary, not as Python lists")


def _counted(target: str, kind: Literal["hook", "call", "value"], parameters: tuple[str, ...], why: str) -> Row:
    """What the watch reads at run time."""
    return Row(target, kind, parameters, "start", why, "SGLang counts acceptance for each draft position")


def _verified(target: str, kind: Literal["call", "value", "subclass"], parameters: tuple[str, ...], why: str) -> Row:
    """What verification inside SGLang's Triton backend relies on."""
    return Row(target, kind, parameters, "models", why, "SGLang's Triton backend verifies trees with a split-KV kernel")


_PLATFORM = "SGLang serves EAGLE-3 on CPUs without a compiled kernel package"
_OPERATOR = "SGLang has a PyTorch form of this operator, or a platform seam for it"
_SPECULATIVE = "sglang.kernels.ops.speculative"
_DEEPSEEK = "sglang.srt.models.deepseek_common"


def _operator(target: str, parameters: tuple[str, ...], why: str) -> Row:
    """An operator of speculation that the CPU platform replaces."""
    return Row(target, "hook", parameters, "cpu", why, _OPERATOR)


def _platform(target: str, kind: Literal["call", "value", "subclass"], parameters: tuple[str, ...], why: str) -> Row:
    """Anything else that the CPU platform touches."""
    return Row(target, kind, parameters, "cpu", why, _PLATFORM)


CPU_ROWS: tuple[Row, ...] = (
    _platform(
        "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
        "value",
        (),
        "admit the backend's name on the command line",
    ),
    _platform("sglang.srt.arg_groups.choices.add_attention_backend_choices", "call", (), "likewise"),
    _platform("sglang.srt.platforms.cpu.CpuDeviceMixin", "subclass", (), "answer questions about a CPU"),
    _platform("sglang.srt.platforms.device_mixin.PlatformEnum.OOT", "value", (), "be out of tree"),
    _platform(
        "sglang.srt.platforms.interface.PlatformCapabilities", "call", (), "say that there is no Triton and no graph"
    ),
    *(
        _platform(f"sglang.srt.platforms.interface.SRTPlatform.{name}", "subclass", parameters, why)
        for name, parameters, why in (
            (
                "apply_server_args_defaults",
                ("self", "server_args"),
                "choose the backend; refuse settings served wrongly",
            ),
            ("get_default_attention_backend", ("self",), "name the backend"),
            ("supports_speculative_algorithm", ("self", "algorithm"), "admit EAGLE and EAGLE3"),
            ("get_default_speculative_draft_attention_backend", ("self", "algorithm"), "name the draft's backend"),
            (
                "supports_speculative_draft_attention_backend",
                ("self", "algorithm", "backend"),
                "refuse other draft backends",
            ),
            ("get_speculative_cache_locs_fn", ("self",), "give the slots that verification writes to"),
            ("get_kv_pool_cls", ("self", "kind"), "give the pool that moves slots natively"),
            ("get_dispatch_key_name", ("self",), "dispatch fused operators"),
            ("init_backend", ("self",), "install operators in worker processes only"),
            ("post_load_model", ("self", "model"), "pack weights"),
        )
    ),
    Row(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        "subclass",
        ("enable_kv_cache_copy",),
        "cpu",
        "keep its constructor from launching a Triton kernel; move slots with `use_native_move_kv_cache`",
        "the pool asks the platform's capabilities before it prepares a Triton copy",
    ),
    _platform(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
        "subclass",
        ("self", "tgt_loc", "src_loc"),
        "skip slots that stay where they are",
    ),
    _platform("sglang.srt.mem_cache.memory_pool.KVWriteLoc", "call", (), "write keys and values"),
    *(
        _platform(target, "call", parameters, "run latent attention absorbed, in every pass")
        for target, parameters in (
            ("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_kv_buffer", ("cache_k", "cache_v")),
            (f"{_DEEPSEEK}.attention_backend_handler.AttentionBackendRegistry.register", ("handler_func",)),
            ("sglang.srt.configs.model_config.ModelConfig.get_num_kv_heads", ("tensor_parallel_size",)),
        )
    ),
    _operator(
        f"{_LAYERS}.rotary_embedding.factory.get_rope_cpu",
        (
            "head_size",
            "rotary_dim",
            "max_position",
            "base",
            "is_neox_style",
            "rope_scaling",
            "dtype",
            "partial_rotary_factor",
            "device",
        ),
        "rotate in latent attention without yarn scaling too",
    ),
    _platform(f"{_LAYERS}.rotary_embedding.factory.get_rope", "call", ("head_size", "rotary_dim"), "likewise"),
    _operator(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        ("model_config", "load_config", "tp_size"),
        "see that heads were added, so that ranks can share them evenly",
    ),
    *(
        _platform(f"{_LAYERS}.{module}._is_cpu", "value", (), "have SGLang's loaders fill added heads with zeros")
        for module in ("linear", "parameter")
    ),
    _platform(
        f"{_DEEPSEEK}.attention_forward_methods.forward_methods.AttnForwardMethod.MLA", "value", (), "name that way"
    ),
    _platform(
        "sglang.srt.configs.model_config.is_deepseek_dsa", "call", ("config",), "refuse sparse attention by an indexer"
    ),
    _platform(
        f"{_LAYERS}.attention.attention_registry.register_attention_backend", "call", ("name",), "register the backend"
    ),
    *(
        _platform(f"{_LAYERS}.attention.base_attn_backend.AttentionBackend.{name}", "subclass", parameters, why)
        for name, parameters, why in (
            ("init_forward_metadata", ("self", "forward_batch"), "cut a batch into segments"),
            (
                "forward_extend",
                ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
                "attend in prefill, verification and draft extend",
            ),
            ("forward_decode", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"), "attend in decode"),
            (
                "update_verify_buffers_to_fill_after_draft",
                ("self", "spec_info", "cuda_graph_bs"),
                "nothing to update without a graph",
            ),
        )
    ),
    _platform(
        f"{_LAYERS}.attention.base_attn_backend.AttentionBackend.verify_mask", "subclass", (), "own the tree mask"
    ),
    _operator(
        f"{_SPECULATIVE}.spec_tree.build_tree_kernel_efficient_func",
        (
            "parent_list",
            "top_scores_index",
            "seq_lens",
            "tree_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "topk",
            "spec_steps",
            "num_verify_tokens",
            "tree_mask_mode",
        ),
        "build draft trees",
    ),
    _operator(
        f"{_SPECULATIVE}.spec_tree.verify_tree_greedy_func",
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "target_predict",
            "topk",
        ),
        "verify draft trees greedily",
    ),
    _operator(
        f"{_SPECULATIVE}.cache_locs.assign_draft_cache_locs_contiguous_func",
        ("req_pool_indices", "req_to_token", "seq_lens", "out_cache_loc", "topk", "num_cols", "positions", "mrope"),
        "find the slots that drafting writes to",
    ),
    _operator(
        f"{_SPECULATIVE}.cache_locs.fill_front_out_cache_loc_func",
        ("num_front", "out_cache_loc", "front_out_cache_loc"),
        "find the slots that accepted tokens move to",
    ),
    _operator(
        f"{_SPECULATIVE}.eagle.fill_accept_out_cache_loc_func",
        ("accept_index", "out_cache_loc", "accept_out_cache_loc", "size"),
        "find the slots of accepted tokens",
    ),
    _operator(
        f"{_SPECULATIVE}.eagle.fill_bonus_tokens_func",
        ("accept_tokens", "accept_lens", "bonus_tokens", "accept_stride", "batch_size"),
        "pick the target's own token",
    ),
    _operator(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        "enter new slots into the request table",
    ),
    _operator(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
        "give the draft this backend too",
    ),
    *(
        Row(
            f"sglang.srt.speculative.eagle_utils.{name}",
            "value",
            (),
            "cpu",
            "fill in an operator that is None on this platform (set directly, never through the hook registry)",
            _OPERATOR,
        )
        for name in ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob")
    ),
    Row(
        f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod",
        "subclass",
        (),
        "cpu",
        "serve linear layers from packed weights",
        "SGLang packs weights on CPUs without its kernel package",
    ),
    Row(
        f"{_LAYERS}.quantization.unquant.UnquantizedEmbeddingMethod",
        "subclass",
        (),
        "cpu",
        "serve heads from packed weights",
        "SGLang packs weights on CPUs without its kernel package",
    ),
    _platform(
        "sglang.kernels.fused_op.BaseFusedOp.register_oot_forward",
        "call",
        ("op_cls", "fn", "platform_key"),
        "run small operators in fewer calls",
    ),
    _platform(
        f"{_LAYERS}.layernorm.RMSNorm.forward_native",
        "call",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
        "take over its plain case, leave it the others",
    ),
    _platform(f"{_LAYERS}.activation.SiluAndMul.forward_native", "call", ("self", "x"), "take it over"),
    _platform(
        f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_native",
        "call",
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
        "take over its plain case, leave it the others",
    ),
    _platform(f"{_LAYERS}.rotary_embedding.base.LinearScalingRotaryEmbedding", "value", (), "likewise"),
    _platform(f"{_LAYERS}.rotary_embedding.rope_variant.Llama3RotaryEmbedding", "value", (), "likewise"),
)

_REGISTRY: tuple[tuple[str, Literal["call", "value", "subclass"], str], ...] = (
    ("", "subclass", "keep the hooks above apart from other plugins', which SGLang applies all at once"),
    ("._hooks", "value", "likewise: the table of hooks, of our own"),
    ("._patched", "value", "likewise: the seams that are wrapped"),
    (".apply_hooks", "call", "wrap the seams of a module once SGLang has imported it"),
)

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
        QUANTISATION_FILE_SEAM,
        "hook",
        ("self",),
        "start",
        "keep a target's quantisation, copied beside a plain draft, from being applied to it",
        "SGLang looks at the draft's tensors before it quantises",
    ),
    Row(
        QUANTISATION_SEAM,
        "hook",
        ("self",),
        "start",
        "keep a plain draft from inheriting a --quantization that reads quantised checkpoints",
        "SGLang looks at the draft's tensors before it quantises",
    ),
    Row(
        "sglang.srt.layers.quantization.get_quantization_config",
        "call",
        ("quantization",),
        "models",
        "know which methods read quantised checkpoints",
        "SGLang looks at the draft's tensors before it quantises",
    ),
    Row(
        CONTEXT_SEAM,
        "hook",
        ("self", "context_length"),
        "start",
        "let a draft with fewer positions than its target follow it to the end of its context",
        "SGLang lets a draft's rotation go on",
    ),
    Row(
        "sglang.srt.arg_groups.overrides.declare_resolution",
        "call",
        ("server_args", "source", "fields"),
        "start",
        "give a Llama-type draft an attention backend of its own beside a target on a latent one",
        "SGLang chooses the draft's backend by the draft's attention",
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
        "capture boundary n, the stream before the final norm",
        "SGLang captures the state after the last layer on every class",
    ),
    Row(
        EMBED_SEAM,
        "hook",
        ("target_model", "draft_model"),
        "start",
        "lend a draft the embedding of a target whose class has no method for it",
        "SGLang's Qwen2MoeForCausalLM has get_embed_and_head",
    ),
    Row(
        BACKENDS_SEAM,
        "hook",
        ("model_runner",),
        "start",
        "offer our form of the backend `triton` before a target's is made",
        "SGLang's Triton backend verifies trees with a split-KV kernel",
    ),
    Row(
        REPORT_SEAM,
        "hook",
        ("self",),
        "start",
        "log the start-up block once embeddings, heads and attention backends are settled",
        _UPSTREAM,
    ),
    _counted(ACCEPT_SEAM, "hook", ("self", "result", "batch"), "read the accepted counts once they are on the host"),
    _counted(WEIGHTS_SEAM, "hook", ("self", "weight_version"), "start the watch anew when weights were updated"),
    _counted(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "value",
        ("num_correct_drafts_per_req_cpu", "speculative_num_draft_tokens"),
        "accepted and proposed drafts of a verify step",
    ),
    _counted(
        "sglang.srt.managers.schedule_batch.Req",
        "value",
        ("rid", "sampling_params"),
        "tell requests apart, and greedy ones from sampled ones",
    ),
    _counted(
        "sglang.srt.managers.schedule_batch.Req.finished",
        "call",
        ("self",),
        "leave out a verify step behind a request's end, as SGLang's own counts do",
    ),
    _counted(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        "value",
        ("top_k",),
        "1 when a request decodes greedily",
    ),
    _counted(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        "value",
        ("metrics_collector", "metrics_collector_context"),
        "know whether this rank exports metrics",
    ),
    _counted(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
        "value",
        ("labels",),
        "put SGLang's labels on the series per draft position",
    ),
    Row(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        "call",
        ("target", "hook", "hook_type", "source"),
        "start",
        "place the hooks above",
        "never; it is the plugin interface",
    ),
    *(
        Row(
            f"sglang.srt.plugins.hook_registry.HookRegistry{name}",
            kind,
            (),
            "start",
            why,
            "SGLang applies a hook when it imports the hook's module",
        )
        for name, kind, why in _REGISTRY
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
        "sglang.srt.models.registry.ModelRegistry.is_arch_supported",
        "call",
        ("architecture",),
        "models",
        "leave a draft that is none of EAGLE-3's to the class that SGLang has for it",
        "never; it is SGLang's own lookup",
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
        "sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM",
        "subclass",
        (),
        "models",
        "the same for MLA drafts",
        _UPSTREAM,
    ),
    Row(
        "sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM.post_load_weights",
        "subclass",
        ("self",),
        "models",
        "absorb the projections of keys and values in every layer",
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
    _stream(
        f"{_LAYERS}.layer_boundary.stage.StageBoundary.prepare",
        ("hidden_states", "forward_batch"),
        "wrapped on each captured layer's attention stage, to ask for boundary b before layer b",
    ),
    _stream(
        f"{_LAYERS}.layer_boundary.stage.StageBoundary._prepare_attention",
        ("hidden_states", "forward_batch", "capture", "capture_gathered"),
        "hands out boundary b, on the producer's rows or on the attention's, as the layer's class does",
    ),
    _stream(
        f"{_LAYERS}.layer_boundary.factories.StageDeclaration",
        ("read",),
        "its read tells a plain stream from hyper-connections, whose stream is wider than the target",
    ),
    _stream(
        "sglang.srt.models.gemma3_causal.Gemma3DecoderLayer.forward",
        ("hidden_states", "residual"),
        "take the stream where it travels as a contribution and its residual",
    ),
    _probe(f"{_LAYERS}.layer_boundary.residual.batch.snapshot", "hidden_states", "forward_batch"),
    _probe("sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode"),
    _probe("sglang.srt.model_executor.forward_batch_info.ForwardBatch", "out_cache_loc", "capture_hidden_mode", "rids"),
    _probe("sglang.srt.model_executor.forward_batch_info.ForwardBatch._init_num_token_non_padded", "device"),
    _probe("sglang.srt.model_executor.forward_context.ForwardContext", "attn_backend"),
    _probe("sglang.srt.model_executor.forward_context.forward_context", "ctx", "forward_batch"),
    _probe("sglang.srt.model_executor.model_runner.ModelRunner._prepare_eager_forward_batch", "forward_batch"),
    _probe("sglang.srt.model_executor.model_runner.ModelRunner.prepare_dummy_forward_batch", "forward_batch"),
    _probe("sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.bind_runner_slots", "forward_batch"),
    _probe("sglang.srt.runtime_context.get_model"),
    _probe("sglang.srt.speculative.eagle_utils.get_draft_input_from_target_hidden_dim", "model_runner"),
    _probe("sglang.srt.speculative.eagle_utils.get_draft_recurrent_hidden_state_spec", "model_runner"),
    _probe("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker", "target_worker"),
    _probe("sglang.srt.utils.require_mlp_sync"),
    _probe("sglang.srt.utils.require_mlp_tp_gather"),
    _verified(
        f"{_LAYERS}.attention.attention_registry.ATTENTION_BACKENDS",
        "value",
        (),
        "make the backend `triton` of an EAGLE-3 target ours; SGLang's maker serves every other model",
    ),
    *(
        _verified(f"{_LAYERS}.attention.triton_backend.TritonAttnBackend.{name}", "subclass", parameters, why)
        for name, parameters, why in (
            (
                "__init__",
                ("self", "model_runner"),
                "make everything but verification; its `use_verify_splitkv` and `use_verify_shared_kv` choose the "
                "function `verify_splitkv_fwd` at the seam",
            ),
            ("init_forward_metadata", ("self", "forward_batch"), "plan a verify pass without a graph"),
            (
                "init_forward_metadata_out_graph",
                ("self", "forward_batch", "in_capture"),
                "plan the capture and each replay of a graph from the static `kv_indptr` and `window_kv_indptr`",
            ),
            (
                "update_verify_buffers_to_fill_after_draft",
                ("self", "spec_info", "cuda_graph_bs"),
                "read the tree again where a plan stream overtook the draft",
            ),
            (
                "init_cuda_graph_state",
                ("self", "max_bs", "max_num_tokens"),
                "keep it from allocating a mask over the context, which it does for `num_draft_tokens`",
            ),
            (
                "_target_verify_num_tokens_per_req",
                ("self", "spec_info"),
                "know the draft tokens of a request in a graph",
            ),
            (
                "forward_extend",
                ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks", "score_mod", "aux_tensors"),
                "refuse a verify pass of stock's kernel without its mask",
            ),
        )
    ),
    _verified(
        f"{_LAYERS}.attention.triton_backend.ForwardMetadata",
        "value",
        ("kv_indptr", "window_kv_indptr", "custom_mask", "max_extend_len"),
        "what a pass without a graph was prepared with",
    ),
    _verified(
        "sglang.kernels.ops.attention.verify_splitkv.verify_splitkv_fwd",
        "value",
        (
            "q_extend",
            "k_extend",
            "v_extend",
            "o_extend",
            "k_buffer",
            "v_buffer",
            "qo_indptr",
            "kv_indptr",
            "kv_indices",
            "custom_mask",
            "is_causal",
            "mask_indptr",
            "max_len_extend",
            "k_scale",
            "v_scale",
            "sm_scale",
            "logit_cap",
            "skip_prefix_custom_mask",
            "sliding_window_size",
            "sinks",
            "window_kv_offsets",
            "xai_temperature_len",
            "max_bs",
        ),
        "be called in its place, with its arguments",
    ),
    _verified(
        f"{_LAYERS}.attention.verify_mask.VerifyMask",
        "call",
        ("buffer", "mode", "max_bs", "is_read"),
        "have the tree mask written without its prefix columns",
    ),
    _verified(
        "sglang.srt.speculative.eagle_info.EagleVerifyInput",
        "value",
        ("custom_mask", "num_tokens_per_req"),
        "put the lent mask in the place of the placeholder with which a graph is captured",
    ),
    _verified("sglang.srt.speculative.eagle_utils.TreeMaskMode.QLEN_ONLY", "value", (), "choose the mask's layout"),
    _verified(
        f"{_LAYERS}.radix_attention.RadixAttention",
        "value",
        (
            "num_heads",
            "head_dim",
            "num_kv_heads",
            "layer_id",
            "logit_cap",
            "v_head_dim",
            "sliding_window_size",
            "is_cross_attention",
            "attn_type",
        ),
        "know from a loaded target's layers whether the kernels can verify them all",
    ),
    _verified(f"{_LAYERS}.radix_attention.AttentionType.DECODER", "value", (), "leave other attention to stock"),
    _verified(f"{_LAYERS}.radix_attention.AttentionType.ENCODER_ONLY", "value", (), "skip layers that never verify"),
    _verified(
        "sglang.srt.mem_cache.memory_pool.KVCache.get_kv_cache_quant_method",
        "call",
        ("self",),
        "leave pools with scales of their own to stock",
    ),
    _verified(
        "sglang.srt.runtime_context.get_exec",
        "call",
        (),
        "leave to stock what these kernels do not serve",
    ),
    Row(
        "sglang.srt.arg_groups.fields.exec_.ExecComm",
        "value",
        ("flashinfer_allreduce_fusion_backend", "enable_aiter_allreduce_fusion"),
        "models",
        "prove the captured states without sums over ranks that are fused with a norm",
        _UPSTREAM,
    ),
    _part(f"{_LAYERS}.layer_boundary.layer_stack"),
    _part(f"{_LAYERS}.layer_boundary.AttentionInputs", "hidden_states", "forward_batch", "qkv_latent_func"),
    _part(f"{_LAYERS}.layer_boundary.get_attn_tp_context"),
    _part(
        f"{_LAYERS}.linear.ColumnParallelLinear",
        "input_size",
        "output_size",
        "bias",
        "gather_output",
        "prefix",
        "parallel_group",
    ),
    _part("sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather", "input_"),
    Row(
        "sglang.srt.distributed.parallel_state.GroupCoordinator",
        "value",
        ("group_ranks", "local_rank"),
        "models",
        "join what the ranks' proofs found, over its `cpu_group`",
        _UPSTREAM,
    ),
    _part(f"{_LAYERS}.linear.ReplicatedLinear", "input_size", "output_size", "bias", "prefix"),
    _part(
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA",
        "hidden_size",
        "num_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "rope_theta",
        "rope_scaling",
        "layer_id",
        "reduce_results",
    ),
    _part(
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.forward",
        "positions",
        "hidden_states",
        "forward_batch",
        "zero_allocator",
    ),
    _part("sglang.srt.models.deepseek_v2.DeepseekV2MLP", "hidden_size", "intermediate_size", "hidden_act", "prefix"),
    _part("sglang.srt.runtime_context.get_device"),
    _part("sglang.srt.utils.BumpAllocator", "buffer_size", "dtype", "device"),
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
        "start",
        "say whose the hooks are, most of which are placed after the plugins were loaded",
        "never; it is the plugin interface",
    ),
    Row(
        "sglang.srt.platforms.device_mixin.CpuArchEnum",
        "call",
        (),
        "cpu",
        "answer which CPU this is",
        "SGLang serves EAGLE-3 on CPUs without a compiled kernel package",
    ),
    _kept("sglang.srt.entrypoints.http_server.launch_server", "server_args", "run_scheduler_process_func"),
    _kept("sglang.srt.managers.scheduler.run_scheduler_process", "server_args", "port_args", "tp_rank"),
    _kept("sglang.srt.plugins.load_plugins"),
    _kept("sglang.srt.server_args.prepare_server_args", "argv"),
    _kept("sglang.srt.utils.kill_process_tree", "parent_pid", "include_parent"),
    *CPU_ROWS,
)


def module_of(target: str) -> str:
    """Return the module of a symbol: classes begin with a capital, and everything else stands in the last module."""
    names = target.split(".")
    in_class = next((i for i, name in enumerate(names) if name[:1].isupper()), len(names) - 1)
    return ".".join(names[:in_class])


def rows_of(target: str) -> tuple[Row, ...]:
    """Return the row of a symbol, alone."""
    return tuple(row for row in ROWS if row.target == target)


def by_module(stage: str) -> dict[str, list[Row]]:
    """Return the rows of a stage by the module that their symbols stand in."""
    modules: dict[str, list[Row]] = {}
    for row in ROWS:
        if row.when == stage:
            modules.setdefault(module_of(row.target), []).append(row)
    return modules


def require(*stages: str, rows: Sequence[Row] | None = None) -> None:
    """Check that the contract holds; see ``problems`` for what is checked.

    Raises:
        UnsupportedError: it does not; names every problem.
    """
    found = problems(*stages, rows=rows)
    if found:
        raise UnsupportedError(
            f"this SGLang ({installed_version()}) lacks what sglang-eagle3-ext needs of it (made for "
            f"{REFERENCE_VERSION}): {' '.join(found)}"
        )


def problems(*stages: str, rows: Sequence[Row] | None = None) -> list[str]:
    """List what is missing or shaped otherwise in the installed SGLang.

    Args:
        stages: which rows to check by their ``when``; all of them when empty.
        rows: the table, ``ROWS`` unless given.

    Returns:
        One sentence per problem, empty when the contract holds.
    """
    found: list[str] = []
    for row in ROWS if rows is None else rows:
        if stages and row.when not in stages:
            continue
        try:
            symbol = pkgutil.resolve_name(row.target)
        except Exception as error:  # a module may raise anything while it is imported
            found.append(f"{row.target}: not found ({first_line(error)}); needed to {row.why}.")
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
