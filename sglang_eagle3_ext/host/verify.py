"""Target verification by this package's kernels, behind SGLang's own flag ``--attention-backend triton``.

SGLang's Triton backend verifies with its prefill kernel, unless its split-KV seam names another function: one that is
called with the arguments of that kernel and returns whether it ran. ``TreeVerify.attend`` is such a function. Whether
it serves is decided once, when the backend of an EAGLE-3 target is made (``left_to_stock``), and logged with every
reason against; from then on nothing falls back, as the mask that stock would need is not there.

What is relied upon in SGLang 0.5.23 (rows of ``host.contract``; ``host.triton_backend`` is the one class that wraps):

- the seam is reached for every attention layer of a TARGET_VERIFY pass, behind the writes to the pool, with
  ``kv_indptr`` [B + 1] int32 and ``kv_indices`` int64, a slot per committed token whatever the page size, translated
  to the pool of the layer (windowed layers: those of the last ``sliding_window_size`` tokens at most);
- a request has the same number of draft tokens as every other, its rows stand together, and rows behind the last
  request (padding of data parallelism) are read by nobody;
- q, k, v and the output have a contiguous last axis; k and v are the draft tokens' own, in q's dtype, unscaled; the
  pool is [slots, HKV, D], multiplied by ``layer.k_scale_float`` and ``layer.v_scale_float`` where there are any;
- a latent layer (MLA) runs absorbed: one kv head, whose value is the front of its key;
- a window of W hides what stands more than W positions before a row; SGLang counts rows, we count depth in the tree,
  which is the same for a chain;
- CUDA graphs: ``init_forward_metadata_out_graph`` fills the static ``kv_indptr`` before a capture and before every
  replay, on the stream that the graph runs on; lengths of padding requests are 1. Plan and bits live in buffers of
  ours and are written there too; the graph holds their addresses, cut to its batch size;
- with an overlapped plan stream that happens before the draft has built its tree: SGLang then calls
  ``update_verify_buffers_to_fill_after_draft``, and the bits are packed again;
- the tree's mask is one that the draft stage writes in place, a byte for each pair of draft tokens (QLEN_ONLY; bool, as
  in SGLang's own backends with such a mask); with it SGLang builds chains by its fused builder, trees by the usual one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.switches import read_switches
from sglang_eagle3_ext.kernels.arch import (
    arch_of,
    chunk_target,
    implementation_for,
    tree_verify_gqa_launch,
    tree_verify_mla_launch,
)
from sglang_eagle3_ext.kernels.split_merge import WORD, SplitPlan, allocate_plan, chain_bits, pack_mask, plan_splits
from sglang_eagle3_ext.kernels.tree_verify_gqa import KV_DTYPES, tree_verify_gqa
from sglang_eagle3_ext.kernels.tree_verify_mla import tree_verify_mla
from sglang_eagle3_ext.spec import AssemblyPlan

if TYPE_CHECKING:
    from sglang.srt.layers.attention.verify_mask import VerifyMask

logger = logging.getLogger(__name__)

BACKEND = "triton"
"""SGLang's own name of the backend."""

HEAD_WIDTHS = range(16, 257)
"""Widths of a key or value head that ``tree_verify_gqa`` has tiles for."""


@dataclass(frozen=True)
class Heads:
    """The heads of one kind of attention layer, on this rank."""

    heads: int
    kv_heads: int
    width: int
    value_width: int


@dataclass(frozen=True)
class Shape:
    """What a target's attention layers need of the kernels.

    Attributes:
        full: layers that see the whole context; ``None`` if there are none.
        windowed: layers with a sliding window; ``None`` if there are none.
        latent_width: C of a target with latent attention, else ``None``.
        dtype: of queries.
        kv_dtype: of the pool.
    """

    full: Heads | None
    windowed: Heads | None
    latent_width: int | None
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class _Splits:
    """Static buffers for a plan, and how many chunks the batch is cut into."""

    target: int
    buffers: SplitPlan

    def plan(self, kv_indptr: torch.Tensor) -> SplitPlan:
        """Plan a batch in the front of the buffers."""
        requests = len(kv_indptr) - 1
        out = SplitPlan(
            self.buffers.slot_request[: self.target + requests],
            self.buffers.num_chunks[:requests],
            self.buffers.first_slot[:requests],
        )
        return plan_splits(kv_indptr, target=self.target, out=out)


