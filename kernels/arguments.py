"""How the kernels of this room word what is wrong with an argument, and how they fill a caller's buffer."""

from __future__ import annotations

import torch


def describe(t: torch.Tensor | None) -> str:
    """Spell out shape, dtype and device, never values."""
    if t is None:
        return "nothing"
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def devices_that_differ(device: torch.device, tensors: dict[str, torch.Tensor | None], owner: str) -> list[str]:
    """List one problem for each tensor that does not live where ``owner`` lives."""
    return [
        f"{name}: got a tensor on {t.device}; expected {device}, where {owner} is. Move it there."
        for name, t in tensors.items()
        if t is not None and t.device != device
    ]


def store(result: torch.Tensor, buffer: torch.Tensor | None, name: str) -> torch.Tensor:
    """Write a result into the caller's buffer, where there is one, and return what holds it."""
    if buffer is None:
        return result
    if (buffer.shape, buffer.dtype, buffer.device) != (result.shape, result.dtype, result.device):
        raise ValueError(
            f"{name}: got {describe(buffer)}; expected {describe(result)}. Allocate it for these rows, or leave it out."
        )
    return buffer.copy_(result)
