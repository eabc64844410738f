"""Which operators compute the projection of captured states and the input of the first layer.

Decided once, when a draft is built, from its device, dtype and widths; the start-up block says what was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_eagle3_ext.host.switches import read_switches
from sglang_eagle3_ext.kernels import fc_proj as projection
from sglang_eagle3_ext.kernels import norm_concat as concatenation
from sglang_eagle3_ext.kernels.arch import arch_of, implementation_for

FP8_CAPABILITY = 89
"""The first compute capability that reads FP8 weights."""


@dataclass(frozen=True)
class Operators:
    """What computes in the place of stock's operators.

    Attributes:
        fc_proj: the projection, or ``None`` where stock's operators compute it.
        norm_concat: the input of the first layer, likewise.
        float32_weight: whether the projection reads a float32 copy of its weight, which spares a conversion per pass.
        fp8_weight: whether it reads an FP8 copy with a scale per column.
        text: the decision, for the log.
    """

    fc_proj: Callable[..., torch.Tensor] | None
    norm_concat: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None
    text: str
    float32_weight: bool = False
    fp8_weight: bool = False


def choose_operators(device: torch.device, dtype: torch.dtype, width: int, quantisation: str | None) -> Operators:
    """Choose between the Triton kernels, their PyTorch twins and stock's operators.

    Args:
        device: where the draft computes.
        dtype: of its weights and states.
        width: E, the draft's width.
        quantisation: SGLang's name of the method in which the draft's linear layers are served, if any; ``fp8`` holds
            for the projection too where the kernel serves.
    """
    if not read_switches().kernels:
        return Operators(None, None, "off; stock's operators compute the draft (EAGLE3_EXT_KERNELS=off)")
    serves = implementation_for(device) == "triton"
    if serves and dtype in projection.KERNEL_DTYPES:
        fp8 = quantisation == "fp8" and arch_of(device).capability >= FP8_CAPABILITY
        text = "fc_proj" + (" on FP8 weights with a scale per column" if fp8 else "")
        if width > concatenation.WIDEST:
            text += f" in Triton; stock's norms, which take widths above {concatenation.WIDEST}"
            return Operators(projection.fc_proj, None, text, fp8_weight=fp8)
        text += " and norm_concat in Triton"
        return Operators(projection.fc_proj, concatenation.norm_concat, text, fp8_weight=fp8)
    if device.type == "cpu":
        text = "fc_proj and norm_concat, PyTorch twins in float32"
        return Operators(projection.fc_proj_torch, concatenation.norm_concat_torch, text, float32_weight=True)
    why = f"no kernel computes in {dtype}" if serves else f"no kernel serves on this {device.type} device"
    return Operators(None, None, f"stock's operators compute the draft ({why})")
