"""``tree_verify_gqa`` in the corrected interpreter, and its PyTorch twin, against a float64 walk over the tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpret
from oracles import as_float64, assert_within_budget
from sglang_eagle3_ext.kernels import split_merge, tree_verify_gqa
from sglang_eagle3_ext.kernels.arch import TreeVerifyLaunch
from sglang_eagle3_ext.kernels.split_merge import chain_bits, pack_mask
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.draft_trees import (
    E4M3,
    FP32,
    Batch,
    Case,
    excess,
    excesses,
    flip_every_bit,
    forget_newest,
    make_batch,
    offsets,
    oracle,
    replace_a_token,
    take_a_stranger,
)
from benchmarks.draft_trees import GQA_CASES as CASES
from benchmarks.draft_trees import verify_gqa as verify

interpret(split_merge, tree_verify_gqa)

VERIFY, TWIN = tree_verify_gqa.tree_verify_gqa, tree_verify_gqa.tree_verify_gqa_torch


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle(name: str, record: Callable[..., None]) -> None:
    case = CASES[name]
    batch = make_batch(case)
    expected, twin, actual = oracle(batch), verify(batch, TWIN), verify(batch)
    assert twin.dtype == actual.dtype == case.dtype
    error, bar = excess(actual, expected), 1.5 if case.kv_dtype is None else 2.0
    if case.dtype == FP32:
        keys = max(case.lengths) + case.num_draft
        assert_within_budget(actual, twin, as_float64(expected), reductions=(keys, case.width))
        assert_within_budget(twin, twin, as_float64(expected), reductions=(keys, case.width))
        bar = None  # sums of hundreds of keys: the rounding of one float32 is no measure for them
    else:
        assert excess(twin, expected) <= 1.05
        assert error <= bar
    about = {"kernel": "tree_verify_gqa", "case": name, "dtype": case.dtype, "stored": case.kv_dtype}
    record("errors", **about, oracle="float64", error=round(error, 3), bar=bar, result=actual)


@pytest.mark.parametrize("group", range(1, 17))
def test_any_number_of_query_heads_shares_a_kv_head(group: int) -> None:
    batch = make_batch(Case((70, 3), 3, heads=2 * group, kv_heads=2))
    assert excess(verify(batch), oracle(batch)) <= 1.5


def test_a_chain_is_a_tree_without_branches() -> None:
    batch = make_batch(CASES["128-tokens-chain"])
    assert torch.equal(chain_bits(1, 128, torch.device("cpu")), pack_mask(batch.mask, batch.kv_indptr, 128))


@pytest.mark.parametrize("tile", [TreeVerifyLaunch(16, 64, 4, 3), TreeVerifyLaunch(128, 16, 8, 3)])
def test_any_tile_serves(tile: TreeVerifyLaunch) -> None:
    batch = make_batch(Case((70,), 13, heads=10, kv_heads=2))
    assert excess(verify(batch, launch=tile), oracle(batch)) <= 1.5


@pytest.mark.parametrize("target", [1, 5])
def test_a_request_has_the_same_bits_in_every_batch(target: int) -> None:
    batch = make_batch(Case((300, 0, 133), 6, heads=8, kv_heads=2, batch_invariant=True, target=target))
    together = verify(batch)
    alone = torch.cat([verify(batch.alone(b)) for b in range(3)])
    assert torch.equal(together, alone)
    assert excess(together, oracle(batch)) <= 1.5


def test_writes_the_whole_of_a_strided_buffer_and_nothing_beside_it() -> None:
    batch = make_batch(CASES["ragged-7"])
    wide = torch.full((21, 8, 200), float("nan"), dtype=torch.bfloat16)
    result = verify(batch, out=wide[..., :128])
    assert result.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[..., :128], verify(batch))
    assert wide[..., 128:].isnan().all()


def test_takes_rows_and_pools_of_any_stride() -> None:
    batch = make_batch(CASES["ragged-7"])
    qkv = torch.cat([batch.q, batch.k_draft, batch.v_draft], dim=1)  # as a fused projection leaves them
    heads_first = [pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in (batch.k_pool, batch.v_pool)]
    strided = dataclasses.replace(
        batch,
        q=qkv[:, :8],
        k_draft=qkv[:, 8:10],
        v_draft=qkv[:, 10:],
        k_pool=heads_first[0],
        v_pool=heads_first[1],
        kv_slots=batch.kv_slots.int(),
    )
    assert torch.equal(verify(strided), verify(batch))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_reaches_slots_past_the_range_of_32_bits(index: torch.dtype) -> None:
    """Three million slots of eight heads: 6 GB of addresses each, of which the operating system backs a few pages."""
    batch = make_batch(Case((90, 33), 6, heads=8, kv_heads=8, width=128))
    used = torch.cat(batch.token_slots)
    far = 2_999_999 - 7 * torch.arange(len(used))
    pools = []
    for pool in (batch.k_pool, batch.v_pool):
        large = torch.zeros(1, dtype=pool.dtype).new_empty(3_000_000, 8, 128)
        large[far] = pool[used]
        pools.append(large)
    moved = dataclasses.replace(batch, k_pool=pools[0], v_pool=pools[1], kv_slots=far.to(index))
    assert torch.equal(verify(moved), verify(batch))


# ---- a single wrong bit, page, length or factor is seen -----------------------------------------------------


FEW = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64)
SLOTS: dict[str, tuple[tuple[int, ...], Callable[[Batch], Batch]]] = {
    "one-token-less": (tuple(range(65)), forget_newest),
    "one-token-more": (FEW, take_a_stranger),
    "first-slot": (FEW, lambda batch: replace_a_token(batch, lambda length: 0)),
    "last-slot": (FEW, lambda batch: replace_a_token(batch, lambda length: length - 1)),
    "middle-slot": (FEW, lambda batch: replace_a_token(batch, lambda length: length // 2)),
}


@pytest.mark.parametrize(("prefixes", "mutated"), SLOTS.values(), ids=SLOTS)
def test_one_wrong_length_or_slot_breaks_the_bar_at_every_prefix(
    prefixes: tuple[int, ...], mutated: Callable[[Batch], Batch]
) -> None:
    batch = make_batch(Case(prefixes, 3, heads=2, target=1, batch_invariant=True))
    wrong, expected = mutated(batch), oracle(batch)
    # Request by request the largest rounding is that of a few hundred numbers: the bar of a whole batch is too low.
    assert max(excesses(verify(batch), expected, len(prefixes))) <= 2.0
    same = [torch.equal(*pair) for pair in zip(batch.token_slots, wrong.token_slots, strict=True)]
    assert sum(same) <= 1
    changed = excesses(verify(wrong), expected, len(prefixes))
    unseen = [p for p, is_same, error in zip(prefixes, same, changed, strict=True) if error <= 2.0 and not is_same]
    assert unseen == []


@pytest.mark.parametrize(("page_size", "prefix"), [(16, 5), (16, 43), (16, 64), (64, 64), (64, 187)])
def test_one_wrong_page_breaks_the_bar(page_size: int, prefix: int) -> None:
    batch = make_batch(Case((prefix,), 5, page_size=page_size))
    expected, stranger = oracle(batch), int(batch.kv_slots[-1])
    pools = [pool.clone() for pool in (batch.k_pool, batch.v_pool)]
    for pool in pools:  # a page of nobody's, with plausible contents
        first = int(batch.kv_slots[0]) * page_size
        pool[stranger * page_size : (stranger + 1) * page_size] = pool[first : first + page_size].flip(-1)
    for page in range(-(-prefix // page_size)):
        slots = batch.kv_slots.clone()
        slots[page] = stranger
        changed = dataclasses.replace(batch, kv_slots=slots, k_pool=pools[0], v_pool=pools[1])
        assert excess(verify(changed), expected) > 1.5, page


FACTORS: dict[str, tuple[Case, Callable[[Batch], torch.Tensor]]] = {
    f"{name}-prefix-{prefix}": (case._replace(lengths=(prefix,)), mutated)
    for prefix in (1, 17, 64)
    for name, case, mutated in [
        ("k-scale", Case((), 5, kv_dtype=E4M3, k_scale=0.7), lambda batch: verify(batch, k_scale=0.77)),
        ("v-scale", Case((), 5, kv_dtype=E4M3, v_scale=0.7), lambda batch: verify(batch, v_scale=0.77)),
        ("scale", Case((), 5), lambda batch: verify(batch, scale=0.15)),
        ("cap", Case((), 5, logit_cap=2.0), lambda batch: verify(batch, logit_cap=2.4)),
        ("sink", Case((), 5, sinks=True), lambda batch: verify(batch, sinks=batch.sinks + 1.5)),
    ]
} | {
    f"window-prefix-{prefix}": (
        Case((prefix,), 5, window=prefix // 2 + 4),
        lambda batch: verify(batch, window=batch.case.window - 1),
    )
    for prefix in (17, 64)
}


@pytest.mark.parametrize(("case", "mutated"), FACTORS.values(), ids=FACTORS.keys())
def test_one_wrong_factor_breaks_the_bar(case: Case, mutated: Callable[[Batch], torch.Tensor]) -> None:
    batch = make_batch(case)
    expected = oracle(batch)
    assert excess(verify(batch), expected) <= 2.0
    assert excess(mutated(batch), expected) > 2.0


@pytest.mark.parametrize("prefix", [0, 1, 17, 31, 63, 64])
def test_one_flipped_bit_breaks_the_bar(prefix: int) -> None:
    batch = make_batch(Case((prefix,), 5, heads=2, target=1, batch_invariant=True), seed=3)
    expected, bits = oracle(batch), pack_mask(batch.mask, batch.kv_indptr, 5)
    assert excess(verify(batch, bits=bits), expected) <= 1.5
    repeated, many, flips = flip_every_bit(batch, bits)
    changed = verify(repeated, bits=many).chunk(len(flips))
    assert [flip for flip, y in zip(flips, changed, strict=True) if excess(y, expected) <= 1.5] == []


def test_the_second_word_is_read() -> None:
    batch = make_batch(Case((3,), 66, heads=1), seed=3)
    bits = pack_mask(batch.mask, batch.kv_indptr, 66)
    bits[65, 1] ^= 1 << 1  # token 65 no longer sees itself
    assert excess(verify(batch, bits=bits), oracle(batch)) > 1.5


# ---- what the host relies on ----------------------------------------------------------------------------------


def test_grid_follows_from_shapes_and_no_value_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whoever asked for one, as a host that waits for the device does, would raise."""
    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    for module, kernel in (
        (tree_verify_gqa, "_tree_verify_gqa_kernel"),
        (split_merge, "_merge_kernel"),
        (split_merge, "_plan_kernel"),
        (split_merge, "_pack_mask_kernel"),
    ):
        monkeypatch.setattr(module, kernel, Recorder())
    batch = make_batch(Case((50, 0), 40, heads=8, kv_heads=2, width=64, sinks=True, page_size=16))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            field.name: mode.from_tensor(value)
            for field in dataclasses.fields(Batch)
            if isinstance(value := getattr(batch, field.name), torch.Tensor)
        }
        faked = dataclasses.replace(batch, **fake)
        bits = pack_mask(mode.from_tensor(batch.mask), faked.kv_indptr, 40)
        verify(faked, bits=bits)
    # plan: a program per request and one more; 160 rows are two tiles; 16 chunks and one more per request
    assert grids == [(2, 1), (3,), (2, 2, 18), (80, 2)]


