"""The operators of speculation put in place where SGLang offers a platform no seam."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_eagle3_ext.host.cpu import BACKEND, cache_locs, tree
from sglang_eagle3_ext.host.seams import SOURCE

KERNELS = "sglang.kernels.ops.speculative"

REPLACED: dict[str, Callable[..., Any]] = {
    f"{KERNELS}.spec_tree.build_tree_kernel_efficient_func": tree.build_tree,
    f"{KERNELS}.spec_tree.verify_tree_greedy_func": tree.verify_tree_greedy,
    f"{KERNELS}.cache_locs.assign_draft_cache_locs_contiguous_func": (cache_locs.assign_draft_cache_locs_contiguous),
    f"{KERNELS}.cache_locs.fill_front_out_cache_loc_func": cache_locs.fill_front_out_cache_loc,
    f"{KERNELS}.eagle.fill_bonus_tokens_func": cache_locs.fill_bonus_tokens,
    f"{KERNELS}.eagle.fill_accept_out_cache_loc_func": cache_locs.fill_accept_out_cache_loc,
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": cache_locs.assign_req_to_token_pool,
}
"""Dotted SGLang operators, each of which ends in a Triton launch or a refusal on this platform."""

ABSENT: dict[str, dict[str, Callable[..., Any]]] = {
    "sglang.srt.speculative.eagle_utils": {
        "tree_speculative_sampling_target_only": tree.verify_tree_sampling,
        "top_k_renorm_prob": tree.top_k_renorm_prob,
        "top_p_renorm_prob": tree.top_p_renorm_prob,
    }
}
"""Names that are ``None`` where SGLang has no kernel, by module. The hook registry must not touch them:
it replaces the old object in every loaded module, which here would be every ``None``."""

DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
LATENT_ROTATION = "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu"
PADDED_HEADS = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"


def install() -> None:
    """Install all of them in this process; a second call changes nothing."""
    for target, operator in REPLACED.items():
        _hook_once(target, operator, HookType.REPLACE)
    _hook_once(DRAFT_BACKENDS, offer_draft_backend, HookType.BEFORE)
    _hook_once(LATENT_ROTATION, make_latent_rotation, HookType.AROUND)
    _hook_once(PADDED_HEADS, load_padded_heads, HookType.AFTER)
    HookRegistry.apply_hooks()
    for module_name, operators in ABSENT.items():
        module = importlib.import_module(module_name)
        for name, operator in operators.items():
            if getattr(module, name) is None:
                setattr(module, name, operator)


def _hook_once(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    if target not in _installed:
        _installed.add(target)
        HookRegistry.register(target, hook, kind, source=SOURCE)


_installed: set[str] = set()


def make_latent_rotation(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """Make the rotation of a latent layer (AROUND ``get_rope_cpu``, which cannot do without yarn scaling)."""
    if rope_scaling is not None:
        return original(
            head_size,
            rotary_dim,
            max_position,
            base,
            is_neox_style,
            rope_scaling,
            dtype,
            partial_rotary_factor,
            device,
        )
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(head_size, rotary_dim, max_position, base, is_neox_style, None, dtype, partial_rotary_factor)


def load_padded_heads(model_config: Any, _given: Any, _load_config: Any, _tp_size: int) -> None:
    """Let weights be loaded where SGLang has added heads to share them out evenly (AFTER it has adjusted the config).

    On a CPU it adds heads whose weights are zero, nine of a model becoming twelve on two ranks. Its loaders fill them
    up only where a variable of the environment says CPU, which would also have SGLang import a kernel package.
    """
    from sglang.srt.layers import linear, parameter

    stored = model_config.hf_config.original_num_attention_heads, model_config.hf_config.original_total_num_kv_heads
    if (model_config.num_attention_heads, model_config.get_total_num_kv_heads()) != stored:
        linear._is_cpu = parameter._is_cpu = True


def offer_draft_backend(
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> None:
    """Add ``eagle3_cpu`` to the backends that a draft may be given.

    Args:
        factory: SGLang's factory: the draft's runner, its branches and steps.
        backend_name: which of the server's backend settings applies, unused.
        backend_map: name -> maker of (name, backend); extended.
        error_template: unused.
        stamps_children: whether the backend of the drafting steps is wanted (it has one child per
            step), rather than that of draft extend.
    """
    from sglang_eagle3_ext.host.cpu.attention import Eagle3CpuAttention, Eagle3CpuDraftAttention

    runner = factory.draft_model_runner
    if stamps_children:
        backend_map[BACKEND] = lambda: (
            BACKEND,
            Eagle3CpuDraftAttention(runner, factory.topk, factory.speculative_num_steps),
        )
    else:
        backend_map[BACKEND] = lambda: (BACKEND, Eagle3CpuAttention(runner))
