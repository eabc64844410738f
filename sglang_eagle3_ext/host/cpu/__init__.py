"""SGLang with EAGLE-3 on plain PyTorch: the CPU platform ``eagle3_ext`` and its attention backend ``eagle3_cpu``.

Files: ``platform`` (what SGLang asks a platform), ``attention`` over ``segments`` (the backend and its
mathematics), ``tree`` and ``cache_locs`` (the operators of speculation), ``kv_pool``, ``linear`` and
``linear_methods`` (packed weights and where they go), ``operators`` over ``rows`` (norm, rotation,
activation), ``hooks`` (where SGLang has no seam for a platform).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

BACKEND = "eagle3_cpu"
"""Name of the attention backend on the command line."""


class Symbol(NamedTuple):
    """One symbol of SGLang that the CPU platform touches; absorbed by ``host/contract.py``."""

    target: str
    kind: Literal["call", "subclass", "hook", "value"]
    parameters: tuple[str, ...] | None
    why: str
    delete_when: str


_PLATFORM = "SGLang serves EAGLE-3 on CPUs without a compiled kernel package"
_OPERATOR = "SGLang has a PyTorch form of this operator, or a platform seam for it"
_SPECULATIVE = "sglang.kernels.ops.speculative"
_LAYERS = "sglang.srt.layers"


def _operator(target: str, parameters: tuple[str, ...], why: str) -> Symbol:
    return Symbol(target, "hook", parameters, why, _OPERATOR)


CONTRACT: tuple[Symbol, ...] = (
    Symbol(
        "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
        "value",
        None,
        "admit the backend's name on the command line",
        _PLATFORM,
    ),
    Symbol("sglang.srt.arg_groups.choices.add_attention_backend_choices", "call", None, "likewise", _PLATFORM),
    Symbol("sglang.srt.platforms.cpu.CpuDeviceMixin", "subclass", None, "answer questions about a CPU", _PLATFORM),
    Symbol("sglang.srt.platforms.device_mixin.PlatformEnum.OOT", "value", None, "be out of tree", _PLATFORM),
    Symbol(
        "sglang.srt.platforms.interface.PlatformCapabilities",
        "call",
        None,
        "say that there is no Triton and no graph",
        _PLATFORM,
    ),
    *(
        Symbol(f"sglang.srt.platforms.interface.SRTPlatform.{name}", "subclass", parameters, why, _PLATFORM)
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
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        "subclass",
        ("enable_kv_cache_copy",),
        "keep its constructor from launching a Triton kernel; move slots with `use_native_move_kv_cache`",
        "the pool asks the platform's capabilities before it prepares a Triton copy",
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
        "subclass",
        ("self", "tgt_loc", "src_loc"),
        "skip slots that stay where they are",
        _PLATFORM,
    ),
    Symbol("sglang.srt.mem_cache.memory_pool.KVWriteLoc", "call", None, "write keys and values", _PLATFORM),
    Symbol(
        f"{_LAYERS}.attention.attention_registry.register_attention_backend",
        "call",
        ("name",),
        "register the backend",
        _PLATFORM,
    ),
    *(
        Symbol(f"{_LAYERS}.attention.base_attn_backend.AttentionBackend.{name}", "subclass", parameters, why, _PLATFORM)
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
    Symbol(
        f"{_LAYERS}.attention.base_attn_backend.AttentionBackend.verify_mask",
        "subclass",
        None,
        "own the tree mask",
        _PLATFORM,
    ),
    Symbol(
        f"{_LAYERS}.attention.verify_mask.VerifyMask",
        "call",
        ("buffer", "mode", "max_bs"),
        "have the tree mask written without its prefix columns",
        _PLATFORM,
    ),
    Symbol(f"{_LAYERS}.radix_attention.AttentionType.DECODER", "value", None, "refuse other attention", _PLATFORM),
    Symbol("sglang.srt.runtime_context.get_spec", "call", (), "size the tree mask", _PLATFORM),
    Symbol(f"{_SPECULATIVE}.spec_tree.TreeMaskMode.QLEN_ONLY", "value", None, "choose the mask's layout", _PLATFORM),
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
        Symbol(
            f"sglang.srt.speculative.eagle_utils.{name}",
            "value",
            None,
            "fill in an operator that is None on this platform (set directly, never through the hook registry)",
            _OPERATOR,
        )
        for name in ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob")
    ),
    Symbol(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        "call",
        ("target", "hook", "hook_type", "source"),
        "place the hooks above",
        _PLATFORM,
    ),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks", "call", (), "likewise", _PLATFORM),
    Symbol(
        f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod",
        "subclass",
        None,
        "serve linear layers from packed weights",
        "SGLang packs weights on CPUs without its kernel package",
    ),
    Symbol(
        f"{_LAYERS}.quantization.unquant.UnquantizedEmbeddingMethod",
        "subclass",
        None,
        "serve heads from packed weights",
        "SGLang packs weights on CPUs without its kernel package",
    ),
    Symbol(f"{_LAYERS}.vocab_parallel_embedding.ParallelLMHead", "value", None, "recognise heads", _PLATFORM),
    Symbol(
        "sglang.kernels.fused_op.BaseFusedOp.register_oot_forward",
        "call",
        ("op_cls", "fn", "platform_key"),
        "run small operators in fewer calls",
        _PLATFORM,
    ),
    Symbol(
        f"{_LAYERS}.layernorm.RMSNorm.forward_native",
        "call",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
        "take over its plain case, leave it the others",
        _PLATFORM,
    ),
    Symbol(f"{_LAYERS}.activation.SiluAndMul.forward_native", "call", ("self", "x"), "take it over", _PLATFORM),
    Symbol(
        f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_native",
        "call",
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
        "take over its plain case, leave it the others",
        _PLATFORM,
    ),
    Symbol(f"{_LAYERS}.rotary_embedding.base.LinearScalingRotaryEmbedding", "value", None, "likewise", _PLATFORM),
    Symbol(f"{_LAYERS}.rotary_embedding.rope_variant.Llama3RotaryEmbedding", "value", None, "likewise", _PLATFORM),
)
"""Every symbol of SGLang that this folder touches: imports that may vanish, hook targets, overrides."""


def register() -> None:
    """Make the backend's name known to the command line; everything else waits for the worker process."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
