"""The small operators of a decoder layer, in fewer PyTorch calls.

With a few rows each call costs more than its arithmetic. Every function has the signature of the
``forward_native`` that it stands in for, takes the op as ``self``, computes the same numbers, and hands
the variants it does not cover to ``forward_native``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

from sglang_eagle3_ext.host.cpu.rows import rms_norm, rotate_heads, rotation_table

DISPATCH_KEY = "native"


def register_operators() -> None:
    """Register the operators for the classes whose own PyTorch form they replace."""
    BaseFusedOp.register_oot_forward(RMSNorm, forward_rms_norm, DISPATCH_KEY)
    BaseFusedOp.register_oot_forward(SiluAndMul, forward_silu_and_mul, DISPATCH_KEY)
    for rotary in (RotaryEmbedding, LinearScalingRotaryEmbedding, Llama3RotaryEmbedding):
        BaseFusedOp.register_oot_forward(rotary, forward_rotary, DISPATCH_KEY)


def forward_rms_norm(
    self: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise ``x``, or ``x + residual`` and return that sum too."""
    plain = (
        self.variance_size_override is None
        and not self.cast_x_before_out_mul
        and not self.fp32_residual
        and self.override_orig_dtype is None
        and post_residual_addition is None
        and x.shape[-1] == self.hidden_size
    )
    if not plain:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    normed, total = rms_norm(x, self.weight, self.variance_epsilon, residual)
    return normed if residual is None else (normed, total)


def forward_silu_and_mul(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(first half) * second half`` over the last axis."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def forward_rotary(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, with cosines and sines looked up once per forward pass."""
    plain = (
        self.is_neox_style
        and self.rotary_dim == self.head_size
        and query.dim() == key.dim() == 2
        and offsets is None
        and fused_set_kv_buffer_arg is None
    )
    if not plain:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    source = self.cos_sin_cache
    known = self.__dict__.get("_cpu_rotation")
    # All layers share this module and see the same positions; the values are compared because drafting
    # advances the positions in place.
    if known is None or known[0] is not source or known[1].dtype != query.dtype or not torch.equal(known[3], positions):
        known = (source, *rotation_table(source, positions, query.dtype), positions.clone())
        self.__dict__["_cpu_rotation"] = known
    _, cos, sin, _ = known
    return rotate_heads(query, key, cos, sin)
