"""Float64 oracles written from the definitions, and the one tolerance policy of the kernel tests.

Nothing here is shared with the code under test: loops and sums as the formulas read, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


def rms_norm_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Divide each row by the root of its mean square and scale it, one row at a time."""
    out = np.empty_like(x, dtype=np.float64)
    for i, row in enumerate(x.astype(np.float64)):
        out[i] = row / math.sqrt(sum(v * v for v in row) / len(row) + eps) * weight.astype(np.float64)
    return out


def fc_proj_oracle(
    sources: Sequence[np.ndarray],
    weight: np.ndarray,
    *,
    norm: str,
    norm_weight: np.ndarray | None,
    eps: float,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Sum ``norm_k(x_k) W_k^T`` source by source, each with its own column block of the weight."""
    width = sources[0].shape[1]
    blocks = [s.astype(np.float64) for s in sources]
    if norm == "per_source":
        assert norm_weight is not None
        blocks = [rms_norm_oracle(b, norm_weight[k], eps) for k, b in enumerate(blocks)]
    elif norm == "concatenation":
        assert norm_weight is not None
        total = rms_norm_oracle(np.concatenate(blocks, axis=1), norm_weight, eps)
        blocks = [total[:, k * width : (k + 1) * width] for k in range(len(blocks))]
    y = np.zeros((sources[0].shape[0], weight.shape[0]))
    for k, block in enumerate(blocks):
        y += np.einsum("tm,em->te", block, weight[:, k * width : (k + 1) * width].astype(np.float64))
    return y if bias is None else y + bias.astype(np.float64)


def as_float64(t: torch.Tensor) -> np.ndarray:
    """Promote a tensor of any floating dtype exactly."""
    return t.detach().to(torch.float64).numpy()


def assert_within_budget(
    actual: torch.Tensor,
    low_precision_eager: torch.Tensor,
    oracle: np.ndarray,
    *,
    reductions: Sequence[int],
) -> None:
    """Hold the error of ``actual`` to twice that of plain eager code in the same dtype, plus rounding.

    Args:
        actual: what the code under test returned.
        low_precision_eager: the same computation written in eager PyTorch in the same dtype.
        oracle: the float64 truth.
        reductions: lengths of the sums behind each element; float32 sums of n terms may differ by order.
    """
    assert actual.dtype == low_precision_eager.dtype
    assert tuple(actual.shape) == oracle.shape
    assert torch.isfinite(actual).all()
    scale = float(np.abs(oracle).max()) if oracle.size else 0.0
    output_rounding = torch.finfo(actual.dtype).eps / 2 * scale
    acc_eps = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps
    order = acc_eps * sum(math.sqrt(n) for n in reductions) * scale
    error = float(np.abs(as_float64(actual) - oracle).max()) if oracle.size else 0.0
    eager = float(np.abs(as_float64(low_precision_eager) - oracle).max()) if oracle.size else 0.0
    budget = 2 * eager + output_rounding + order
    assert error <= budget, f"error {error:.3e} exceeds budget {budget:.3e} (eager {eager:.3e})"
