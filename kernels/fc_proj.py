"""Project the captured states of the target to the draft's width.

``y = sum_k norm_k(x_k) W_k^T (+ b)`` over K sources, where ``norm_k`` is nothing, one RMSNorm per source, or
one RMSNorm over the concatenation of all sources.

Dimensions: T rows, K sources, M target width, F = K*M fc input, E draft width, R gathered rows.
Layouts: x is one packed [T, K*M] tensor (source k in columns k*M..(k+1)*M) or K tensors [T, M]. The PyTorch
twin takes any strides; the kernel needs contiguous last axes and, of K tensors, one row stride.
Contract: close. Norms and sums in float32 (the twin: float64 when x is float64), one rounding at the end to x's
dtype. Neither the twin nor, in tiles of up to 32 rows, the kernel rounds the normalised states in between (two terms
in x's dtype hold each of them); in larger tiles the kernel rounds them once to x's dtype, which its matrix
instructions read. An FP8 weight is exact in that dtype, and its scales multiply the float32 sums.
Kernel: the weight is read once per tile of rows. Few rows: every part of every source is summed by a program of its
own, and a second kernel adds the parts in ascending order, so equal launches give equal bits. Many rows: one program
walks all parts. With a norm, one more launch in front reads the rows for their scales.
CUDA graphs: grids follow from shapes alone, nothing waits for the device.
Does not: permute sources (the columns of ``weight`` stand in the order in which the sources arrive), nor check the
values of ``rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang_eagle3_ext.kernels.arch import FcProjLaunch, arch_of, fc_proj_launch
from sglang_eagle3_ext.kernels.arguments import (
    buffer_that_differs,
    describe,
    devices_that_differ,
    rows_that_are_not_contiguous,
    store,
)
from sglang_eagle3_ext.kernels.rms_norm import accumulation_dtype, rms_norm_torch

Norm = Literal["none", "per_source", "concatenation"]

FP8 = torch.float8_e4m3fn
MOST_SOURCES = 8
"""Pointers that the kernel takes; a packed x counts as one and may hold any number of sources."""

MOST_ROWS_OF_TWO_TERMS = 32
"""Rows of a tile up to which normalised states enter unrounded; more would cost registers and time."""

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantise_fc_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise an fc weight to FP8, one scale per column of the result.

    Args:
        weight: [E, K*M], floating point.

    Returns:
        The weight [E, K*M] in float8_e4m3fn and its scales [E] float32: ``weight`` is about ``quantised * scale``.
    """
    largest = weight.abs().amax(dim=1).to(torch.float32)
    scale = torch.where(largest > 0, largest / torch.finfo(FP8).max, torch.ones_like(largest))
    return (weight.to(torch.float32) / scale[:, None]).to(FP8), scale


