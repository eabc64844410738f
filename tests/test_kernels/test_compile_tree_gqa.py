"""What ``tree_verify_gqa``, plan, bits and merge need on GPUs that are not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import triton
from compile_gate import ARCHITECTURES, Compiled, compile_calls
from sglang_eagle3_ext.kernels.arch import Arch, tree_verify_gqa_launch
from sglang_eagle3_ext.kernels.split_merge import MaskLayout, allocate_plan, chain_bits, pack_mask, plan_splits
from sglang_eagle3_ext.kernels.tree_verify_gqa import tree_verify_gqa

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
KERNEL = "_tree_verify_gqa_kernel"
LEAST_SHARED = 99 * 1024
"""Shared memory of a block on the architectures that have least (8.6, 8.9, 12.0)."""


def verify(
    group: int,
    kv_heads: int,
    width: int,
    num_draft: int,
    *,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
    sinks: bool = False,
    tile_of: int | None = None,
    **options: Any,
) -> Callable[[int], object]:
    """Make a call of the whole step in the tile that its architecture, or another one, would choose."""

    def call(arch: int) -> object:
        indptr = torch.tensor([0, 64], dtype=torch.int32)
        heads, device = group * kv_heads, Arch(tile_of or arch, 132)
        return tree_verify_gqa(
            torch.empty(num_draft, heads, width, dtype=dtype),
            torch.empty(num_draft, kv_heads, width, dtype=dtype),
            torch.empty(num_draft, kv_heads, width, dtype=dtype),
            torch.empty(64, kv_heads, width, dtype=kv_dtype),
            torch.empty(64, kv_heads, width, dtype=kv_dtype),
            indptr,
            torch.empty(64, dtype=torch.int64),
            chain_bits(1, num_draft, CPU),
            allocate_plan(1, target=16, batch_invariant=False, device=CPU),
            scale=0.1,
            page_indptr=indptr,
            sinks=torch.empty(heads) if sinks else None,
            launch=tree_verify_gqa_launch(group * num_draft, width, arch=device, itemsize=dtype.itemsize),
            **options,
        )

    return call


def step(arch: int) -> None:
    """Make what all layers of a step share: plan, and bits of both layouts in one word and in two."""
    indptr = torch.tensor([0, 64], dtype=torch.int32)
    for requests in (1, 3, 16):  # Triton specialises on a number that is 1, and on multiples of 16
        batch = torch.arange(requests + 1, dtype=torch.int32) * 64
        plan_splits(batch, target=16)
        plan_splits(batch, target=16, batch_invariant=True)
    for num_draft in (1, 8, 65):
        for layout in get_args(MaskLayout):
            pack_mask(torch.empty(num_draft * (64 + num_draft), dtype=torch.bool), indptr, num_draft, layout=layout)


STEP = "plan and bits"
LITTLE = "head-256, 32 tokens, little shared memory"
FITS = {
    "65 tokens, two words": verify(4, 8, 128, 65),
    "16 tokens, float16": verify(4, 8, 128, 16, dtype=FP16, kv_dtype=FP16),
    "16 tokens, e5m2": verify(4, 8, 128, 16, kv_dtype=E5M2),
}
"""Calls that serving may meet, too: that blocks fit and plan, bits and merge spill nothing is asked everywhere."""
CALLS = FITS | {
    STEP: step,
    "llama-3.1-8b, 8 tokens": verify(4, 8, 128, 8),
    "llama-3.1-8b, 16 tokens": verify(4, 8, 128, 16),
    "llama-3.1-8b, 32 tokens": verify(4, 8, 128, 32),
    "llama-3.1-8b, 64 tokens": verify(4, 8, 128, 64),
    "qwen3-32b-tp4, 8 tokens, pages of 64": verify(8, 2, 128, 8, page_size=64),
    "qwen3-32b-tp4, 16 tokens": verify(8, 2, 128, 16),
    "gpt-oss, 8 tokens": verify(8, 8, 64, 8, sinks=True, window=127),
    "gemma-2, 16 tokens": verify(2, 4, 256, 16, logit_cap=50.0, window=4095),
    "head-256, 16 tokens": verify(4, 8, 256, 16),
    "head-256, 32 tokens": verify(4, 8, 256, 32),
    "head-192, 16 tokens": verify(4, 8, 192, 16),
    "group of 16, 8 tokens": verify(16, 2, 128, 8),
    "head-96, 1 token": verify(1, 32, 96, 1),
    LITTLE: verify(4, 8, 256, 32, tile_of=89),
    "llama-3.1-8b, 16 tokens, fp8": verify(4, 8, 128, 16, kv_dtype=E4M3),
    "llama-3.1-8b, 8 tokens, float32": verify(4, 8, 128, 8, dtype=torch.float32, kv_dtype=torch.float32),
}
MINOR = triton.__version__.rpartition(".")[0]
SPILL_BEHIND_LOOPS = {"3.7": ("gemma-2, 16 tokens",), "3.6": ("gemma-2, 16 tokens",)}
"""What spills on Hopper with an older Triton, though not where the context or the draft is read."""
SPILL_ONCE_A_STEP = {"3.6": ("_pack_mask_kernel",)}
"""What spills with an older Triton and runs once for all layers of a step."""
OTHERS = {STEP, LITTLE, *FITS}
IN_BF16 = [name for name in CALLS if "fp8" not in name and "float32" not in name and name not in OTHERS]


def calls_for(arch: int) -> list[str]:
    """Name the calls of the gate of an architecture; float32 is compiled for Hopper alone."""
    if arch == 90:
        return [name for name in CALLS if name != LITTLE]
    stored_in_8_bits = ["llama-3.1-8b, 16 tokens, fp8"] if arch > 80 else []  # e4m3 is not of its time
    return [STEP, *IN_BF16, *FITS, *stored_in_8_bits, *([LITTLE] if arch == 80 else [])]


@functools.cache
def compiled(arch: int) -> dict[str, list[Compiled]]:
    return compile_calls(Path(__file__), arch, only=calls_for(arch))


def attending(arch: int) -> dict[str, Compiled]:
    """Pick the kernel of each call that reads the context."""
    return {
        name: next(k for k in kernels if k.kernel == KERNEL) for name, kernels in compiled(arch).items() if name != STEP
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_block_fits(arch: int, record: Callable[..., None]) -> None:
    kernels = [(name, kernel) for name, kernels in compiled(arch).items() for kernel in kernels]
    for order, (name, kernel) in enumerate(kernels):
        record("resources", gate="tree_gqa", order=order, call=name, **kernel.figures)
    names = {"_plan_kernel", "_pack_mask_kernel", KERNEL, "_merge_kernel"}
    assert {kernel.kernel for _, kernel in kernels} == names
    assert [(name, k.kernel, k.shared, k.tensor_memory) for name, k in kernels if not k.fits] == []


def test_the_widest_head_fits_the_smallest_shared_memory() -> None:
    assert attending(80)[LITTLE].shared <= LEAST_SHARED


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nothing_spills_where_the_context_is_read(arch: int) -> None:
    spills = {name: attending(arch)[name].loop_spills for name in set(IN_BF16) & set(calls_for(arch))}
    assert not any(spills.values()), spills


def test_nothing_spills_anywhere_on_hopper() -> None:
    """Nor with more rows, in float16 or from 8 bits; float32 is multiplied without tensor cores, for tests alone."""
    asked = [name for name in attending(90) if "float32" not in name and name not in SPILL_BEHIND_LOOPS.get(MINOR, ())]
    assert set(asked) >= {*IN_BF16, *FITS} - set(SPILL_BEHIND_LOOPS.get(MINOR, ()))
    spills = {name: attending(90)[name].spills for name in asked}
    assert not any(spills.values()), spills


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plan_bits_and_merge_spill_nothing(arch: int) -> None:
    others = (KERNEL, *SPILL_ONCE_A_STEP.get(MINOR, ()))
    kernels = [(name, k) for name, kernels in compiled(arch).items() for k in kernels if k.kernel not in others]
    assert [(name, k.kernel, k.spills) for name, k in kernels if k.spills] == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_matrix_unit_is_that_of_the_architecture(arch: int) -> None:
    # Its newest instruction takes 64 rows at least.
    newest = {80: "mma", 90: "wgmma", 100: "tcgen05"}[arch]
    for name, kernel in attending(arch).items():
        if name in FITS:
            continue
        few = any(part in name for part in ("llama-3.1-8b, 8 tokens", "gemma-2", "head-96"))
        assert kernel.matrix_unit == ("none" if "float32" in name else "mma" if few else newest), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_and_values_are_copied_asynchronously_in_16_bytes(arch: int) -> None:
    for name in set(IN_BF16) & set(calls_for(arch)):
        context = attending(arch)[name].loops[0]
        assert context.count("LDGSTS", "128") >= 2, name
