"""The bytes that ``tree_verify_mla`` moves, against the fewest possible and against SGLang's extend kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
from interpreter import interpret, skip_products
from sglang_eagle3_ext.kernels import split_merge, tree_verify_mla
from sglang_eagle3_ext.kernels.arch import H200, chunk_target, tree_verify_mla_launch
from sglang_eagle3_ext.kernels.split_merge import SplitPlan, pack_mask, plan_splits
from stock_attention import extend
from traffic import Traffic, extrapolate

from benchmarks.draft_trees import Batch, Case, make_batch, steps_apart

interpret(tree_verify_mla, split_merge)

KERNEL = "_tree_verify_mla_kernel"
HEADS, LATENT, ROTARY = 8, 512, 64  # Kimi-K2.5 under TP8
ROW_BYTES = 2 * (LATENT + ROTARY)


def draw(lengths: tuple[int, ...], num_draft: int) -> Batch:
    batch = make_batch(Case(lengths, num_draft, HEADS, width=LATENT + ROTARY, value_width=LATENT))
    return replace(batch, v_draft=batch.k_draft[..., :LATENT], v_pool=batch.k_pool[..., :LATENT])


def measure(batch: Batch, *, long_steps: bool = False) -> Traffic:
    """Run one layer with the plan that serving would make; the plan itself is not counted, as layers share it.

    ``long_steps`` walks whole tiles of latents at a time, whatever the device would do: the same bytes, sooner.
    """
    num_draft = batch.case.num_draft
    tile = tree_verify_mla_launch(num_draft * HEADS, arch=H200)
    plan = plan_of(batch.kv_indptr, num_draft)
    bits = pack_mask(batch.mask, batch.kv_indptr, num_draft)
    with skip_products(), Traffic() as traffic:
        tree_verify_mla.tree_verify_mla(
            batch.q,
            batch.k_draft[:, 0],
            batch.k_pool[:, 0],
            batch.kv_indptr,
            batch.kv_slots.int(),
            bits,
            plan,
            latent_width=LATENT,
            scale=1 / math.sqrt(batch.case.width),
            launch=replace(tile, block_s=split_merge.TILE) if long_steps else tile,
        )
    return traffic


def test_the_length_of_a_step_moves_no_byte() -> None:
    batch = draw((700,), 8)
    assert measure(batch, long_steps=True).pulled == measure(batch).pulled


def row_tiles(num_draft: int) -> int:
    return triton.cdiv(num_draft * HEADS, tree_verify_mla_launch(num_draft * HEADS, arch=H200).block_m)


@pytest.mark.parametrize(("lengths", "num_draft"), [((1000,), 1), ((1500, 0, 70), 8), ((600, 130), 13), ((513,), 64)])
def test_every_latent_byte_is_read_once_per_tile_of_rows(lengths: tuple[int, ...], num_draft: int) -> None:
    traffic = measure(draw(lengths, num_draft))
    tiles = row_tiles(num_draft)
    # Values included: no argument but the pool holds any.
    assert traffic.bytes(arguments={"LATENT_POOL"}) == sum(lengths) * ROW_BYTES * tiles
    assert traffic.bytes(arguments={"LATENT_DRAFT"}) == len(lengths) * num_draft * ROW_BYTES * tiles
    assert traffic.bytes(arguments={"ANCESTORS"}) <= 8 * num_draft * len(lengths) * tiles
    assert len(traffic.launches) == 2


def plan_of(kv_indptr: torch.Tensor, num_draft: int) -> SplitPlan:
    """Make the plan that serving would make."""
    return plan_splits(kv_indptr, target=chunk_target(row_tiles(num_draft), arch=H200))


@pytest.mark.parametrize("lengths", [(32768,), (8192,) * 8], ids=["32k", "8-times-8k"])
def test_beside_the_latents_only_what_each_chunk_needs(lengths: tuple[int, ...], record: Callable[..., None]) -> None:
    """64 rows of 512 sums are as many bytes as 114 tokens: what every chunk writes weighs more than with kv heads.

    It stays in the second-level cache. Fewer chunks would move less, and leave multiprocessors without work.
    """
    num_draft, rows = 8, 8 * HEADS
    batch = draw(lengths, num_draft)
    traffic = measure(batch, long_steps=True)
    latents = sum(lengths) * ROW_BYTES
    assert traffic.bytes(arguments={"LATENT_POOL"}) == latents
    assert [launch.kernel for launch in traffic.launches] == [KERNEL, "_merge_kernel"]
    lower = latents + len(lengths) * (num_draft * ROW_BYTES + rows * 2 * (2 * LATENT + ROTARY))
    chunks = int(plan_of(batch.kv_indptr, num_draft).num_chunks.sum())
    # queries again, sums in float16 once written and once read, beside slots, plan and log-sum-exp
    each_chunk = rows * 2 * (LATENT + ROTARY) + 2 * rows * 2 * LATENT
    assert traffic.bytes() <= 1.03 * (lower + chunks * each_chunk)
    assert traffic.busy[KERNEL] == chunks >= 120
    shape = f"kimi-k2.5 tp8, {lengths[0]} x {len(lengths)}, {num_draft} tokens"
    figures = {"kv_per_row_tile": 1.0, "total": round(traffic.bytes() / lower, 3), "bar": None}
    record("traffic", kernel="tree_verify_mla", shape=shape, **figures, busy_programs=chunks, launches=2)


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
def test_at_most_an_eighth_of_the_bytes_of_the_extend_kernel(record: Callable[..., None]) -> None:
    # Both grow with the context in proportion, once it has several chunks.
    batch = draw((2048,), 8)
    with skip_products(), Traffic() as traffic:
        extend(batch)
    share = measure(batch).bytes() / traffic.bytes()
    assert share <= 0.12
    shape = "kimi-k2.5 tp8, 2048 x 1, 8 tokens"
    record("traffic", kernel="tree_verify_mla", shape=shape, of_sglang_extend=round(share, 3), bar=0.12)


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("lengths", [(32768,), (8192,) * 8], ids=["32k", "8-times-8k"])
def test_an_eighth_at_long_context(lengths: tuple[int, ...], record: Callable[..., None]) -> None:
    def theirs(length: int) -> int:
        with skip_products(), Traffic() as traffic:
            extend(draw((length,), 8))
        return traffic.bytes()

    share = measure(draw(lengths, 8), long_steps=True).bytes() / extrapolate(theirs, lengths)
    assert share <= 0.12
    shape = f"kimi-k2.5 tp8, {lengths[0]} x {len(lengths)}, 8 tokens (SGLang's extrapolated)"
    record("traffic", kernel="tree_verify_mla", shape=shape, of_sglang_extend=round(share, 3), bar=0.12)


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
def test_the_result_is_that_of_the_extend_kernel(record: Callable[..., None]) -> None:
    batch = draw((70, 3), 8)
    bits = pack_mask(batch.mask, batch.kv_indptr, 8)
    ours = tree_verify_mla.tree_verify_mla(
        batch.q,
        batch.k_draft[:, 0],
        batch.k_pool[:, 0],
        batch.kv_indptr,
        batch.kv_slots,
        bits,
        plan_splits(batch.kv_indptr, target=8),
        latent_width=LATENT,
        scale=1 / math.sqrt(batch.case.width),
    )
    error = steps_apart(ours, extend(batch))
    assert error <= 1.0
    about = {"kernel": "tree_verify_mla", "case": "trees", "dtype": torch.bfloat16}
    record("errors", **about, oracle="SGLang extend", error=error, bar=1.0)
