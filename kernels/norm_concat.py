"""Build the input of the draft's first layer.

``cat = [RMSNorm(embedding of the token) | RMSNorm(hidden)]`` together with the residual that the layer adds
its attention to: the hidden state itself (``pre_norm``), or the hidden state after its norm (``post_norm``).

Dimensions: T rows, E draft width, V rows of the embedding.
Layouts: the PyTorch twin takes any strides, the kernel any row strides.
Contract: the twin is exact against two RMSNorms and a concatenation, the kernel close (its sums run in another order).
Norms in float32 (the twin: float64 when an input is float64), one rounding to hidden's dtype.
Kernel: one launch, one program per row and half.
CUDA graphs: the grid follows from shapes alone, nothing waits for the device.
Does not: check token ids, nor look ids up in a table that is split over ranks (pass embeddings there).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from sglang_eagle3_ext.kernels.arguments import (
    buffer_that_differs,
    describe,
    devices_that_differ,
    rows_that_are_not_contiguous,
    store,
)
from sglang_eagle3_ext.kernels.rms_norm import accumulation_dtype, rms_norm_torch

Residual = Literal["pre_norm", "post_norm"]

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 16384
"""Columns that one program of the kernel holds in registers."""


def norm_concat_torch(
    hidden: torch.Tensor,
    tokens_or_embeds: torch.Tensor,
    embed_weight: torch.Tensor | None = None,
    *,
    embed_norm_weight: torch.Tensor,
    hidden_norm_weight: torch.Tensor,
    eps: float,
    residual: Residual = "pre_norm",
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the embedding and the hidden state, lay them side by side, and hand on the residual.

    Args:
        hidden: [T, E], floating point: the ``fc`` output or the draft's own previous state.
        tokens_or_embeds: [T] int32 or int64 token ids, looked up in ``embed_weight``; or [T, E] embeddings.
        embed_weight: [V, E] where ids are given, absent where embeddings are given.
        embed_norm_weight: [E].
        hidden_norm_weight: [E].
        eps: added to the mean square of both norms.
        residual: ``pre_norm`` hands back ``hidden`` itself (the same tensor, not a copy); ``post_norm`` hands
            back the normed hidden state in memory of its own.
        out: optional [T, 2E] buffer for the concatenation, in hidden's dtype.
        residual_out: optional [T, E] buffer for a ``post_norm`` residual, in hidden's dtype.

    Returns:
        The concatenation [T, 2E] and the residual [T, E], both in hidden's dtype.

    Raises:
        ValueError: a shape, dtype or device differs from the above; names the argument.
    """
    _validate(hidden, tokens_or_embeds, embed_weight, embed_norm_weight, hidden_norm_weight, residual)
    embeds = tokens_or_embeds
    if embed_weight is not None:
        embeds = torch.nn.functional.embedding(tokens_or_embeds, embed_weight)
    acc = accumulation_dtype(hidden, embeds)
    normed = rms_norm_torch(hidden, hidden_norm_weight, eps=eps, acc=acc).to(hidden.dtype)
    left = rms_norm_torch(embeds, embed_norm_weight, eps=eps, acc=acc).to(hidden.dtype)
    carried = hidden if residual == "pre_norm" else store(normed, residual_out, "residual_out")
    return store(torch.cat([left, normed], dim=-1), out, "out"), carried


# ---- kernel -----------------------------------------------------------------------------------------------


