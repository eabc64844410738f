"""Time ``norm_concat`` against an embedding, two norms and a concatenation as operators of their own.

python -m benchmarks.bench_norm_concat [--shape NAME ...] [--provider NAME ...] [--out FILE.json]
python -m benchmarks.bench_norm_concat --smoke
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1" if "--smoke" in sys.argv else "0"

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_eagle3_ext.kernels.norm_concat import norm_concat

from benchmarks.kernel_bench import Prepared, main

EPS = 1e-5


class Shape(NamedTuple):
    rows: int
    width: int
    vocab: int


MODELS = {"llama-3.1-8b": (4096, 128256), "qwen3-32b": (5120, 151936), "kimi-k2.5": (7168, 163840)}
SHAPES = {f"{model}-{rows}": Shape(rows, *dims) for model, dims in MODELS.items() for rows in (1, 8, 64, 2048)}
SMOKE = Shape(3, 33, 19)


def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Draw the inputs of a shape and list who computes it."""
    rows, e, vocab = shape
    g = torch.Generator(device).manual_seed(0)
    table = torch.randn(vocab, e, generator=g, device=device).mul(0.02).to(dtype)
    hidden = torch.randn(rows, e, generator=g, device=device).mul(30).to(dtype)
    tokens = torch.randint(vocab, (rows,), generator=g, device=device)
    left, right = (1 + 0.2 * torch.randn(2, e, generator=g, device=device)).to(dtype)

    def plain() -> torch.Tensor:
        normed = F.rms_norm(F.embedding(tokens, table), (e,), left, EPS)
        return torch.cat([normed, F.rms_norm(hidden, (e,), right, EPS)], -1)

    def ours() -> torch.Tensor:
        return norm_concat(hidden, tokens, table, embed_norm_weight=left, hidden_norm_weight=right, eps=EPS)[0]

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    providers: dict[str, Callable[[], torch.Tensor]] = {"torch": plain, "ours": ours}
    if device.type == "cuda":
        providers["torch.compile"] = torch.compile(plain)
    truth = torch.cat([exact(table[tokens], left), exact(hidden, right)], -1)
    nbytes = 2 * hidden.nbytes + left.nbytes + right.nbytes + truth.numel() * hidden.element_size()
    return Prepared(providers, truth, nbytes)


if __name__ == "__main__":
    main("norm_concat", (__doc__ or "").splitlines()[0], SHAPES, SMOKE, prepare)
