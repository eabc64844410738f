"""What ``tree_verify_mla`` needs on GPUs that are not there: registers, spills, memory on the chip, instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compile_gate import ARCHITECTURES, Compiled, compile_calls
from sglang_eagle3_ext.kernels.arch import Arch, tree_verify_mla_launch
from sglang_eagle3_ext.kernels.split_merge import SplitPlan
from sglang_eagle3_ext.kernels.tree_verify_mla import tree_verify_mla

KERNEL = "_tree_verify_mla_kernel"
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
LEAST_SHARED = 99 * 1024
"""Shared memory of a block on the architectures that have least (8.6, 8.9, 12.0)."""


def verify(
    num_draft: int,
    heads: int,
    *,
    dtype: torch.dtype = BF16,
    pool: torch.dtype = BF16,
    page_size: int = 1,
    tile_of: int | None = None,
) -> Callable[[int], object]:
    """Make a call in the tile that its architecture, or another one, would choose."""

    def call(arch: int) -> object:
        i32 = torch.zeros(2, dtype=torch.int32)
        return tree_verify_mla(
            torch.empty(num_draft, heads, 576, dtype=dtype),
            torch.empty(num_draft, 576, dtype=dtype),
            torch.empty(64, 576, dtype=pool),
            i32,
            torch.zeros(64, dtype=torch.int32),
            torch.zeros(num_draft, -(-num_draft // 64), dtype=torch.int64),
            SplitPlan(torch.zeros(133, dtype=torch.int32), i32[:1], i32[1:]),
            latent_width=512,
            scale=0.1,
            kv_scale=0.5,
            page_size=page_size,
            page_indptr=i32 if page_size > 1 else None,
            launch=tree_verify_mla_launch(
                num_draft * heads,
                arch=Arch(tile_of or arch, 132),
                itemsize=dtype.itemsize,
                kv_itemsize=pool.itemsize,
            ),
        )

    return call


LITTLE = "64 rows, little shared memory"
FITS = {
    "65 tokens, two words": verify(65, 8),
    "64 rows, float16": verify(8, 8, dtype=torch.float16, pool=torch.float16),
}
"""Calls that serving may meet, too: that blocks fit and the merge spills nothing is asked of them everywhere."""
CALLS = FITS | {
    "16 rows": verify(2, 8),
    "32 rows": verify(4, 8),
    "64 rows": verify(8, 8),
    "64 rows, pages of 64": verify(8, 8, page_size=64),
    LITTLE: verify(8, 8, tile_of=89),
    "64 rows, fp8": verify(8, 8, pool=FP8),
    "float32": verify(2, 8, dtype=FP32, pool=FP32),
}
IN_BF16 = [name for name in CALLS if name not in ("64 rows, fp8", "float32", *FITS)]


def calls_for(arch: int) -> list[str]:
    """Name the calls of the gate of an architecture: everything on Hopper, the ordinary shapes on the others."""
    if arch == 90:
        return [name for name in CALLS if name != LITTLE]
    ordinary = ["16 rows", "32 rows", "64 rows", *FITS]
    return [*ordinary, LITTLE] if arch == 80 else [*ordinary, "64 rows, fp8"]


@functools.cache
def compiled(arch: int) -> dict[str, list[Compiled]]:
    return compile_calls(Path(__file__), arch, only=calls_for(arch))


def attending(arch: int) -> dict[str, Compiled]:
    """Pick the kernel of each call that reads the context."""
    return {name: next(k for k in kernels if k.kernel == KERNEL) for name, kernels in compiled(arch).items()}


def in_bf16(arch: int) -> dict[str, Compiled]:
    return {name: kernel for name, kernel in attending(arch).items() if name in IN_BF16}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_block_fits(arch: int, record: Callable[..., None]) -> None:
    kernels = [(name, kernel) for name, kernels in compiled(arch).items() for kernel in kernels]
    for order, (name, kernel) in enumerate(kernels):
        record("resources", gate="tree_mla", order=order, call=name, **kernel.figures)
    assert {kernel.kernel for _, kernel in kernels} == {KERNEL, "_merge_kernel"}
    assert [(name, k.kernel, k.shared, k.tensor_memory) for name, k in kernels if not k.fits] == []


def test_the_tile_for_little_shared_memory_fits_it() -> None:
    assert attending(80)[LITTLE].shared <= LEAST_SHARED


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nothing_spills_where_the_context_is_read(arch: int) -> None:
    spills = {name: kernel.loops[0].spills for name, kernel in in_bf16(arch).items()}
    assert not any(spills.values()), spills


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_merge_spills_nothing(arch: int) -> None:
    kernels = [(name, k) for name, kernels in compiled(arch).items() for k in kernels if k.kernel != KERNEL]
    assert [(name, k.kernel, k.spills) for name, k in kernels if k.spills] == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_matrix_unit_is_that_of_the_architecture(arch: int) -> None:
    # Its newest instruction takes 64 rows at least.
    newest = {80: "mma", 90: "wgmma", 100: "tcgen05"}[arch]
    for name, kernel in attending(arch).items():
        if name in FITS:
            continue
        expected = "none" if name == "float32" else newest if name.startswith("64 rows") and name != LITTLE else "mma"
        assert kernel.matrix_unit == expected, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_latents_are_copied_asynchronously_in_16_bytes(arch: int) -> None:
    for name, kernel in in_bf16(arch).items():
        context = kernel.loops[0]
        assert context.count("LDGSTS", "128") >= 2, name  # the latents and the rotary keys
