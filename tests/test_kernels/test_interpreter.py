"""The corrected interpreter against PyTorch: the arithmetic of narrow floats that every other kernel test trusts."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl
from interpreter import interpret, skip_products


@triton.jit
def _square_sum(x):
    return tl.sum(x * x, 0)


@triton.jit
def _arithmetic_kernel(X, Y, OUT, SQUARES, N: tl.constexpr):
    o = tl.arange(0, N)
    x, y = tl.load(X + o), tl.load(Y + o)
    tl.store(OUT + o, x + y)
    tl.store(OUT + N + o, x * y)
    tl.store(OUT + 2 * N + o, -x)
    tl.store(OUT + 3 * N + o, tl.where(x > y, x, y))
    tl.store(SQUARES, _square_sum(x.to(tl.float32)))


@triton.jit
def _cast_kernel(X, OUT, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(OUT + o, tl.load(X + o).to(OUT.dtype.element_ty))


@triton.jit
def _dot_kernel(A, B, OUT, PRECISION: tl.constexpr):
    o = tl.arange(0, 16)
    at = o[:, None] * 16 + o[None, :]
    tl.store(OUT + at, tl.dot(tl.load(A + at), tl.load(B + at), input_precision=PRECISION))


@triton.jit
def _reduce_kernel(X, OUT):
    tl.store(OUT, tl.sum(tl.load(X + tl.arange(0, 16)), 0))


interpret(sys.modules[__name__])


def test_bf16_arithmetic_is_that_of_torch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 64).to(torch.bfloat16)
    out, squares = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(1)
    _arithmetic_kernel[(1,)](x, y, out, squares, 64)
    assert torch.equal(out, torch.stack([x + y, x * y, -x, torch.maximum(x, y)]))
    torch.testing.assert_close(squares[0], x.float().square().sum())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_round_to_nearest_even_and_back_exactly(target: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(1000) * 3, torch.arange(-12, 12) / 16 + 0.03125]).resize_(1024)
    narrow, wide = torch.empty(1024, dtype=target), torch.empty(1024)
    _cast_kernel[(1,)](x, narrow, 1024)
    assert torch.equal(narrow.float(), x.to(target).float())
    _cast_kernel[(1,)](narrow, wide, 1024)
    assert torch.equal(wide, narrow.float())


def test_bf16_overflows_to_infinity_and_fp8_saturates() -> None:
    x = torch.tensor([3.4e38, -3.4e38, 500.0, float("nan")]).repeat(4)
    wide, narrow = torch.empty(16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.float8_e4m3fn)
    _cast_kernel[(1,)](x, wide, 16)
    _cast_kernel[(1,)](x, narrow, 16)
    assert wide[:3].tolist() == [float("inf"), float("-inf"), 500.0]
    assert narrow[:3].tolist() == [448.0, -448.0, 448.0]
    assert wide[3].isnan()
    assert narrow.float()[3].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_dot_multiplies_values(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, "ieee")
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_float32_is_rounded_to_tf32_unless_asked_otherwise() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16)
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, "tf32")
    error = (out - a @ b).abs().max()
    assert 1e-4 < error < 2e-2


def test_a_reduction_of_bf16_is_an_error() -> None:
    with pytest.raises(Exception, match="Cast before it"):
        _reduce_kernel[(1,)](torch.zeros(16, dtype=torch.bfloat16), torch.zeros(1))


def test_products_can_be_skipped() -> None:
    a, out = torch.ones(16, 16), torch.empty(16, 16)
    with skip_products():
        _dot_kernel[(1,)](a, a, out, "ieee")
    assert (out == 0).all()
    _dot_kernel[(1,)](a, a, out, "ieee")
    assert (out == 16).all()
