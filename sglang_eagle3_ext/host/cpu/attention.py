"""The attention backend ``eagle3_cpu``: SGLang's batches, cut into segments of dense attention.

Prefill (also in chunks and behind a cached prefix), decode, verification of a draft tree, the draft's
own steps, and draft extend. Pages of one token, float keys and values, multi-head, grouped or latent
attention; anything else is refused when the backend is made or when a layer first runs.

Latent attention (DeepSeek, Kimi) runs absorbed in every pass: the pool holds one row [C + R] per token,
which is the one key that all query heads share, and its first C columns are the value.

Where Triton's interpreter is on (``TRITON_INTERPRET=1``), draft trees are verified by the Triton kernels that serve on
a GPU, through the same ``host.verify``: to check them, not to be quick.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import verify
from sglang_eagle3_ext.host.cpu import BACKEND
from sglang_eagle3_ext.host.cpu.segments import (
    MaskStyle,
    Segment,
    attend,
    decode_segments,
    draft_segments,
    extend_segments,
    verify_segments,
)
from sglang_eagle3_ext.kernels.arch import implementation_for

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def register_backend() -> None:
    """Make ``--attention-backend eagle3_cpu`` create an :class:`Eagle3CpuAttention`."""
    register_attention_backend(BACKEND)(Eagle3CpuAttention)


def always_absorb() -> None:
    """Have SGLang's latent layers run absorbed on this backend; by default they expand keys in a prefill, in Triton."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(BACKEND, lambda _layer, _forward_batch: AttnForwardMethod.MLA)


class Eagle3CpuAttention(AttentionBackend):
    """Attention of one model, target or draft, in plain PyTorch."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        problems = unsupported_model(model_runner)
        if problems:
            raise UnsupportedError("\n".join(problems))
        config = model_runner.model_config
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = config.context_len
        ranks = get_parallel().attn_tp_size
        kv_heads = 1 if model_runner.use_mla_backend else config.get_num_kv_heads(ranks)
        self.style = MaskStyle(model_runner.dtype, max(1, config.num_attention_heads // ranks // kv_heads))
        if model_runner.use_mla_backend:
            always_absorb()
        self.segments: list[Segment] = []
        self._checked_layers: set[int] = set()
        self._tree_verify = _make_tree_verify(model_runner)
        self._committed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._verify_mask = self._tree_verify.mask if self._tree_verify else _make_verify_mask(model_runner)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The Q x Q mask per request that the draft stage fills in place; ``None`` for a draft."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: there is no graph, so the metadata is made after the draft has run."""

    def support_triton(self) -> bool:
        """Say that no Triton kernel may be launched on behalf of this backend."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Cut the batch into segments, once for all layers."""
        mode = forward_batch.forward_mode
        req_to_token = self.req_to_token_pool.req_to_token
        requests = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        self._committed = None
        if mode.is_idle():
            self.segments = []
        elif mode.is_decode():
            self.segments = decode_segments(req_to_token, requests, lengths)
        elif mode.is_target_verify():
            spec_info = forward_batch.spec_info
            if self._tree_verify is not None:
                self._prepare_kernels(self._tree_verify, req_to_token, requests, lengths, spec_info)
                return
            self.segments = verify_segments(
                req_to_token,
                requests,
                lengths,
                spec_info.custom_mask,
                spec_info.draft_token_num,
                self.style,
            )
        else:
            new_lengths = forward_batch.extend_seq_lens.tolist()
            self.segments = extend_segments(req_to_token, requests, lengths, new_lengths, self.style)

    def _prepare_kernels(
        self,
        tree_verify: verify.TreeVerify,
        req_to_token: torch.Tensor,
        requests: list[int],
        lengths: list[int],
        spec_info: Any,
    ) -> None:
        """Give the kernels what SGLang's Triton backend gives them: offsets and slots of the committed tokens."""
        kv_indptr = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        committed = [req_to_token[request, :length] for request, length in zip(requests, lengths, strict=True)]
        self._committed = kv_indptr, torch.cat(committed)
        tree_verify.prepare(kv_indptr, None, spec_info.custom_mask, spec_info.draft_token_num)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend.

        Args:
            q: [T, HQ * D], D = C + R in latent attention.
            k: [T, HKV, D], or ``None`` when the layer reads another layer's cache.
            v: [T, HKV, DV], likewise.
            layer: the calling layer: head counts, scale, layer number.
            forward_batch: the batch whose segments were made.
            save_kv_cache: whether ``k`` and ``v`` are to be written.
            **kwargs: arguments of other kinds of attention; refused unless ``None``.

        Returns:
            [T, HQ * DV].

        Raises:
            UnsupportedError: the layer is of a kind that this backend does not compute.
        """
        if kwargs or layer.layer_id not in self._checked_layers:
            problems = unsupported_layer(layer, kwargs)
            if problems:
                raise UnsupportedError("\n".join(problems))
            self._checked_layers.add(layer.layer_id)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if self._committed is None or self._tree_verify is None:
            return attend(query, keys, values, self.segments, layer.scaling)
        if k is None or v is None:
            k, v = keys[forward_batch.out_cache_loc], values[forward_batch.out_cache_loc]
        out = query.new_zeros(len(query), layer.tp_q_head_num, layer.v_head_dim)
        kv_indptr, kv_slots = self._committed
        self._tree_verify.attend(
            query, k, v, out, keys, values, None, kv_indptr, kv_slots, None, True, None, 0, 1.0, 1.0, layer.scaling
        )
        return out.view(len(query), -1)

    forward_decode = forward_extend


class Eagle3CpuDraftAttention:
    """The backends of the drafting steps, one each, sharing the pools of the draft.

    Attributes:
        attn_backends: backend of the 1st, 2nd, ... draft forward pass.
        topk: branches of the tree.
        speculative_num_steps: tokens per branch; the last is only sampled, never run.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [Eagle3CpuAttention(model_runner) for _ in range(speculative_num_steps - 1)]
        self.max_context_len = model_runner.model_config.context_len
        self._req_to_token_pool = model_runner.req_to_token_pool

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Make the segments of every drafting step at once: their slots are known beforehand."""
        if forward_batch.forward_mode.is_idle():
            steps: Any = ([] for _ in self.attn_backends)
        else:
            steps = draft_segments(
                self._req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices.tolist(),
                forward_batch.seq_lens.tolist(),
                forward_batch.out_cache_loc.view(-1, self.topk, self.speculative_num_steps),
            )
        for backend, segments in zip(self.attn_backends, steps, strict=False):
            backend.segments = segments


def _make_tree_verify(model_runner: ModelRunner) -> verify.TreeVerify | None:
    """Make the kernels' side of a target's verification where Triton's interpreter is on, else nothing."""
    if implementation_for(torch.device("cpu")) == "torch" or not verify.wants_kernels(model_runner):
        return None
    if reasons := verify.left_to_stock(model_runner):
        logger.warning("Draft trees are verified in PyTorch: %s.", "; ".join(reasons))
        return None
    return verify.tree_verify_for(model_runner)


