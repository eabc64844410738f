"""Row-wise mathematics of a decoder layer in few PyTorch calls. Legend: N rows, E width, D head size."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, of ``x + residual`` where given.

    Args:
        x: [..., E].
        weight: [E].
        eps: added to the mean square.
        residual: same shape and type as ``x``.

    Returns:
        The norm and the sum (``x`` itself without a residual), in ``x.dtype``. Sum and norm are computed
        in float32 and rounded once each.
    """
    total = x.float()
    if residual is not None:
        total = total + residual
    scale = torch.rsqrt(total.square().mean(-1, True).add_(eps))
    return (total * scale).mul_(weight).to(x.dtype), total.to(x.dtype)


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


def rotate_heads(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the two halves of every head against each other, queries and keys in one go.

    Args:
        query: [N, heads * D], any row stride.
        key: [N, key heads * D], any row stride.
        cos: [N, 1, D] from ``rotation_table``.
        sin: likewise.

    Returns:
        The rotated queries and keys, views into one tensor.
    """
    rows, width = query.shape
    size = cos.shape[-1]
    heads = torch.cat((query, key), dim=-1).view(rows, -1, size)
    rotated = torch.addcmul(heads * cos, heads.roll(size // 2, -1), sin).view(rows, -1)
    return rotated[:, :width], rotated[:, width:]
