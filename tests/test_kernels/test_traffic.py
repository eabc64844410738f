"""Bytes that ``tree_verify_gqa`` moves, counted in the interpreter, against what has to be moved and what SGLang moves.

One kv head of Llama-3.1-8B with its four query heads stands for all eight: kv heads share nothing, so bytes and busy
programs grow with their number exactly. The number of chunks is the one that eight of them get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from interpreter import interpret, skip_products
from sglang_eagle3_ext.kernels import split_merge, tree_verify_gqa
from sglang_eagle3_ext.kernels.arch import H200, chunk_target, tree_verify_gqa_launch
from stock_attention import extend, verify_splitkv
from traffic import Launch, Traffic, extrapolate

from benchmarks.draft_trees import Batch, Case, make_batch, steps_apart

interpret(split_merge, tree_verify_gqa)

KERNEL = "_tree_verify_gqa_kernel"
KV = {"K_POOL", "V_POOL"}
KV_HEADS = 8


def llama(lengths: tuple[int, ...], num_draft: int) -> Batch:
    """Make a batch of one kv head of Llama-3.1-8B."""
    return make_batch(Case(lengths, num_draft, width=128))


def row_tiles(batch: Batch) -> int:
    """Count the tiles of rows of one kv head."""
    case = batch.case
    rows = case.num_draft * case.heads // case.kv_heads
    return -(-rows // tree_verify_gqa_launch(rows, case.width, arch=H200).block_m)


def plan_of(batch: Batch, kv_heads: int) -> split_merge.SplitPlan:
    """Make the plan that serving makes for so many kv heads."""
    return split_merge.plan_splits(batch.kv_indptr, target=chunk_target(kv_heads * row_tiles(batch), arch=H200))


def measure(batch: Batch, *, distinct: bool = False, long_steps: bool = False, kv_heads: int = KV_HEADS) -> Traffic:
    """Count what one layer moves; plan and bits belong to the step.

    ``long_steps`` walks whole tiles of keys at a time, whatever the device would do: the same bytes in half the time.
    """
    case, rows = batch.case, batch.case.num_draft * batch.case.heads // batch.case.kv_heads
    tile = tree_verify_gqa_launch(rows, case.width, arch=H200)
    if long_steps:
        tile = replace(tile, block_s=split_merge.TILE)
    plan = plan_of(batch, kv_heads)
    bits = split_merge.pack_mask(batch.mask, batch.kv_indptr, case.num_draft)
    with Traffic(distinct=distinct) as traffic, skip_products():
        batch.call(tree_verify_gqa.tree_verify_gqa, plan, bits, launch=tile)
    return traffic


def kv_bytes(batch: Batch) -> int:
    """Count the bytes of the committed KV of a batch."""
    case = batch.case
    itemsize = (case.kv_dtype or case.dtype).itemsize
    return sum(case.lengths) * case.kv_heads * (case.width + (case.value_width or case.width)) * itemsize


def lower_bound(batch: Batch) -> int:
    """Count what no kernel can do without: committed and draft KV, queries and result, once each."""
    draft = (batch.q.numel() * 2 + batch.k_draft.numel() + batch.v_draft.numel()) * 2
    return kv_bytes(batch) + draft


@pytest.mark.parametrize(
    "case",
    [
        Case((300, 0, 65), 7, heads=8, kv_heads=2),
        Case((200,), 64, width=128),  # 256 rows: two tiles
        Case((200,), 13, heads=10, kv_heads=2, page_size=16),
        Case((129, 1), 8, width=96, value_width=64, page_size=64),
        Case((300,), 8, kv_dtype=torch.float8_e4m3fn),
    ],
    ids=["ragged", "two-tiles-of-rows", "group-5-page-16", "padded-widths-page-64", "fp8"],
)
def test_every_byte_of_kv_once_per_tile_of_rows(case: Case) -> None:
    batch = make_batch(case)
    traffic = measure(batch, distinct=True)
    assert traffic.bytes(kernel=KERNEL, arguments=KV) == row_tiles(batch) * kv_bytes(batch)
    assert traffic.distinct(KERNEL, KV) == kv_bytes(batch)


def test_the_length_of_a_step_moves_no_byte() -> None:
    batch = llama((700,), 16)
    assert measure(batch, long_steps=True).pulled == measure(batch).pulled


@pytest.mark.parametrize("lengths", [(32768,), (8192,) * 8], ids=["32k", "8-times-8k"])
def test_all_bytes_against_the_lower_bound(lengths: tuple[int, ...], record: Callable[..., None]) -> None:
    num_draft = 16  # 64 rows, the most that the bar is meant for: fewer rows have fewer partial results
    batch = llama(lengths, num_draft)
    traffic = measure(batch, long_steps=True)
    assert traffic.bytes(kernel=KERNEL, arguments=KV) == kv_bytes(batch)
    ratio = traffic.bytes() / lower_bound(batch)
    assert ratio <= 1.10
    # of masks: the bits of the tree, once per request
    assert traffic.bytes(arguments={"ANCESTORS"}) == 8 * num_draft * len(lengths)
    assert [launch.kernel for launch in traffic.launches] == [KERNEL, "_merge_kernel"]
    busy = KV_HEADS * traffic.busy[KERNEL]
    assert busy >= 120
    shape = f"llama-3.1-8b, {lengths[0]} x {len(lengths)}, {num_draft} tokens"
    figures = {"kv_per_row_tile": 1.0, "total": round(ratio, 3), "bar": 1.10, "busy_programs": busy, "launches": 2}
    record("traffic", kernel="tree_verify_gqa", shape=shape, **figures)


@pytest.mark.parametrize("lengths", [(32768,), (8192,) * 8], ids=["32k", "8-times-8k"])
def test_with_few_kv_heads_only_what_each_chunk_needs(lengths: tuple[int, ...], record: Callable[..., None]) -> None:
    """Qwen3-32B on one of four ranks: two kv heads, so that chunks must make the programs, and each brings its sums."""
    num_draft, heads, width = 8, 8, 128
    batch = make_batch(Case(lengths, num_draft, heads=heads, kv_heads=1, width=width))
    traffic = measure(batch, long_steps=True, kv_heads=2)
    assert traffic.bytes(kernel=KERNEL, arguments=KV) == kv_bytes(batch)
    chunks = int(plan_of(batch, 2).num_chunks.sum())
    # queries again, sums in float32 once written and once read
    each_chunk = num_draft * heads * width * (2 + 2 * 4)
    assert traffic.bytes() <= 1.03 * (lower_bound(batch) + chunks * each_chunk)
    busy = 2 * traffic.busy[KERNEL]
    assert busy == 2 * chunks >= 120
    shape = f"qwen3-32b tp4, {lengths[0]} x {len(lengths)}, {num_draft} tokens"
    total = round(traffic.bytes() / lower_bound(batch), 3)
    figures = {"kv_per_row_tile": 1.0, "total": total, "bar": None, "busy_programs": busy, "launches": 2}
    record("traffic", kernel="tree_verify_gqa", shape=shape, **figures)


def test_of_a_full_mask_only_the_corner_is_read() -> None:
    batch = llama((300, 0, 65), 7)
    cells = torch.ones(7 * (365 + 3 * 7), dtype=torch.bool)
    with Traffic() as traffic:
        split_merge.pack_mask(cells, batch.kv_indptr, 7, layout="full")
    assert traffic.bytes(arguments={"MASK"}) == 3 * 7 * 7
    assert traffic.launches == [Launch("_pack_mask_kernel", (3, 1))]


def test_the_meter_counts_a_tile_once_and_every_program_again() -> None:
    """On a kernel whose bytes are counted by hand: the merge of two chunks of one request."""
    plan = split_merge.plan_splits_torch(torch.tensor([0, 128], dtype=torch.int32), target=2, min_chunk=64)
    partial_out, partial_lse = torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4)
    with Traffic(distinct=True) as traffic:
        split_merge.merge(partial_out, partial_lse, plan, torch.empty(2, 4, 16, dtype=torch.bfloat16))
    assert traffic.launches == [Launch("_merge_kernel", (2, 1))]
    assert traffic.busy == {"_merge_kernel": 2}
    assert traffic.bytes(arguments={"PARTIAL_OUT"}, kind="load") == 2 * 2 * 4 * 16 * 4
    assert traffic.bytes(arguments={"PARTIAL_LSE"}) == 2 * 2 * 4 * 4
    assert traffic.bytes(arguments={"OUT"}, kind="store") == 2 * 4 * 16 * 2
    assert traffic.bytes(arguments={"NUM_CHUNKS"}) == 2 * 4  # both programs read the one number
    assert traffic.distinct("_merge_kernel", {"NUM_CHUNKS"}) == 4


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("length", "num_draft"), [(8192, 8), (16384, 16)])
def test_a_third_of_what_sglang_moves(length: int, num_draft: int, record: Callable[..., None]) -> None:
    batch = llama((length,), num_draft)
    with Traffic() as stock, skip_products():
        extend(batch)
    ours = measure(batch, long_steps=True)
    assert stock.bytes(arguments={"K_Buffer", "V_Buffer"}) == 4 * kv_bytes(batch), "each query head reads it again"
    share = ours.bytes() / stock.bytes()
    assert share <= 0.31
    shape = f"llama-3.1-8b, {length} x 1, {num_draft} tokens"
    record("traffic", kernel="tree_verify_gqa", shape=shape, of_sglang_extend=round(share, 3), bar=0.31)


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("lengths", [(32768,), (8192,) * 8], ids=["32k", "8-times-8k"])
def test_a_third_at_long_context(lengths: tuple[int, ...], record: Callable[..., None]) -> None:
    def theirs(length: int) -> int:
        with Traffic() as stock, skip_products():
            extend(llama((length,), 8))
        return stock.bytes()

    batch = llama(lengths, 8)
    ours = measure(batch, long_steps=True).bytes()
    assert ours <= 1.10 * lower_bound(batch), "with half the rows, too"
    share = ours / extrapolate(theirs, lengths)
    assert share <= 0.31
    shape = f"llama-3.1-8b, {lengths[0]} x {len(lengths)}, 8 tokens (SGLang's extrapolated)"
    record("traffic", kernel="tree_verify_gqa", shape=shape, of_sglang_extend=round(share, 3), bar=0.31)


CHAIN = Case((130, 0, 17), 7, heads=8, kv_heads=2, width=128, chain=True)
AS_STOCK = {
    "trees": (Case((130, 0, 17), 13, heads=8, kv_heads=2, width=128), extend),
    "trees-several-chunks": (Case((300,), 7), extend),
    "64-tokens": (Case((70,), 64, width=128), extend),
    "logit-cap": (Case((130, 17), 7, heads=8, kv_heads=2, logit_cap=5.0, size=2.0), extend),
    "sinks": (Case((130, 0, 17), 7, heads=8, kv_heads=2, sinks=True), extend),
    "window-of-a-chain": (CHAIN._replace(window=40), extend),
    "chain-splitkv": (CHAIN._replace(lengths=(128, 100)), verify_splitkv),
}
"""Cases with what computes them in SGLang. A window only with a chain: there a token's depth is its row, which is what
SGLang takes for its position. ``verify_splitkv`` cuts every context in four, and of a part without keys multiplies by 0
what lay in its scratch memory: NaN, if that was NaN."""


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", AS_STOCK)
def test_agrees_with_sglang_to_one_step_of_bf16(name: str, record: Callable[..., None]) -> None:
    case, stock = AS_STOCK[name]
    batch = make_batch(case)
    plan = split_merge.plan_splits(batch.kv_indptr, target=16, min_chunk=64)
    bits = split_merge.pack_mask(batch.mask, batch.kv_indptr, case.num_draft)
    ours, theirs = batch.call(tree_verify_gqa.tree_verify_gqa, plan, bits), stock(batch)
    error = steps_apart(ours, theirs)
    assert error <= 1.0
    oracle = f"SGLang {stock.__name__}"
    record("errors", kernel="tree_verify_gqa", case=name, dtype=case.dtype, oracle=oracle, error=error, bar=1.0)