@triton.jit
def _norm_concat_kernel(
    HIDDEN, TOKENS, EMBEDS, EMBED_NORM, HIDDEN_NORM, OUT, RESIDUAL,
    eps, stride_hidden_t, stride_embeds_t, stride_out_t, stride_residual_t,
    E: tl.constexpr, LOOK_UP: tl.constexpr, WRITE_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one half of one row; grid (T, 2), half 0 is the embedding."""
    i_t = tl.program_id(0).to(tl.int64)
    i_half = tl.program_id(1)
    o_e = tl.arange(0, BLOCK)
    mask = o_e < E
    if i_half == 0:
        row = i_t
        if LOOK_UP:
            row = tl.load(TOKENS + i_t).to(tl.int64)
        b_x = tl.load(EMBEDS + row * stride_embeds_t + o_e, mask=mask, other=0.0).to(tl.float32)
        b_w = tl.load(EMBED_NORM + o_e, mask=mask, other=0.0).to(tl.float32)
    else:
        b_x = tl.load(HIDDEN + i_t * stride_hidden_t + o_e, mask=mask, other=0.0).to(tl.float32)
        b_w = tl.load(HIDDEN_NORM + o_e, mask=mask, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / E + eps) * b_w
    tl.store(OUT + i_t * stride_out_t + i_half * E + o_e, b_y.to(OUT.dtype.element_ty), mask=mask)
    if WRITE_RESIDUAL:
        p_residual = RESIDUAL + i_t * stride_residual_t + o_e
        tl.store(p_residual, b_y.to(RESIDUAL.dtype.element_ty), mask=o_e < i_half * E)  # half 1 only


def norm_concat(
    hidden: torch.Tensor,
    tokens_or_embeds: torch.Tensor,
    embed_weight: torch.Tensor | None = None,
    *,
    embed_norm_weight: torch.Tensor,
    hidden_norm_weight: torch.Tensor,
    eps: float,
    residual: Residual = "pre_norm",
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the embedding and the hidden state and lay them side by side, in one Triton kernel.

    Args:
        hidden: [T, E], bf16, fp16 or float32, last axis contiguous: the ``fc`` output or the draft's own previous
            state.
        tokens_or_embeds: [T] int32 or int64 token ids, looked up in ``embed_weight``, contiguous; or [T, E]
            embeddings of a dtype that hidden may have, last axis contiguous. Ids outside 0..V-1 are not noticed.
        embed_weight: [V, E] where ids are given, last axis contiguous, absent where embeddings are given.
        embed_norm_weight: [E], contiguous.
        hidden_norm_weight: [E], contiguous.
        eps: added to the mean square of both norms.
        residual: ``pre_norm`` hands back ``hidden`` itself (the same tensor, not a copy); ``post_norm`` hands
            back the normed hidden state in memory of its own.
        out: optional [T, 2E] buffer for the concatenation, in hidden's dtype, last axis contiguous; must not overlap
            an input.
        residual_out: optional [T, E] buffer for a ``post_norm`` residual, likewise; ignored for ``pre_norm``.

    Returns:
        The concatenation [T, 2E] and the residual [T, E], both in hidden's dtype.

    Raises:
        ValueError: a shape, dtype, device or stride differs from the above, or E is above 16384; names the argument.
    """
    _validate(hidden, tokens_or_embeds, embed_weight, embed_norm_weight, hidden_norm_weight, residual)
    embeds = tokens_or_embeds if embed_weight is None else embed_weight
    rows, width = hidden.shape
    named = {"hidden": hidden, "tokens_or_embeds": tokens_or_embeds, "embed_weight": embed_weight}
    named |= {"embed_norm_weight": embed_norm_weight, "hidden_norm_weight": hidden_norm_weight}
    problems = [
        f"{name}: got {describe(t)}; expected bfloat16, float16 or float32. Use norm_concat_torch for others."
        for name, t in named.items()
        if t is not None and t.is_floating_point() and t.dtype not in KERNEL_DTYPES
    ]
    if width > WIDEST:
        problems.append(f"hidden: got {width} columns; expected at most {WIDEST}. Use norm_concat_torch for others.")
    problems += rows_that_are_not_contiguous(named | {"out": out, "residual_out": residual_out})
    problems += buffer_that_differs(out, (rows, 2 * width), hidden, "out")
    keeps = residual == "post_norm"
    if keeps:
        problems += buffer_that_differs(residual_out, (rows, width), hidden, "residual_out")
    if problems:
        raise ValueError("\n".join(problems))
    cat = torch.empty(rows, 2 * width, dtype=hidden.dtype, device=hidden.device) if out is None else out
    carried = hidden
    if keeps and residual_out is not None:
        carried = residual_out
    elif keeps:
        carried = torch.empty(rows, width, dtype=hidden.dtype, device=hidden.device)
    if cat.numel() == 0:
        return cat, carried
    _norm_concat_kernel[(rows, 2)](
        hidden, tokens_or_embeds, embeds, embed_norm_weight, hidden_norm_weight, cat, carried,
        eps, hidden.stride(0), embeds.stride(0), cat.stride(0), carried.stride(0),
        E=width, LOOK_UP=embed_weight is not None, WRITE_RESIDUAL=keeps, BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return cat, carried


# ---- arguments --------------------------------------------------------------------------------------------


def _validate(
    hidden: torch.Tensor,
    tokens_or_embeds: torch.Tensor,
    embed_weight: torch.Tensor | None,
    embed_norm_weight: torch.Tensor,
    hidden_norm_weight: torch.Tensor,
    residual: str,
) -> None:
    """Check every argument against the docstring of the public function."""
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(f"hidden: got {describe(hidden)}; expected a floating point [T, E]. Pass one row per token.")
    problems: list[str] = []
    rows, width = hidden.shape
    if tokens_or_embeds.is_floating_point():
        if tokens_or_embeds.shape != hidden.shape:
            problems.append(
                f"tokens_or_embeds: got {describe(tokens_or_embeds)};"
                f" expected [{rows}, {width}] embeddings, the shape of hidden."
                " Embed the tokens of these rows."
            )
        if embed_weight is not None:
            problems.append("embed_weight: got a table beside embeddings; expected it with token ids only. Pass one.")
    else:
        is_ids = tokens_or_embeds.dtype in (torch.int32, torch.int64)
        if tuple(tokens_or_embeds.shape) != (rows,) or not is_ids:
            problems.append(
                f"tokens_or_embeds: got {describe(tokens_or_embeds)}; expected [{rows}] int32 or int64 ids."
                " Pass one token per row of hidden."
            )
        if embed_weight is None or embed_weight.dim() != 2 or embed_weight.shape[1] != width:
            problems.append(
                f"embed_weight: got {describe(embed_weight)}; expected [V, {width}], the width of hidden."
                " Pass the embedding that the draft reads."
            )
    for name, t in (("embed_norm_weight", embed_norm_weight), ("hidden_norm_weight", hidden_norm_weight)):
        if tuple(t.shape) != (width,):
            problems.append(
                f"{name}: got {describe(t)}; expected [{width}], the width of hidden. Pass the layer's own norm."
            )
    named = {
        "tokens_or_embeds": tokens_or_embeds,
        "embed_weight": embed_weight,
        "embed_norm_weight": embed_norm_weight,
        "hidden_norm_weight": hidden_norm_weight,
    }
    problems += devices_that_differ(hidden.device, named, "hidden")
    if residual not in get_args(Residual):
        problems.append(
            f"residual: got {residual!r}; expected one of {', '.join(get_args(Residual))}. Name one of them."
        )
    if problems:
        raise ValueError("\n".join(problems))
