"""Project the captured states of the target to the draft's width.

``y = sum_k norm_k(x_k) W_k^T (+ b)`` over K sources, where ``norm_k`` is nothing, one RMSNorm per source, or
one RMSNorm over the concatenation of all sources.

Dimensions: T rows, K sources, M target width, F = K*M fc input, E draft width, R gathered rows.
Layouts: x is one packed [T, K*M] tensor (source k in columns k*M..(k+1)*M) or K tensors [T, M]. The PyTorch
twin takes any strides.
Contract: close. Norms, products and sums in float32 (float64 when x is float64), one rounding at the end to
x's dtype; the normalised states are not rounded in between.
Does not: permute sources (the columns of ``weight`` stand in the order in which the sources arrive).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from sglang_eagle3_ext.kernels.arguments import describe, devices_that_differ, store
from sglang_eagle3_ext.kernels.rms_norm import accumulation_dtype, rms_norm_torch

Norm = Literal["none", "per_source", "concatenation"]


def fc_proj_torch(
    x: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    norm: Norm = "none",
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    num_sources: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise K sources and project them with one weight.

    Args:
        x: packed [T, K*M], or a sequence of K tensors [T, M] of one dtype and device.
        weight: [E, K*M], any floating dtype (a float32 copy prepared once saves a conversion per call).
        norm: ``none``; ``per_source`` (RMSNorm over each M); ``concatenation`` (RMSNorm over K*M).
        norm_weight: [K, M] for ``per_source``, [K*M] for ``concatenation``, absent for ``none``.
        eps: added to the mean square of the norms.
        bias: optional [E].
        rows: optional [R] int32 or int64 rows of x to project, in any order, repeats allowed; other rows are
            not read.
        num_sources: K of a packed x; taken from its length where x is a sequence.
        out: optional [T or R, E] result buffer in x's dtype.

    Returns:
        [T, E], or [R, E] where ``rows`` is given, in x's dtype.

    Raises:
        ValueError: a shape, dtype or device differs from the above; names the argument.
    """
    sources = [x] if isinstance(x, torch.Tensor) else list(x)
    k = _validate(sources, isinstance(x, torch.Tensor), weight, norm, norm_weight, bias, rows, num_sources)
    if rows is not None:
        sources = [s[rows] for s in sources]
    acc = accumulation_dtype(*sources)
    packed = sources[0] if len(sources) == 1 else torch.cat(sources, dim=-1)  # [T, K*M]
    states = packed.to(acc)
    if norm == "per_source" and norm_weight is not None:
        split = states.unflatten(-1, (k, states.shape[1] // k))  # [T, K, M]
        states = rms_norm_torch(split, norm_weight, eps=eps, acc=acc).flatten(-2)
    elif norm == "concatenation" and norm_weight is not None:
        states = rms_norm_torch(states, norm_weight, eps=eps, acc=acc)
    y = F.linear(states, weight.to(acc), None if bias is None else bias.to(acc)).to(packed.dtype)
    return store(y, out, "out")


def _validate(
    sources: list[torch.Tensor],
    packed: bool,
    weight: torch.Tensor,
    norm: str,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    num_sources: int,
) -> int:
    """Check every argument against the docstring of the public function and return K."""
    problems: list[str] = []
    if not sources:
        raise ValueError("x: got an empty sequence; expected at least one source [T, M]. Pass the captured states.")
    first = sources[0]
    for i, s in enumerate(sources):
        name = "x" if packed else f"x[{i}]"
        if s.dim() != 2 or not s.is_floating_point():
            problems.append(f"{name}: got {describe(s)}; expected a floating point matrix of T rows.")
        elif (s.shape, s.dtype, s.device) != (first.shape, first.dtype, first.device):
            problems.append(f"{name}: got {describe(s)}; expected what x[0] is, {describe(first)}.")
    k = num_sources if packed else len(sources)
    if k < 1 or (not packed and num_sources not in (1, k)):
        problems.append(f"num_sources: got {num_sources}; expected {'at least 1' if packed else len(sources)}.")
    if problems:
        raise ValueError("\n".join(problems))
    width = first.shape[1] * (1 if packed else k)
    if width % k:
        problems.append(f"x: got {width} columns for {k} sources; expected a multiple of {k}. Check num_sources.")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[1] != width:
        problems.append(
            f"weight: got {describe(weight)}; expected a floating point [E, {width}], the width of x."
            " Check that the captured sources are those the draft was trained on."
        )
    named = {"weight": weight, "norm_weight": norm_weight, "bias": bias, "rows": rows}
    problems += devices_that_differ(first.device, named, "x")
    if norm not in get_args(Norm):
        problems.append(f"norm: got {norm!r}; expected one of {', '.join(get_args(Norm))}.")
    elif norm == "none":
        if norm_weight is not None:
            problems.append('norm_weight: got a tensor with norm="none"; expected none. Name the norm it belongs to.')
    else:
        shape = (k, width // k) if norm == "per_source" else (width,)
        if norm_weight is None or tuple(norm_weight.shape) != shape:
            got = describe(norm_weight)
            problems.append(f'norm_weight: got {got}; expected {list(shape)} for norm="{norm}".')
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        problems.append(f"bias: got {describe(bias)}; expected [E] for weight {describe(weight)}.")
    if rows is not None and (rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64)):
        problems.append(f"rows: got {describe(rows)}; expected a vector of int32 or int64 row numbers.")
    if problems:
        raise ValueError("\n".join(problems))
    return k
