"""The bytes that ``tree_verify_mla`` moves, against the fewest possible and against SGLang's extend kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import triton
from draft_trees import Batch, Case, make_batch
from interpreter import interpret, skip_products
from sglang_eagle3_ext.kernels import split_merge, tree_verify_mla
from sglang_eagle3_ext.kernels.arch import H200, chunk_target, tree_verify_mla_launch
from sglang_eagle3_ext.kernels.split_merge import SplitPlan, pack_mask, plan_splits
from traffic import Traffic

interpret(tree_verify_mla, split_merge)

KERNEL = "_tree_verify_mla_kernel"
HEADS, LATENT, ROTARY = 8, 512, 64  # Kimi-K2.5 under TP8
ROW_BYTES = 2 * (LATENT + ROTARY)


def draw(lengths: tuple[int, ...], num_draft: int) -> Batch:
    batch = make_batch(Case(lengths, num_draft, HEADS, width=LATENT + ROTARY, value_width=LATENT))
    return replace(batch, v_draft=batch.k_draft[..., :LATENT], v_pool=batch.k_pool[..., :LATENT])


def measure(batch: Batch) -> Traffic:
    """Run one layer with the plan that serving would make; the plan itself is not counted, as layers share it."""
    num_draft = batch.case.num_draft
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
        )
    return traffic


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


def test_a_long_context_fills_the_device() -> None:
    plan = plan_of(torch.tensor([0, 32768], dtype=torch.int32), 8)
    assert int((plan.slot_request >= 0).sum()) * row_tiles(8) >= 120


def test_every_chunk_is_a_busy_program_and_costs_less_than_its_latents() -> None:
    batch = draw((4096,), 8)
    traffic = measure(batch)
    chunks = int(plan_of(batch.kv_indptr, 8).num_chunks)
    assert chunks == 16
    assert traffic.busy[KERNEL] == chunks
    # What is beside the latents stays in the second-level cache: per chunk of 256 tokens the queries, and its results
    # once written and once read.
    lower = (4096 + 8) * ROW_BYTES + 8 * HEADS * 2 * (2 * LATENT + ROTARY)
    assert traffic.bytes() <= 1.75 * lower


@pytest.fixture
def extend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's extend kernel with its tiles for Hopper."""
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    from sglang.kernels.ops.attention import extend_attention

    interpret(extend_attention)
    monkeypatch.setattr(extend_attention, "_is_cuda", True)
    monkeypatch.setattr(extend_attention, "CUDA_CAPABILITY", (9, 0), raising=False)
    return extend_attention


def run_extend(extend: ModuleType, batch: Batch) -> torch.Tensor:
    """Verify the same tree as SGLang's Triton backend does, with a mask over the whole context."""
    n, lengths = batch.case.num_draft, batch.case.lengths
    trees = batch.mask.view(len(lengths), n, n)
    mask = [
        torch.cat([torch.ones(n, length, dtype=torch.bool), tree], 1).flatten()
        for length, tree in zip(lengths, trees, strict=True)
    ]
    out = torch.empty(*batch.q.shape[:2], LATENT, dtype=batch.q.dtype)
    extend.extend_attention_fwd(
        batch.q,
        batch.k_draft,
        batch.v_draft,
        out,
        batch.k_pool,
        batch.v_pool,
        torch.arange(0, len(batch.q) + 1, n, dtype=torch.int32),
        batch.kv_indptr,
        batch.kv_slots,
        torch.cat(mask),
        True,
        torch.tensor([0, *(m.numel() for m in mask)]).cumsum(0),
        n,
        1.0,
        1.0,
        1 / math.sqrt(batch.case.width),
    )
    return out


@pytest.mark.host
def test_at_most_an_eighth_of_the_bytes_of_the_extend_kernel(extend: ModuleType) -> None:
    # Both grow with the context in proportion, once it has several chunks.
    batch = draw((2048,), 8)
    with skip_products(), Traffic() as traffic:
        run_extend(extend, batch)
    assert measure(batch).bytes() <= 0.12 * traffic.bytes()


@pytest.mark.host
def test_the_result_is_that_of_the_extend_kernel(extend: ModuleType) -> None:
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
    ).float()
    theirs = run_extend(extend, batch).float()
    one_step = torch.finfo(torch.bfloat16).eps * theirs.abs().amax(-1, keepdim=True)
    assert ((ours - theirs).abs() <= one_step).all()