Q, KV = torch.zeros(4, 8, 16), torch.zeros(4, 2, 16)
INDPTR = offsets([3, 5])
GOOD = {
    "q": Q,
    "k_draft": KV,
    "v_draft": KV,
    "k_pool": torch.zeros(9, 2, 16),
    "v_pool": torch.zeros(9, 2, 16),
    "kv_indptr": INDPTR,
    "kv_slots": torch.arange(8),
    "ancestors": chain_bits(2, 2, torch.device("cpu")),
    "plan": split_merge.allocate_plan(2, target=1, batch_invariant=False, device=torch.device("cpu")),
    "scale": 1.0,
}
REFUSALS = {
    "q-dtype": ({"q": Q.double()}, r"q: got \[4, 8, 16\] float64 .*float16, bfloat16 or float32"),
    "indptr-dtype": ({"kv_indptr": INDPTR.long()}, r"kv_indptr: got \[3\] int64"),
    "rows": ({"q": Q[:3], "k_draft": KV[:3], "v_draft": KV[:3]}, "q: got 3 rows for 2 requests"),
    "heads": ({"k_draft": torch.zeros(4, 3, 16)}, "k_draft: got .*HKV a divisor of 8"),
    "value-rows": ({"v_draft": KV[:3]}, "v_draft: got"),
    "draft-dtype": ({"v_draft": KV.half()}, "v_draft: got .*float16.* expected torch.float32"),
    "pool-heads": ({"k_pool": torch.zeros(9, 1, 16)}, r"k_pool: got .*\[slots, 2, 16\]"),
    "pool-dtype": ({"v_pool": torch.zeros(9, 2, 16).half()}, "v_pool: got .*in float32 or fp8"),
    "last-axis": ({"q": torch.zeros(4, 8, 32)[..., ::2]}, "q: got a last axis of stride 2"),
    "slots-dtype": ({"kv_slots": torch.zeros(8)}, "kv_slots: got"),
    "bits": ({"ancestors": torch.zeros(4, 2, dtype=torch.int64)}, r"ancestors: got .*\[4, 1\] int64"),
    "plan": (
        {"plan": split_merge.allocate_plan(3, target=1, batch_invariant=False, device=torch.device("cpu"))},
        "plan: got one for 3 requests",
    ),
    "page-size": ({"page_size": 12, "page_indptr": INDPTR}, "page_size: got 12; expected a power of two"),
    "page-indptr": ({"page_size": 16}, "page_indptr: got nothing"),
    "page-indptr-shape": ({"page_size": 16, "page_indptr": INDPTR[:2]}, r"page_indptr: got \[2\]"),
    "window": ({"window": 0}, "window: got 0 for 2 draft tokens; expected at least 1"),
    "cap": ({"logit_cap": -1.0}, "logit_cap: got -1.0"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks: got \[2\] .*\[8\]"),
    "out": ({"out": torch.zeros(4, 8, 8)}, r"out: got \[4, 8, 8\] .*\[4, 8, 16\]"),
    "device": ({"kv_slots": torch.zeros(8, dtype=torch.int64, device="meta")}, "kv_slots: got a tensor on meta"),
}


@pytest.mark.parametrize("operator", [VERIFY, TWIN], ids=["kernel", "twin"])
@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_rejects(change: dict[str, Any], message: str, operator: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=message):
        operator(**(GOOD | change))


def test_names_all_problems_at_once() -> None:
    with pytest.raises(ValueError, match="(?s)k_draft: .*kv_slots: .*page_size: .*window: "):
        VERIFY(**(GOOD | {"k_draft": KV[:1], "kv_slots": Q, "page_size": 3, "window": 0}))