@dataclass(frozen=True)
class _Step:
    """What all layers of one verify pass share."""

    num_draft: int
    bits: torch.Tensor
    plan: SplitPlan | None
    window_plan: SplitPlan | None


class TreeVerify:
    """The verify kernels of one target, with the buffers they need: made once, prepared once per step.

    Attributes:
        mask: a byte for each pair of draft tokens of a request, which SGLang's draft stage writes in place.
    """

    def __init__(self, shape: Shape, *, requests: int, num_draft: int, chain: bool, device: torch.device) -> None:
        """Allocate for the largest batch.

        Args:
            shape: the target's attention.
            requests: most requests of a batch.
            num_draft: draft tokens of a request, the root included.
            chain: whether every tree is a chain, whose mask need not be read.
            device: where the pool is.
        """
        self.shape = shape
        self.chain = chain
        self._num_draft = num_draft
        self._full = self._splits(shape.full, requests, device)
        self._windowed = self._splits(shape.windowed, requests, device)
        words = -(-num_draft // WORD)
        self._bits = (
            chain_bits(requests, num_draft, device)
            if chain
            else torch.zeros(requests * num_draft, words, dtype=torch.int64, device=device)
        )
        self._step: _Step | None = None
        self.mask = _make_mask(requests, num_draft, is_read=not chain, device=device)

    def _splits(self, heads: Heads | None, requests: int, device: torch.device) -> _Splits | None:
        """Choose the number of chunks such that they fill the device once, whatever the lengths."""
        if heads is None:
            return None
        arch, itemsize = arch_of(device), self.shape.dtype.itemsize
        rows = heads.heads // heads.kv_heads * self._num_draft
        if self.shape.latent_width is not None:
            launch = tree_verify_mla_launch(
                rows, arch=arch, itemsize=itemsize, kv_itemsize=self.shape.kv_dtype.itemsize
            )
        else:
            launch = tree_verify_gqa_launch(rows, max(heads.width, heads.value_width), arch=arch, itemsize=itemsize)
        target = chunk_target(heads.kv_heads * -(-rows // launch.block_m), arch=arch)
        return _Splits(target, allocate_plan(requests, target=target, batch_invariant=False, device=device))

    def prepare(
        self,
        kv_indptr: torch.Tensor,
        window_kv_indptr: torch.Tensor | None,
        mask: torch.Tensor | None,
        num_draft: int,
    ) -> None:
        """Plan a verify pass on the device; no layer of it plans again.

        Args:
            kv_indptr: [B + 1] int32 offsets of the committed tokens.
            window_kv_indptr: [B + 1] int32 offsets of those that windowed layers read; ``None`` without such layers.
            mask: QLEN_ONLY tree mask, at least [B * Q * Q] cells of one byte; not read for a chain.
            num_draft: Q, draft tokens of each request.
        """
        plan = window_plan = None
        if self._full is not None:
            plan = self._full.plan(kv_indptr)
        if self._windowed is not None and window_kv_indptr is not None:
            window_plan = self._windowed.plan(window_kv_indptr)
        self._step = _Step(num_draft, self._ancestors(kv_indptr, mask, num_draft), plan, window_plan)

    def read_tree(self, kv_indptr: torch.Tensor, mask: torch.Tensor, num_draft: int) -> None:
        """Read the tree of a pass that was prepared before its draft was made; its chunks stay as they were planned.

        Args:
            kv_indptr: [B + 1] int32, where each request's context begins.
            mask: at least B * Q * Q cells of one byte: which draft tokens see which.
            num_draft: Q, draft tokens of each request.

        Raises:
            UnsupportedError: the pass is one of trees and there is no mask.
        """
        if self._step is not None:
            self._step = replace(self._step, bits=self._ancestors(kv_indptr, mask, num_draft))

    def _ancestors(self, kv_indptr: torch.Tensor, mask: torch.Tensor | None, num_draft: int) -> torch.Tensor:
        """Give the ancestor bits of a pass, in the front of the static buffer where they fit it."""
        requests = len(kv_indptr) - 1
        # A pass of another width than the buffers' (never one in a graph) brings bits of its own.
        out = self._bits[: requests * num_draft] if num_draft == self._num_draft else None
        if self.chain:
            return chain_bits(requests, num_draft, kv_indptr.device) if out is None else out
        if mask is None:
            raise UnsupportedError(
                "verify: got no tree mask for a tree; expected the one that this backend lends to the draft stage."
                " Report it with the server's arguments; EAGLE3_EXT_KERNELS=off serves without these kernels."
            )
        return pack_mask(mask, kv_indptr, num_draft, out=out)

    def attend(
        self,
        q_extend: torch.Tensor,
        k_extend: torch.Tensor,
        v_extend: torch.Tensor,
        o_extend: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: torch.Tensor | None,
        is_causal: bool,
        mask_indptr: torch.Tensor | None,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float,
        logit_cap: float = 0.0,
        skip_prefix_custom_mask: bool = True,
        sliding_window_size: int = -1,
        sinks: torch.Tensor | None = None,
        window_kv_offsets: torch.Tensor | None = None,
        xai_temperature_len: int = -1,
        max_bs: int | None = None,
    ) -> bool:
        """Verify one layer of the pass last prepared: the function that SGLang's seam calls.

        Args:
            q_extend: [T, HQ, D]; rows behind the last request are left alone.
            k_extend: [T, HKV, D] keys of the draft tokens.
            v_extend: [T, HKV, DV].
            o_extend: [T, HQ, DV]; written.
            k_buffer: [slots, HKV, D], the pool of this layer.
            v_buffer: [slots, HKV, DV].
            qo_indptr: not read.
            kv_indptr: as it was prepared, of this layer's kind.
            kv_indices: slots of the committed tokens.
            custom_mask: not read; the ancestor bits stand for it.
            is_causal: not read, likewise.
            mask_indptr: not read.
            max_len_extend: not read.
            k_scale: what keys of the pool are to be multiplied with.
            v_scale: likewise values; in latent attention the value is the key, and so is its scale.
            sm_scale: factor of the scores.
            logit_cap: 0 for none.
            skip_prefix_custom_mask: not read.
            sliding_window_size: positions before a row that it still sees, -1 for all.
            sinks: optional [HQ] logits.
            window_kv_offsets: not read.
            xai_temperature_len: not read; a target that has one is left to stock.
            max_bs: not read.

        Returns:
            Always true: it ran.

        Raises:
            UnsupportedError: a layer asks for what was not foreseen when the backend was made.
        """
        step, requests = self._step, len(kv_indptr) - 1
        windowed = sliding_window_size >= 0
        plan = None if step is None else step.window_plan if windowed else step.plan
        if step is None or plan is None:
            raise UnsupportedError(
                f"verify: got a layer {'with' if windowed else 'without'} a sliding window; expected none on a target"
                " whose attention layers did not show one. Serve it with EAGLE3_EXT_KERNELS=off."
            )
        rows = slice(0, requests * step.num_draft)
        if self.shape.latent_width is not None:
            if windowed or sinks is not None or logit_cap:
                raise UnsupportedError(
                    "verify: got a latent attention layer with a window, sinks or a logit cap; expected none of them."
                    " Serve it with EAGLE3_EXT_KERNELS=off."
                )
            tree_verify_mla(
                q_extend[rows],
                k_extend[rows, 0],
                k_buffer[:, 0],
                kv_indptr,
                kv_indices,
                step.bits,
                plan,
                latent_width=self.shape.latent_width,
                scale=sm_scale,
                kv_scale=k_scale,
                out=o_extend[rows],
            )
            return True
        tree_verify_gqa(
            q_extend[rows],
            k_extend[rows],
            v_extend[rows],
            k_buffer,
            v_buffer,
            kv_indptr,
            kv_indices,
            step.bits,
            plan,
            scale=sm_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            window=sliding_window_size if windowed else None,
            logit_cap=logit_cap,
            sinks=sinks,
            out=o_extend[rows],
        )
        return True

    @property
    def text(self) -> str:
        """Say what serves, for the start-up block."""
        kernel = "tree_verify_gqa" if self.shape.latent_width is None else "tree_verify_mla"
        return f"{kernel} (Triton), {'chains' if self.chain else 'trees'} of {self._num_draft} draft tokens"


def _make_mask(requests: int, num_draft: int, *, is_read: bool, device: torch.device) -> VerifyMask:
    """Make the mask that is lent to the draft stage; it covers the draft tokens alone."""
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    return VerifyMask(
        buffer=torch.ones(requests * num_draft * num_draft, dtype=torch.bool, device=device),
        mode=TreeMaskMode.QLEN_ONLY,
        max_bs=requests,
        is_read=is_read,
    )


# ---- the decision -----------------------------------------------------------------------------------------------


def shape_of(model_runner: Any) -> Shape:
    """Read from a loaded target what its attention layers need of the kernels.

    Args:
        model_runner: SGLang's runner of the target, its weights loaded and its pool made.
    """
    layers = _layers(model_runner)
    latent = model_runner.model_config.kv_lora_rank if model_runner.use_mla_backend else None
    full, windowed = (
        next(
            (
                Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
                for layer in layers
                if (_window(layer) is not None) == wanted
            ),
            None,
        )
        for wanted in (False, True)
    )
    return Shape(full, windowed, latent, model_runner.dtype, model_runner.kv_cache_dtype)


def _layers(model_runner: Any) -> list[Any]:
    """List the attention layers that verify; of a latent layer's two forms the absorbed one does."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = [
        module
        for module in model_runner.model.modules()
        if isinstance(module, RadixAttention) and module.attn_type != AttentionType.ENCODER_ONLY
    ]
    if not model_runner.use_mla_backend:
        return layers
    width = model_runner.model_config.kv_lora_rank
    return [layer for layer in layers if layer.tp_k_head_num == 1 and layer.v_head_dim == width]


def _window(layer: Any) -> int | None:
    size = layer.sliding_window_size
    return size if size is not None and size >= 0 else None


def left_to_stock(model_runner: Any) -> list[str]:
    """List why a target's verification cannot be served by the kernels, one reason each; empty when it can.

    Args:
        model_runner: SGLang's runner of the target, its weights loaded and its pool made.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

    device, stored = torch.device(model_runner.device), model_runner.token_to_kv_pool.get_kv_cache_quant_method()
    if implementation_for(device) == "torch":
        return [f"the kernels serve on NVIDIA devices from compute capability 8.0, not on {model_runner.device}"]
    shape = shape_of(model_runner)
    asked = {
        "--enable-deterministic-inference": get_exec().deterministic.enable_deterministic_inference,
        "decode context parallelism": get_parallel().attn_dcp_size > 1,
        "a draft that is served by stock's rules, or with no captured states": not isinstance(
            model_runner.spec_aux_config.eagle_aux_hidden_state_layer_ids, AssemblyPlan
        ),
        "trees on MiniMax's sparse attention, which lends no mask": get_spec().speculative_eagle_topk > 1
        and (model_runner.model_config.hf_config.architectures or [""])[0].startswith("MiniMaxM3Sparse"),
        "an encoder": model_runner.model_config.is_encoder_decoder,
        "a KV cache that keeps scales of its own": stored is not None and stored.name != "unquantized",
    }
    reasons = [f"not served together with {what}" for what, is_asked in asked.items() if is_asked]
    reasons += _dtypes_not_served(shape, device, model_runner)
    layers = _layers(model_runner)
    if not layers:
        reasons.append("the target shows no attention layer that verifies")
    return [*reasons, *dict.fromkeys(text for layer in layers for text in _not_served(layer, shape))]


def _dtypes_not_served(shape: Shape, device: torch.device, model_runner: Any) -> list[str]:
    reasons = []
    if shape.dtype == torch.float32 and device.type == "cuda":
        reasons.append("float32 queries would be multiplied without tensor cores")
    elif shape.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"queries in {shape.dtype}")
    if shape.kv_dtype not in (shape.dtype, *KV_DTYPES):
        reasons.append(f"a pool in {shape.kv_dtype} under queries in {shape.dtype}")
    if shape.kv_dtype in KV_DTYPES and getattr(model_runner.model_config.hf_text_config, "num_kv_shared_layers", None):
        reasons.append("layers that read another layer's keys, from a pool in FP8")
    if shape.kv_dtype == torch.float8_e4m3fn and device.type == "cuda" and arch_of(device).capability < 89:
        reasons.append("a pool in float8_e4m3fn needs compute capability 8.9")
    return reasons


def _not_served(layer: Any, shape: Shape) -> list[str]:
    """List what one layer asks for beyond the kernels; texts name no layer, as all layers of a kind say the same."""
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.runtime_context import get_spec

    window, num_draft = _window(layer), get_spec().speculative_num_draft_tokens
    latent = shape.latent_width is not None
    wanted = {
        "cross attention": layer.is_cross_attention,
        "attention without a causal mask": layer.attn_type != AttentionType.DECODER,
        "temperature tuning by position": layer.xai_temperature_len > 0,
        "a window or a logit cap on latent attention": latent and (window is not None or layer.logit_cap > 0),
        f"a window of {window} tokens, too small for {num_draft} draft tokens": (
            window is not None and window < num_draft - 1
        ),
        f"{layer.tp_q_head_num} query heads on {layer.tp_k_head_num} kv heads": (
            layer.tp_q_head_num % layer.tp_k_head_num != 0
        ),
    }
    if latent:
        rope = layer.qk_head_dim - layer.v_head_dim
        wanted[f"latents of {layer.v_head_dim} + {rope}, which are not powers of two from 32 and 16 on"] = any(
            part < least or part & (part - 1) for part, least in ((layer.v_head_dim, 32), (rope, 16))
        )
    else:
        wanted[f"heads of {layer.qk_head_dim} and {layer.v_head_dim} columns"] = not (
            {layer.qk_head_dim, layer.v_head_dim} <= set(HEAD_WIDTHS)
        )
    return [f"the target has {what}" for what, asked in wanted.items() if asked]


def tree_verify_for(model_runner: Any) -> TreeVerify:
    """Make the kernels' side of a target that is served by them (nothing of ``left_to_stock`` holds).

    Args:
        model_runner: SGLang's runner of the target.
    """
    from sglang.srt.runtime_context import get_spec

    tree_verify = TreeVerify(
        shape_of(model_runner),
        requests=model_runner.req_to_token_pool.size,
        num_draft=get_spec().speculative_num_draft_tokens,
        chain=get_spec().speculative_eagle_topk == 1,
        device=model_runner.req_to_token_pool.req_to_token.device,
    )
    _made.append(tree_verify)
    return tree_verify


def wants_kernels(model_runner: Any) -> bool:
    """Say whether a runner is an EAGLE-3 target whose verification is ours to decide about."""
    return read_switches().kernels and model_runner.spec_algorithm.is_eagle3() and not model_runner.is_draft_worker


# ---- behind `--attention-backend triton` --------------------------------------------------------------------------

_made: list[TreeVerify] = []
_reasons: list[str] = []


def make_backend(stock: Callable[[Any], Any], model_runner: Any) -> Any:
    """Make the backend ``triton`` of a runner: ours for a target that the kernels can serve, else SGLang's.

    Args:
        stock: SGLang's maker of it.
        model_runner: of any model, target or draft.
    """
    from sglang.srt.runtime_context import get_parallel

    if not wants_kernels(model_runner):
        return stock(model_runner)
    said, reasons = list(_reasons), left_to_stock(model_runner)
    _reasons[:] = reasons
    if reasons:
        if get_parallel().tp_rank == 0 and reasons != said:
            logger.warning(
                "Draft trees are verified by SGLang's own Triton kernel: %s. They are verified right; nothing to do.",
                "; ".join(_reasons),
            )
        return stock(model_runner)
    from sglang_eagle3_ext.host.triton_backend import TreeVerifyTritonBackend

    return TreeVerifyTritonBackend(model_runner)


def describe(model_runner: Any) -> str:
    """Say who verifies a target's drafts, for the start-up block.

    Args:
        model_runner: SGLang's runner of the target, its backends made.
    """
    if not read_switches().kernels:
        return "SGLang's own kernels (EAGLE3_EXT_KERNELS=off)"
    backend = model_runner.attn_backend
    # Whichever of several backends verifies, its mask is the one that is lent to the draft stage.
    for tree_verify in _made:
        if tree_verify.mask is backend.verify_mask:
            return tree_verify.text
    return type(backend).__name__ + (f" alone: {'; '.join(_reasons)}" if _reasons else "")
