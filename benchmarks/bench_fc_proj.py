"""Time ``fc_proj`` against norms, concatenation and projection as operators of their own.

python -m benchmarks.bench_fc_proj [--shape NAME ...] [--provider NAME ...] [--out FILE.json]
python -m benchmarks.bench_fc_proj --smoke
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1" if "--smoke" in sys.argv else "0"

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang_eagle3_ext.kernels.fc_proj import Norm, fc_proj, quantise_fc_weight

from benchmarks.kernel_bench import Prepared, main

EPS = 1e-5


class Shape(NamedTuple):
    rows: int
    sources: int
    width: int
    out: int
    norm: Norm = "none"
    fp8: bool = False


MODELS = {
    "llama-3.1-8b": (3, 4096, 4096),
    "qwen3-32b": (3, 5120, 5120),
    "kimi-k2.5": (3, 7168, 7168),
    "kimi-k2.5-tp8": (3, 7168, 896),
}
SHAPES = {
    f"{model}-{rows}{'' if norm == 'none' else '-norms'}": Shape(rows, *dims, norm)
    for model, dims in MODELS.items()
    for norm in ("none", "per_source")
    for rows in (1, 8, 16, 64, 2048)
} | {f"{model}-{rows}-fp8": Shape(rows, *dims, fp8=True) for model, dims in MODELS.items() for rows in (1, 8, 64)}
SMOKE = Shape(3, 3, 33, 17, "per_source", fp8=True)


def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Draw the inputs of a shape and list who computes it."""
    rows, k, m, e, norm, fp8 = shape
    g = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, device=device)

    x = draw(rows, k * m).to(dtype)
    served = weight = (draw(e, k * m) * (k * m) ** -0.5).to(dtype)
    scale = None
    if fp8:
        # The quantised weight is what is served, so its values are the truth, and plain PyTorch reads them in full.
        served, scale = quantise_fc_weight(weight)
        weight = (served.float() * scale[:, None]).to(dtype)
    exact = served.double() if scale is None else served.double() * scale.double()[:, None]
    norm_weight = None if norm == "none" else (1 + 0.2 * draw(k, m)).to(dtype)

    def plain() -> torch.Tensor:
        if norm_weight is None:
            return F.linear(x, weight)
        blocks = [F.rms_norm(b, (m,), w, EPS) for b, w in zip(x.chunk(k, -1), norm_weight, strict=True)]
        return F.linear(torch.cat(blocks, -1), weight)

    options: dict[str, Any] = {"norm": norm, "norm_weight": norm_weight, "eps": EPS, "num_sources": k}
    providers: dict[str, Callable[[], torch.Tensor]] = {
        "torch": plain,
        "ours": lambda: fc_proj(x, served, weight_scale=scale, **options),
    }
    if device.type == "cuda":
        providers["torch.compile"] = torch.compile(plain)
    wide = x.double()
    if norm_weight is not None:
        blocks = wide.unflatten(-1, (k, m))
        wide = (blocks * (blocks.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm_weight.double()).flatten(-2)
    return Prepared(providers, wide @ exact.T, x.nbytes + served.nbytes + rows * e * x.element_size())


if __name__ == "__main__":
    main("fc_proj", (__doc__ or "").splitlines()[0], SHAPES, SMOKE, prepare)
