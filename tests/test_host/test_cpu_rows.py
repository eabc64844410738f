"""Norm and rotation of the CPU platform against float64."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import as_float64, rms_norm_oracle

from sglang_eagle3_ext.host.cpu import rows


@pytest.mark.parametrize("count", [0, 1, 3, 65])
@pytest.mark.parametrize("width", [1, 7, 64, 576, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shift", [0.0, 50.0])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(count: int, width: int, dtype: torch.dtype, shift: float, with_residual: bool) -> None:
    generator = torch.Generator().manual_seed(count * 10000 + width)
    x = (torch.randn(count, width, generator=generator) + shift).to(dtype)
    residual = torch.randn(count, width, generator=generator).to(dtype) if with_residual else None
    weight = torch.randn(width, generator=generator).to(dtype)
    given = [tensor.clone() for tensor in (x, weight)]
    y, total = rows.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(x, given[0])
    assert torch.equal(weight, given[1])
    assert y.dtype == total.dtype == dtype
    exact = x.double() + (0 if residual is None else residual.double())
    rounding = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    assert ((total.double() - exact).abs() <= rounding * exact.abs()).all()
    expected = torch.from_numpy(rms_norm_oracle(exact.numpy(), as_float64(weight), 1e-5))
    assert ((y.double() - expected).abs() <= 3 * rounding * expected.abs() + 1e-7).all()


@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("head_size", [2, 6, 64])
def test_rotation(count: int, heads: int, head_size: int) -> None:
    """Each pair (x[i], x[i + D/2]) turns by position * theta^(-2i/D)."""
    half = head_size // 2
    angles = torch.arange(40, dtype=torch.float64)[:, None] * 10000.0 ** (
        -2 * torch.arange(half, dtype=torch.float64) / head_size
    )
    cache = torch.cat((angles.cos(), angles.sin()), -1).float()
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(0, 40, (count,), generator=generator)
    wide = torch.randn(count, heads * head_size + 5, generator=generator)
    x = wide[:, 2 : 2 + heads * head_size]
    cos, sin = rows.rotation_table(cache, positions, torch.float32)
    y, one_head = rows.rotate_heads(x, wide[:, :head_size], cos, sin)
    if heads == 1:
        swapped = rows.rotate_heads(wide[:, :head_size], x, cos, sin)
        assert torch.equal(swapped[0], one_head)
        assert torch.equal(swapped[1], y)
    for row, position in enumerate(positions.tolist()):
        for head in range(heads):
            for i in range(half):
                angle = float(angles[position, i])
                a, b = float(x[row, head * head_size + i]), float(x[row, head * head_size + half + i])
                turned = (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle))
                got = (float(y[row, head * head_size + i]), float(y[row, head * head_size + half + i]))
                assert got == pytest.approx(turned, abs=1e-5)
