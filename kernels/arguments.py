"""How the kernels of this room word what is wrong with an argument, and how they fill a caller's buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch


def describe(t: torch.Tensor | None) -> str:
    """Spell out shape, dtype and device, never values."""
    if t is None:
        return "nothing"
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def devices_that_differ(device: torch.device, tensors: Mapping[str, torch.Tensor | None], owner: str) -> list[str]:
    """List one problem for each tensor that does not live where ``owner`` lives."""
    return [
        f"{name}: got a tensor on {t.device}; expected {device}, where {owner} is. Move it there."
        for name, t in tensors.items()
        if t is not None and t.device != device
    ]


def rows_that_are_not_contiguous(
    tensors: Mapping[str, torch.Tensor | None], *, whole: Collection[str] = ()
) -> list[str]:
    """List one problem for each tensor whose last axis is not contiguous, or, if in ``whole``, that has any gap."""
    return [
        f"{name}: got strides {list(t.stride())}; expected contiguous {'memory' if name in whole else 'rows'}."
        " Call .contiguous() once."
        for name, t in tensors.items()
        if t is not None and t.numel() and not (t.is_contiguous() if name in whole else t.stride(-1) == 1)
    ]


def buffer_that_differs(buffer: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor, name: str) -> list[str]:
    """List a problem where a caller's buffer is not of some shape, in the dtype and on the device of ``like``."""
    if buffer is None or (tuple(buffer.shape), buffer.dtype, buffer.device) == (tuple(shape), like.dtype, like.device):
        return []
    expected = f"{list(shape)} {str(like.dtype).removeprefix('torch.')} on {like.device}"
    return [f"{name}: got {describe(buffer)}; expected {expected}. Allocate it for these rows, or leave it out."]


def store(result: torch.Tensor, buffer: torch.Tensor | None, name: str) -> torch.Tensor:
    """Write a result into the caller's buffer, where there is one, and return what holds it."""
    if problems := buffer_that_differs(buffer, result.shape, result, name):
        raise ValueError(problems[0])
    return result if buffer is None else buffer.copy_(result)
