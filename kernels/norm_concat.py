"""Build the input of the draft's first layer.

``cat = [RMSNorm(embedding of the token) | RMSNorm(hidden)]`` together with the residual that the layer adds
its attention to: the hidden state itself (``pre_norm``), or the hidden state after its norm (``post_norm``).

Dimensions: T rows, E draft width, V rows of the embedding.
Contract: exact against two RMSNorms and a concatenation; norms in float32 (float64 when an input is float64),
one rounding to hidden's dtype.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from sglang_eagle3_ext.kernels.arguments import describe, devices_that_differ, store
from sglang_eagle3_ext.kernels.rms_norm import accumulation_dtype, rms_norm_torch

Residual = Literal["pre_norm", "post_norm"]


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
            )
        if embed_weight is not None:
            problems.append("embed_weight: got a table beside embeddings; expected it with token ids only. Pass one.")
    else:
        is_ids = tokens_or_embeds.dtype in (torch.int32, torch.int64)
        if tuple(tokens_or_embeds.shape) != (rows,) or not is_ids:
            problems.append(
                f"tokens_or_embeds: got {describe(tokens_or_embeds)}; expected [{rows}] int32 or int64 ids."
            )
        if embed_weight is None or embed_weight.dim() != 2 or embed_weight.shape[1] != width:
            problems.append(f"embed_weight: got {describe(embed_weight)}; expected [V, {width}], the width of hidden.")
    for name, t in (("embed_norm_weight", embed_norm_weight), ("hidden_norm_weight", hidden_norm_weight)):
        if tuple(t.shape) != (width,):
            problems.append(f"{name}: got {describe(t)}; expected [{width}], the width of hidden.")
    named = {
        "tokens_or_embeds": tokens_or_embeds,
        "embed_weight": embed_weight,
        "embed_norm_weight": embed_norm_weight,
        "hidden_norm_weight": hidden_norm_weight,
    }
    problems += devices_that_differ(hidden.device, named, "hidden")
    if residual not in get_args(Residual):
        problems.append(f"residual: got {residual!r}; expected one of {', '.join(get_args(Residual))}.")
    if problems:
        raise ValueError("\n".join(problems))
