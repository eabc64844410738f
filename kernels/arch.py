"""What a GPU is to the kernels, and the tiles that suit it: the one reader of device properties.

A table row is chosen when a call is prepared, never searched for while serving. No time was ever measured for
these rows: they follow from the bytes a tile moves and from the registers and shared memory that
``tests/test_kernels/test_compile_*.py`` reads from the machine code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton


@dataclass(frozen=True)
class Arch:
    """The facts of a device that choose a tile.

    Attributes:
        capability: compute capability, 90 for 9.0.
        multiprocessors: how many programs it runs at least at a time.
    """

    capability: int
    multiprocessors: int


H200 = Arch(capability=90, multiprocessors=132)
"""What the interpreter plays, which has no device."""


@functools.cache
def arch_of(device: torch.device) -> Arch:
    """Read what a tensor's device is; the CPU of the interpreter counts as an H200."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Arch(10 * properties.major + properties.minor, properties.multi_processor_count)


def implementation_for(device: torch.device) -> Literal["triton", "torch"]:
    """Decide, once and outside of every wrapper, whether kernels or their PyTorch twins serve on a device.

    Kernels serve on NVIDIA devices from compute capability 8.0, and on the CPU where Triton's interpreter is on
    (``TRITON_INTERPRET=1``).
    """
    if device.type == "cuda" and torch.version.hip is None:
        return "triton" if arch_of(device).capability >= 80 else "torch"
    return "triton" if device.type == "cpu" and triton.knobs.runtime.interpret else "torch"


# ---- fc_proj ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FcProjLaunch:
    """How ``fc_proj`` cuts its work.

    Attributes:
        block_t: rows of one program.
        block_e: columns of the result of one program.
        block_k: columns of x per step.
        parts: pieces that the columns of one source are cut into.
        split: whether every piece has a program of its own, whose partial sums a second kernel adds; else one
            program walks all pieces.
        warps: of a program.
        stages: of the software pipeline.
    """

    block_t: int
    block_e: int
    block_k: int
    parts: int
    split: bool
    warps: int
    stages: int


# Up to this many rows, the tile (block_t, block_e, block_k, warps, stages). Skinny tiles keep many bytes of the
# weight in flight; the last row is for prefill, where x matters as much.
_FC_PROJ_TILES = (
    (16, (16, 64, 128, 4, 4)),
    (32, (32, 64, 128, 4, 4)),
    (64, (64, 128, 64, 8, 4)),
    (None, (128, 128, 64, 8, 3)),
)


def fc_proj_launch(
    rows: int, sources: int, width: int, out_width: int, *, arch: Arch, itemsize: int = 2
) -> FcProjLaunch:
    """Choose the tiles of ``fc_proj`` for T rows, K sources of width M and E result columns.

    Args:
        rows: T; the smallest row of the table that holds them is taken.
        sources: K.
        width: M.
        out_width: E.
        arch: the device.
        itemsize: bytes of an element of x; four halve the step, so that shared memory holds as many.

    Returns:
        A launch whose programs fill the device twice over where the columns of the sources suffice for it.
    """
    block_t, block_e, block_k, warps, stages = next(t for most, t in _FC_PROJ_TILES if most is None or rows <= most)
    block_k = min(block_k * 2 // itemsize, max(16, triton.next_power_of_2(width)))
    tiles = triton.cdiv(rows, block_t) * triton.cdiv(out_width, block_e)
    if tiles >= arch.multiprocessors and rows > block_t:
        return FcProjLaunch(block_t, block_e, block_k, 1, False, warps, stages)
    wanted = triton.cdiv(2 * arch.multiprocessors, max(tiles, 1) * sources)
    # A part shorter than the pipeline would be all prologue.
    longest = max(1, width // (stages * block_k))
    return FcProjLaunch(block_t, block_e, block_k, min(wanted, longest), True, warps, stages)


# ---- tree verification: the tables of split_merge, tree_verify_gqa and tree_verify_mla follow -------------


@dataclass(frozen=True)
class TreeVerifyLaunch:
    """The tile of a tree-verify kernel.

    Attributes:
        block_m: rows of one program, where a row is a draft token with one query head of the kv head's group.
        block_s: committed tokens per step.
        warps: of a program.
        stages: of the software pipeline; from three on the slots of a tile are fetched before its keys.
    """

    block_m: int
    block_s: int
    warps: int
    stages: int


def chunk_target(programs_per_chunk: int, *, arch: Arch) -> int:
    """Choose into how many chunks to cut the committed KV of a batch, so that each multiprocessor has one program.

    Args:
        programs_per_chunk: kv heads times tiles of rows.
        arch: the device.

    Returns:
        The ``target`` of ``plan_splits``; no length enters, so it may be fixed when a CUDA graph is captured.
    """
    return max(1, arch.multiprocessors // programs_per_chunk)


def tree_verify_gqa_launch(rows: int, width: int, *, arch: Arch, itemsize: int = 2) -> TreeVerifyLaunch:
    """Choose the tile of ``tree_verify_gqa``.

    Args:
        rows: draft tokens times heads of a group; the batch does not enter, so that a request's result does not
            depend on what it is batched with.
        width: the wider of the key and the value head.
        arch: the device.
        itemsize: bytes of an element of q; a pool in FP8 is served by the same tiles.
    """
    if itemsize == 4:  # multiplied without tensor cores: for checks, not for speed
        return TreeVerifyLaunch(16, 16, 4, 2)
    large = 90 <= arch.capability < 120  # 227 KB of shared memory, and accumulators of a warp group
    block_m = min(128 if large or width <= 128 else 64, max(16, triton.next_power_of_2(rows)))
    if width > 128:
        return TreeVerifyLaunch(block_m, 32, 8 if block_m > 16 else 4, 3)
    if block_m == 64 and not large:  # four warps would spill
        return TreeVerifyLaunch(64, 64, 8, 3)
    return TreeVerifyLaunch(block_m, 32, 8 if block_m == 128 else 4, 5)


def tree_verify_mla_launch(rows: int, *, arch: Arch, itemsize: int = 2, kv_itemsize: int = 2) -> TreeVerifyLaunch:
    """Choose the tile of ``tree_verify_mla``; more than 64 rows of 512 sums find room nowhere.

    Args:
        rows: draft tokens times heads of the rank; the batch does not enter, so that a request's result does not depend
            on what it is batched with.
        arch: the device.
        itemsize: bytes of an element of q.
        kv_itemsize: bytes of an element of the pool.
    """
    if itemsize == 4:  # multiplied without tensor cores: for checks, not for speed
        return TreeVerifyLaunch(16, 16, 4, 2)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    if arch.capability in (86, 89) or arch.capability >= 120:  # 99 KB of shared memory
        return TreeVerifyLaunch(min(32, block_m), 16, 4 if block_m == 16 else 8, 3)
    if block_m < 64:
        return TreeVerifyLaunch(block_m, 32, 4 if block_m == 16 else 8, 3)
    if arch.capability >= 100:
        return TreeVerifyLaunch(64, 32, 8, 2)
    if arch.capability >= 90 and kv_itemsize == 2:
        return TreeVerifyLaunch(64, 32, 8, 3)
    return TreeVerifyLaunch(64, 16, 8, 4 if arch.capability >= 90 else 3)
