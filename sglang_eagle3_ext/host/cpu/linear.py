"""Weights packed for few rows: what a decode or a verification step multiplies with.

At 1 to 16 rows a linear layer costs the time it takes to read its weight. Three ways to read less or
faster, chosen once per weight from what the CPU can do (figures in ``docs/cpu.md``):

- *half*: the weight kept in float16, multiplied in float32 (FBGEMM). Weights that a checkpoint stores in
  bfloat16 or float16 lose nothing by it once scaled by a power of two, so a float32 model reads half the
  bytes for the same result. Used on any x86-64 CPU with AVX2, and only where the weight stays exact to
  float32 rounding.
- *oneDNN*: blocked for the CPU at hand, in the weight's own type: bfloat16 where the CPU multiplies it
  natively, float32 otherwise.
- *plain*: ``F.linear``, where the others are not to be had.

Legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

BLOCKED_ROWS = range(2, 65)
"""Rows for which a float32 weight blocked by oneDNN beats ``F.linear``."""

HALF_EXPONENT = 14
"""The largest weight is scaled to [2^14, 2^15), a factor of two below float16's largest number."""

ROUNDING = 2.0**-24
"""Half a float32 ulp: how much of its row's largest weight a packed weight may be off."""


class PackedWeight(ABC):
    """One weight, ready to multiply. Holds no reference to the weight it was made from."""

    name: str

    @abstractmethod
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``x weight^T + bias``.

        Args:
            x: [N, I]; N may be 0.
            weight: [O, I], the weight this was packed from.
            bias: [O] or ``None``.

        Returns:
            [N, O] in ``x.dtype``.
        """


class PlainWeight(PackedWeight):
    """No packing at all."""

    name = "plain"

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)


class OneDnnWeight(PackedWeight):
    """Blocked by oneDNN in the weight's own type."""

    name = "oneDNN"

    def __init__(self, weight: torch.Tensor) -> None:
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._any_rows = weight.dtype != torch.float32

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        if rows in BLOCKED_ROWS or (self._any_rows and rows):
            return torch.ops.mkldnn._linear_pointwise(x, self._blocked, bias, "none", [], "")
        return F.linear(x, weight, bias)


class HalfWeight(PackedWeight):
    """Kept in float16, multiplied and summed in float32."""

    name = "half"

    def __init__(self, weight: torch.Tensor, exponent: int) -> None:
        scaled = weight.detach().float() * 2.0**exponent
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        self._multiply = _half_multiply()
        self._outputs = weight.shape[0]
        self._unscale = 2.0**-exponent

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not x.shape[0]:
            return x.new_zeros(0, self._outputs)
        y = self._multiply(x.float(), self._packed)
        if self._unscale != 1.0:
            y.mul_(self._unscale)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)


@functools.cache
def _half_multiply() -> Callable[[torch.Tensor, object], torch.Tensor]:
    """Return the float16-weight product, compiled as a script.

    Called from Python, an operator that takes a packed-weight object resolves its overload by trial at
    every call, which takes longer than the product itself; a script resolves it once.
    """
    unit = torch.jit.CompilationUnit(
        """
def multiply(x: Tensor, packed: __torch__.torch.classes.quantized.LinearPackedParamsBase) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x, packed)
"""
    )
    return unit.multiply


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack one weight in the best way that this CPU and this weight allow.

    Args:
        weight: [O, I], floating point.

    Returns:
        The packed weight; ``PlainWeight`` when nothing better is to be had.
    """
    if weight.dtype == torch.bfloat16 and multiplies_bfloat16() and has_onednn(weight.dtype):
        return OneDnnWeight(weight)
    if has_half():
        exponent = half_exponent(weight)
        if exponent is not None:
            return HalfWeight(weight, exponent)
    if weight.dtype == torch.float32 and has_onednn(weight.dtype):
        return OneDnnWeight(weight)
    return PlainWeight()


def half_exponent(weight: torch.Tensor) -> int | None:
    """Find the power of two at which a weight fits float16.

    Args:
        weight: [O, I], floating point.

    Returns:
        0 when every number fits as it is, another exponent when it fits after scaling, ``None`` when it
        does not fit: some number would be off by more than half a float32 ulp of its row's largest.
    """
    wide = weight.detach().float()
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    if not math.isfinite(largest):
        return None
    if _fits_half(wide, 1.0):
        return 0
    exponent = HALF_EXPONENT - math.floor(math.log2(largest))
    return exponent if _fits_half(wide, 2.0**exponent) else None


def _fits_half(wide: torch.Tensor, scale: float) -> bool:
    kept = (wide * scale).half().float() / scale
    off = (kept - wide).abs().amax(dim=1)
    return bool((off <= wide.abs().amax(dim=1) * ROUNDING).all())


def multiplies_bfloat16() -> bool:
    """Say whether this CPU has bfloat16 instructions (AVX512-BF16 or AMX), not merely emulation."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@functools.cache
def has_half() -> bool:
    """Say whether this PyTorch multiplies with float16 weights, by trying it."""
    try:
        return bool((HalfWeight(torch.eye(3, 5), 1)(torch.ones(2, 5), torch.empty(0), None) == 1).all())
    except Exception as error:
        logger.info("float16 weight packing is not available here: %s", error)
        return False


@functools.cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Say whether this PyTorch blocks weights of a type with oneDNN, by trying it."""
    try:
        weight = torch.eye(3, 5, dtype=dtype)
        return bool((OneDnnWeight(weight)(torch.ones(2, 5, dtype=dtype), weight, None) == 1).all())
    except Exception as error:
        logger.info("oneDNN weight packing is not available here for %s: %s", dtype, error)
        return False
