"""RMSNorm in the accumulation dtype: the arithmetic that the fused kernels of this room share.

``y = x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32 (float64 when ``x`` is float64), in
the operation order of SGLang's ``RMSNorm.forward_native``, so that rounding the result once gives its bits.
"""

from __future__ import annotations

import torch


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Choose the dtype that sums run in: float64 when an input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, *, eps: float, acc: torch.dtype) -> torch.Tensor:
    """Normalise the last axis and return it unrounded.

    Args:
        x: [..., H], floating point.
        weight: broadcastable to ``x``, any floating dtype.
        eps: added to the mean square.
        acc: dtype of the arithmetic and of the result.

    Returns:
        [..., H] in ``acc``.
    """
    x = x.to(acc)
    mean_square = x.pow(2).mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * weight.to(acc)
