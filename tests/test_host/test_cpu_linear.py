"""Packed weights against float64, for every packing this machine has."""

from __future__ import annotations

import pytest
import torch

from sglang_eagle3_ext.host.cpu import linear
from sglang_eagle3_ext.host.cpu.linear import HalfWeight, OneDnnWeight, PackedWeight, PlainWeight

ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65)
SHAPES = [(1, 1), (3, 5), (17, 33), (64, 7), (130, 96), (96, 1536)]


def make_weight(outputs: int, inputs: int, stored: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Make a weight as a checkpoint of type ``stored`` gives it to a model of type ``dtype``."""
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    return (torch.randn(outputs, inputs, generator=generator) * 0.05).to(stored).to(dtype)


def packings(weight: torch.Tensor) -> list[PackedWeight]:
    """Make every packing that this machine and this weight allow, and the one that ``pack`` chooses."""
    made = [PlainWeight(), linear.pack(weight)]
    exponent = linear.half_exponent(weight)
    if linear.has_half() and exponent is not None:
        made.append(HalfWeight(weight, exponent))
    if linear.has_onednn(weight.dtype):
        made.append(OneDnnWeight(weight))
    return made


def check(packed: PackedWeight, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
    """Compare with float64: at most twice the error of ``F.linear``, and a rounding of the result."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
    before = x.clone()
    y = packed(x, weight, bias)
    assert torch.equal(x, before)
    assert y.shape == (rows, weight.shape[0])
    assert y.dtype == weight.dtype
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    # Sums of float32 products, in any order, then one rounding to the result's type.
    sums = 2.0**-23 * max(4.0, weight.shape[1] ** 0.5) * magnitude
    rounding = 0 if weight.dtype == torch.float32 else 2.0**-8 * (exact.abs() + sums) + 2.0**-8 * (bias is not None)
    assert ((y.double() - exact).abs() <= sums + rounding).all(), (packed.name, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_matches_float64(shape: tuple[int, int], with_bias: bool, dtype: torch.dtype) -> None:
    weight = make_weight(*shape, torch.bfloat16, dtype)
    bias = make_weight(1, shape[0], torch.bfloat16, dtype)[0] if with_bias else None
    for packed in packings(weight):
        for rows in ROWS:
            check(packed, weight, bias, rows)


@pytest.mark.parametrize("shape", [(17, 33), (130, 96)], ids=str)
def test_float32_weights_that_half_cannot_hold(shape: tuple[int, int]) -> None:
    weight = make_weight(*shape, torch.float32, torch.float32)
    assert linear.half_exponent(weight) is None
    assert not isinstance(linear.pack(weight), HalfWeight)
    for packed in packings(weight):
        for rows in ROWS:
            check(packed, weight, None, rows)


@pytest.mark.parametrize("power", [-80, -30, -14, 0, 15, 60])
def test_bfloat16_weights_of_any_size_fit_half(power: int) -> None:
    """Every bfloat16 number within 2^-25 of its row's largest is kept exactly, whatever the scale."""
    weight = make_weight(40, 64, torch.bfloat16, torch.float32) * 2.0**power
    exponent = linear.half_exponent(weight)
    assert exponent is not None
    scaled = weight.double() * 2.0**exponent
    assert torch.equal(scaled.half().double(), scaled)
    if linear.has_half():
        for rows in (1, 4, 8):
            check(HalfWeight(weight, exponent), weight, None, rows)


def test_a_row_of_tiny_weights_is_not_lost() -> None:
    weight = make_weight(8, 16, torch.bfloat16, torch.float32)
    weight[3] *= 2.0**-40
    assert linear.half_exponent(weight) is None
    weight[3] = 0
    assert linear.half_exponent(weight) == 0


def test_single_tiny_weights_may_be_rounded_away() -> None:
    weight = make_weight(8, 16, torch.bfloat16, torch.float32)
    weight[3, 3] = 1e-30
    exponent = linear.half_exponent(weight)
    assert exponent is not None
    if linear.has_half():
        check(HalfWeight(weight, exponent), weight, None, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_left_alone(bad: float) -> None:
    weight = make_weight(8, 16, torch.bfloat16, torch.float32)
    weight[2, 2] = bad
    assert linear.half_exponent(weight) is None
    y = linear.pack(weight)(torch.ones(2, 16), weight, None)
    assert not y[:, 2].isfinite().any()


def test_zero_weights() -> None:
    weight = torch.zeros(5, 7)
    assert linear.half_exponent(weight) == 0
    assert torch.equal(linear.pack(weight)(torch.ones(3, 7), weight, None), torch.zeros(3, 5))


def test_columns_of_a_larger_tensor() -> None:
    """Rows that are views into a wider tensor (queries cut out of a joint projection)."""
    weight = make_weight(12, 20, torch.bfloat16, torch.float32)
    wide = torch.randn(6, 50)
    for packed in packings(weight):
        x = wide[:, 11:31]
        assert torch.allclose(packed(x, weight, None), x @ weight.T, atol=1e-6)


def test_the_choice_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(8, 16, torch.bfloat16, torch.float32)
    monkeypatch.setattr(linear, "has_half", lambda: False)
    monkeypatch.setattr(linear, "has_onednn", lambda dtype: dtype == torch.float32)
    assert isinstance(linear.pack(weight), OneDnnWeight)
    assert isinstance(linear.pack(weight.bfloat16()), PlainWeight)
    monkeypatch.setattr(linear, "has_onednn", lambda dtype: False)
    assert isinstance(linear.pack(weight), PlainWeight)


def test_native_bfloat16_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(linear, "has_onednn", lambda dtype: True)
    monkeypatch.setattr(linear, "OneDnnWeight", lambda weight: made.append(weight.dtype))
    linear.pack(torch.eye(4, dtype=torch.bfloat16))
    assert made == [torch.bfloat16]
