"""Row-wise mathematics of a decoder layer in few PyTorch calls. Legend: N rows, E width, D head size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIRRORED_ROWS = 64
"""Up to this many rows the call overhead outweighs doing the arithmetic twice."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    ``[x, -x]`` has mean zero and variance ``mean(x^2)``, so its layer norm is the RMS norm, and layer norm
    is one fused call where RMS norm is six.

    Args:
        x: [N, E].
        weight: [E].
        eps: added to the mean square.

    Returns:
        [N, E] in ``x.dtype``; computed in float32.
    """
    width = x.shape[-1]
    if x.dim() != 2 or x.shape[0] > MIRRORED_ROWS:
        return F.rms_norm(x.float(), (width,), weight.float(), eps).to(x.dtype)
    mirrored = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * width,), None, None, eps)
    return mirrored[:, :width] * weight


def rotation_table(
    cos_sin_cache: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up cosines and signed sines in the layout that ``rotate_heads`` wants.

    Args:
        cos_sin_cache: [max position, D], cosines in the first half, sines in the second.
        positions: [N].
        dtype: of the queries and keys.

    Returns:
        [N, 1, D] cosines, repeated for both halves, and [N, 1, D] sines, negative for the first half.
    """
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).to(dtype).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of every head against each other.

    Args:
        x: [N, heads * D], any row stride.
        cos: [N, 1, D] from ``rotation_table``.
        sin: likewise.

    Returns:
        [N, heads * D], or the shape of ``x`` where it has three axes.
    """
    heads = x.reshape(x.shape[0], -1, cos.shape[-1])
    halves_swapped = heads.roll(cos.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, halves_swapped, sin).view(x.shape)