def _make_verify_mask(model_runner: ModelRunner) -> VerifyMask | None:
    """Allocate the tree masks of the largest batch, for a target that verifies."""
    size = get_spec().speculative_num_draft_tokens
    if not size or model_runner.is_draft_worker:
        return None
    requests = model_runner.req_to_token_pool.size
    return VerifyMask(
        buffer=torch.zeros(requests * size * size, dtype=torch.bool),
        mode=TreeMaskMode.QLEN_ONLY,
        max_bs=requests,
    )


def unsupported_model(model_runner: ModelRunner) -> list[str]:
    """List what a model needs and this backend lacks, one message each."""
    name = model_runner.model_config.model_path
    problems = []
    if model_runner.use_mla_backend and is_deepseek_dsa(model_runner.model_config.hf_config):
        problems.append(
            f"{name}: got a model that chooses the tokens it attends to (DeepSeek sparse attention); expected one that "
            f"attends to all, as {BACKEND} does. Serve this model on a GPU."
        )
    if model_runner.sliding_window_size is not None:
        problems.append(
            f"{name}: got sliding-window layers of {model_runner.sliding_window_size} tokens; expected layers that "
            f"attend to the whole context, as {BACKEND} does. Serve this model on a GPU, and leave out "
            "--speculative-draft-window-size here."
        )
    return problems


def unsupported_layer(layer: RadixAttention, arguments: dict[str, Any]) -> list[str]:
    """List what an attention layer asks for and this backend lacks, one message each."""
    wanted = {
        "a sliding window": layer.sliding_window_size is not None and layer.sliding_window_size > -1,
        "a logit cap": layer.logit_cap > 0,
        "cross attention": layer.is_cross_attention,
        "attention without a causal mask": layer.attn_type != AttentionType.DECODER,
        "temperature tuning by position": layer.xai_temperature_len > 0,
    } | {f"the argument {name!r}": value is not None for name, value in arguments.items()}
    return [
        f"attention layer {layer.layer_id}: got {what}; expected plain causal softmax attention, as {BACKEND} "
        "computes it. Serve this model on a GPU."
        for what, asked in wanted.items()
        if asked
    ]