def fc_proj_torch(
    x: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    norm: Norm = "none",
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
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
        weight_scale: [E] float32 scales of a float8_e4m3fn weight, absent for any other.
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
    packed = isinstance(x, torch.Tensor)
    k = _validate(sources, packed, weight, norm, norm_weight, bias, weight_scale, rows, num_sources)
    if rows is not None:
        sources = [s[rows] for s in sources]
    acc = accumulation_dtype(*sources)
    states = (sources[0] if len(sources) == 1 else torch.cat(sources, dim=-1)).to(acc)  # [T, K*M]
    if norm == "per_source" and norm_weight is not None:
        split = states.unflatten(-1, (k, states.shape[1] // k))  # [T, K, M]
        states = rms_norm_torch(split, norm_weight, eps=eps, acc=acc).flatten(-2)
    elif norm == "concatenation" and norm_weight is not None:
        states = rms_norm_torch(states, norm_weight, eps=eps, acc=acc)
    wide = weight.to(acc) if weight_scale is None else weight.to(acc) * weight_scale[:, None].to(acc)
    y = F.linear(states, wide, None if bias is None else bias.to(acc)).to(sources[0].dtype)
    return store(y, out, "out")


# ---- kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _source(X0, X1, X2, X3, X4, X5, X6, X7, i_source, M, PACKED: tl.constexpr):
    """Point to the first column of a source."""
    if PACKED:
        p_x = X0 + i_source * M
    else:
        p_x = X0
        if i_source == 1:
            p_x = X1
        if i_source == 2:
            p_x = X2
        if i_source == 3:
            p_x = X3
        if i_source == 4:
            p_x = X4
        if i_source == 5:
            p_x = X5
        if i_source == 6:
            p_x = X6
        if i_source == 7:
            p_x = X7
    return p_x


@triton.jit(do_not_specialize=["T"])
def _inverse_rms_kernel(
    X0, X1, X2, X3, X4, X5, X6, X7, ROWS, INVERSE_RMS,
    T, eps, stride_x_t,
    M: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``1 / sqrt(mean(x^2) + eps)`` of one row over GROUP sources; grid (T, groups)."""
    i_t = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    row = i_t
    if GATHER:
        row = tl.load(ROWS + i_t).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(GROUP):
        p_x = _source(X0, X1, X2, X3, X4, X5, X6, X7, i_group * GROUP + i, M, PACKED) + row * stride_x_t
        for start in range(0, M, BLOCK):
            o_m = start + tl.arange(0, BLOCK)
            b_x = tl.load(p_x + o_m, mask=o_m < M, other=0.0).to(tl.float32)
            squares += b_x * b_x
    mean = tl.sum(squares, 0) / (GROUP * M)
    tl.store(INVERSE_RMS + i_group.to(tl.int64) * T + i_t, tl.rsqrt(mean + eps))


@triton.jit
def _store_result(p_y, BIAS, SCALE, b_y, o_e, mask, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, E):
    """Scale, shift, round and store sums whose last axis is ``o_e``; both addends broadcast over rows."""
    if HAS_SCALE:
        b_y *= tl.load(SCALE + o_e, mask=o_e < E, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(BIAS + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _fc_proj_kernel(
    X0, X1, X2, X3, X4, X5, X6, X7, W, NORM_WEIGHT, INVERSE_RMS, ROWS, BIAS, SCALE, Y, PARTIAL,
    T, E, stride_x_t, stride_w_e, stride_y_t,
    M: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, WALK: tl.constexpr,
    PACKED: tl.constexpr, NORM: tl.constexpr, NORM_GROUP: tl.constexpr, GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, SPLIT: tl.constexpr, TWO_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum WALK of all parts, PARTS per source, for one tile; grid (row tiles, column tiles, parts / WALK).

    Row tiles are the fastest axis: they share a tile of the weight while it is in the second-level cache.
    """
    i_walk = tl.program_id(2)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    # Lanes past the end repeat the last row and column instead of being masked: loads stay whole, nothing is stored.
    in_t = tl.minimum(o_t, T - 1)
    row = in_t.to(tl.int64)
    if GATHER:
        row = tl.load(ROWS + in_t).to(tl.int64)
    p_row = row[:, None] * stride_x_t
    p_w = W + tl.minimum(o_e, E - 1).to(tl.int64)[None, :] * stride_w_e
    o_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for i in range(WALK):
        i_part = i_walk * WALK + i
        i_source = i_part // PARTS
        first = (i_part % PARTS) * PART
        p_x = _source(X0, X1, X2, X3, X4, X5, X6, X7, i_source, M, PACKED) + p_row
        p_source_w = p_w + i_source * M
        if NORM:
            b_inverse = tl.load(INVERSE_RMS + (i_source // NORM_GROUP).to(tl.int64) * T + in_t)
        for k in tl.range(first, first + PART, BLOCK_K, num_stages=STAGES):
            in_k = k + o_k
            if M == PARTS * PART:
                b_x = tl.load(p_x + in_k[None, :])
                b_w = tl.load(p_source_w + in_k[:, None])
            else:
                b_x = tl.load(p_x + in_k[None, :], mask=in_k[None, :] < M, other=0.0)
                b_w = tl.load(p_source_w + in_k[:, None], mask=in_k[:, None] < M, other=0.0)
            if NORM:
                b_g = tl.load(NORM_WEIGHT + i_source * M + in_k, mask=in_k < M, other=0.0).to(tl.float32)
                b_normed = b_x.to(tl.float32) * b_inverse[:, None] * b_g[None, :]
                b_x = b_normed.to(b_x.dtype)
                if TWO_TERMS:
                    # Few rows wait for memory, so a second product hides behind it; it undoes the rounding.
                    b_rest = (b_normed - b_x.to(tl.float32)).to(b_x.dtype)
                    acc = tl.dot(b_rest, b_w.to(b_x.dtype), acc)
            acc = tl.dot(b_x, b_w.to(b_x.dtype), acc, input_precision=PRECISION)
    mask = (o_t < T)[:, None] & (o_e < E)[None, :]
    if SPLIT:
        p_partial = PARTIAL + (i_walk.to(tl.int64) * T + o_t)[:, None] * E + o_e[None, :]
        tl.store(p_partial, acc, mask=mask)
    else:
        p_y = Y + o_t.to(tl.int64)[:, None] * stride_y_t + o_e[None, :]
        _store_result(p_y, BIAS, SCALE, acc, o_e, mask, HAS_BIAS, HAS_SCALE, E)


@triton.jit(do_not_specialize=["T"])
def _add_parts_kernel(
    PARTIAL, BIAS, SCALE, Y,
    T, E, stride_y_t,
    PARTIALS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of one row in ascending order; grid (T, column tiles)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = o_e < E
    b_y = tl.zeros([BLOCK_E], tl.float32)
    for i in tl.static_range(PARTIALS):
        b_y += tl.load(PARTIAL + (i * T + i_t) * E + o_e, mask=mask, other=0.0)
    _store_result(Y + i_t * stride_y_t + o_e, BIAS, SCALE, b_y, o_e, mask, HAS_BIAS, HAS_SCALE, E)


def fc_proj(
    x: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    norm: Norm = "none",
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    num_sources: int = 1,
    out: torch.Tensor | None = None,
    launch: FcProjLaunch | None = None,
) -> torch.Tensor:
    """Normalise K sources and project them with one weight, in Triton kernels.

    Args:
        x: packed [T, K*M], or a sequence of up to 8 tensors [T, M] of one dtype, device and row stride; bf16, fp16
            or float32, last axis contiguous.
        weight: [E, K*M] in x's dtype or in float8_e4m3fn, last axis contiguous.
        norm: ``none``; ``per_source`` (RMSNorm over each M); ``concatenation`` (RMSNorm over K*M).
        norm_weight: [K, M] for ``per_source``, [K*M] for ``concatenation``, absent for ``none``; contiguous.
        eps: added to the mean square of the norms.
        bias: optional [E], contiguous.
        weight_scale: [E] float32 scales of a float8_e4m3fn weight, contiguous, absent for any other.
        rows: optional [R] int32 or int64 rows of x to project, in any order, repeats allowed, contiguous; other rows
            are not read. Numbers outside 0..T-1 are not noticed.
        num_sources: K of a packed x; taken from its length where x is a sequence.
        out: optional [T or R, E] result buffer in x's dtype, last axis contiguous; must not overlap an input.
        launch: how to cut the work; by default what ``fc_proj_launch`` chooses for the shape and the device.

    Returns:
        [T, E], or [R, E] where ``rows`` is given, in x's dtype.

    Raises:
        ValueError: a shape, dtype, device or stride differs from the above, or the device cannot read FP8 (compute
            capability below 8.9); names the argument.
    """
    packed = isinstance(x, torch.Tensor)
    sources = [x] if isinstance(x, torch.Tensor) else list(x)
    k = _validate(sources, packed, weight, norm, norm_weight, bias, weight_scale, rows, num_sources)
    first = sources[0]
    total, e = len(first) if rows is None else len(rows), len(weight)
    _validate_for_kernel(sources, weight, norm_weight, bias, weight_scale, rows, out, (total, e))
    m = weight.shape[1] // k
    y = torch.empty(total, e, dtype=first.dtype, device=first.device) if out is None else out
    if y.numel() == 0:
        return y
    if launch is None:
        launch = fc_proj_launch(total, k, m, e, arch=arch_of(first.device), itemsize=first.element_size())
    pointers = (sources + [first] * MOST_SOURCES)[:MOST_SOURCES]
    inverse_rms = None
    group = k if norm == "concatenation" else 1
    common = {"M": m, "PACKED": packed, "GATHER": rows is not None}
    if norm != "none":
        inverse_rms = torch.empty(k // group, total, dtype=torch.float32, device=first.device)
        _inverse_rms_kernel[(total, k // group)](
            *pointers, rows, inverse_rms, total, eps, first.stride(0),
            **common, GROUP=group, BLOCK=min(1024, max(16, triton.next_power_of_2(m))), num_warps=4,
        )  # fmt: skip
    part = triton.cdiv(triton.cdiv(m, launch.parts), launch.block_k) * launch.block_k
    parts = triton.cdiv(m, part)
    partials = k * parts if launch.split else 1
    partial = torch.empty(partials, total, e, dtype=torch.float32, device=first.device) if launch.split else None
    ends = {"HAS_BIAS": bias is not None, "HAS_SCALE": weight_scale is not None}
    grid = (triton.cdiv(total, launch.block_t), triton.cdiv(e, launch.block_e), partials)
    _fc_proj_kernel[grid](
        *pointers, weight, norm_weight, inverse_rms, rows, bias, weight_scale, y, partial,
        total, e, first.stride(0), weight.stride(0), y.stride(0),
        **common, **ends, PARTS=parts, PART=part, WALK=k * parts // partials, NORM=norm != "none", NORM_GROUP=group,
        SPLIT=launch.split, TWO_TERMS=launch.block_t <= MOST_ROWS_OF_TWO_TERMS and first.dtype != torch.float32,
        PRECISION="ieee" if first.dtype == torch.float32 else "tf32",
        BLOCK_T=launch.block_t, BLOCK_E=launch.block_e, BLOCK_K=launch.block_k, STAGES=launch.stages,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if launch.split:
        block_e = min(1024, triton.next_power_of_2(e))
        _add_parts_kernel[(total, triton.cdiv(e, block_e))](
            partial, bias, weight_scale, y, total, e, y.stride(0), PARTIALS=partials, **ends, BLOCK_E=block_e
        )
    return y


# ---- arguments --------------------------------------------------------------------------------------------


def _validate_for_kernel(
    sources: list[torch.Tensor],
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    rows: torch.Tensor | None,
    out: torch.Tensor | None,
    shape: tuple[int, int],
) -> None:
    """Check what the kernel asks for beyond the twin: strides, dtypes, a number of pointers, a buffer that fits."""
    first = sources[0]
    problems: list[str] = []
    if len(sources) > MOST_SOURCES:
        problems.append(f"x: got {len(sources)} tensors; expected at most {MOST_SOURCES}. Pack them into one.")
    if first.dtype not in KERNEL_DTYPES:
        problems.append(
            f"x: got {describe(first)}; expected bfloat16, float16 or float32. Use fc_proj_torch for others."
        )
    if weight.dtype not in (first.dtype, FP8):
        problems.append(f"weight: got {describe(weight)}; expected x's dtype or float8_e4m3fn. Convert it once.")
    if weight.dtype == FP8 and (capability := arch_of(first.device).capability) < 89:
        problems.append(
            f"weight: got float8_e4m3fn on compute capability {capability / 10}; expected 8.9 or newer."
            " Serve the weight unquantised."
        )
    if any(s.stride(0) != first.stride(0) for s in sources):
        problems.append("x: got sources of different row strides; expected one. Make them contiguous.")
    named = {"x": first, "weight": weight, "norm_weight": norm_weight, "bias": bias}
    named |= {f"x[{i}]": s for i, s in enumerate(sources[1:], start=1)}
    named |= {"weight_scale": weight_scale, "rows": rows, "out": out}
    problems += rows_that_are_not_contiguous(named, whole={"norm_weight"})
    problems += buffer_that_differs(out, shape, first, "out")
    if problems:
        raise ValueError("\n".join(problems))


def _validate(
    sources: list[torch.Tensor],
    packed: bool,
    weight: torch.Tensor,
    norm: str,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    rows: torch.Tensor | None,
    num_sources: int,
) -> int:
    """Check every argument against the docstring of the public functions and return K."""
    problems: list[str] = []
    if not sources:
        raise ValueError("x: got an empty sequence; expected at least one source [T, M]. Pass the captured states.")
    first = sources[0]
    for i, s in enumerate(sources):
        name = "x" if packed else f"x[{i}]"
        if s.dim() != 2 or not s.is_floating_point():
            problems.append(
                f"{name}: got {describe(s)}; expected a floating point matrix of T rows."
                " Give each captured state a row per token."
            )
        elif (s.shape, s.dtype, s.device) != (first.shape, first.dtype, first.device):
            problems.append(
                f"{name}: got {describe(s)}; expected what x[0] is, {describe(first)}."
                " Capture all of them from one target."
            )
    k = num_sources if packed else len(sources)
    if k < 1 or (not packed and num_sources not in (1, k)):
        problems.append(
            f"num_sources: got {num_sources}; expected {'at least 1' if packed else len(sources)}."
            " Count the sources, or leave it out."
        )
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
    named = {"weight": weight, "norm_weight": norm_weight, "bias": bias, "weight_scale": weight_scale, "rows": rows}
    problems += devices_that_differ(first.device, named, "x")
    if norm not in get_args(Norm):
        problems.append(f"norm: got {norm!r}; expected one of {', '.join(get_args(Norm))}. Name one of them.")
    elif norm == "none":
        if norm_weight is not None:
            problems.append('norm_weight: got a tensor with norm="none"; expected none. Name the norm it belongs to.')
    else:
        shape = (k, width // k) if norm == "per_source" else (width,)
        if norm_weight is None or tuple(norm_weight.shape) != shape:
            got = describe(norm_weight)
            problems.append(
                f'norm_weight: got {got}; expected {list(shape)} for norm="{norm}".'
                " Pass the norm that the draft was trained with."
            )
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        problems.append(
            f"bias: got {describe(bias)}; expected [E] for weight {describe(weight)}. Pass the bias of this weight."
        )
    scaled = weight_scale is not None and (weight_scale.shape, weight_scale.dtype) == (weight.shape[:1], torch.float32)
    if weight.dtype == FP8 and not scaled:
        problems.append(
            f"weight_scale: got {describe(weight_scale)}; expected [E] float32 for weight {describe(weight)}."
            " Quantise the weight with quantise_fc_weight."
        )
    if weight.dtype != FP8 and weight_scale is not None:
        problems.append(
            f"weight_scale: got {describe(weight_scale)}; expected none for weight {describe(weight)}. Leave it out."
        )
    if rows is not None and (rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64)):
        problems.append(
            f"rows: got {describe(rows)}; expected a vector of int32 or int64 row numbers."
            " Pass the rows to compute, or leave it out."
        )
    if problems:
        raise ValueError("\n".join(problems))
    return k
