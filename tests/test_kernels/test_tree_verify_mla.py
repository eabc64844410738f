"""``tree_verify_mla`` in the corrected interpreter and its PyTorch twin, against the float64 oracle of draft trees."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpret
from sglang_eagle3_ext.kernels import split_merge, tree_verify_mla
from sglang_eagle3_ext.kernels.arch import TreeVerifyLaunch
from sglang_eagle3_ext.kernels.split_merge import chain_bits, pack_mask
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.draft_trees import (
    BF16,
    E4M3,
    FP32,
    Batch,
    Case,
    bits_of,
    excess,
    excesses,
    flip_every_bit,
    forget_newest,
    latents,
    oracle,
    plan_of,
    replace_a_token,
    take_a_stranger,
)
from benchmarks.draft_trees import MLA_CASES as CASES
from benchmarks.draft_trees import SMALL_LATENT as SMALL
from benchmarks.draft_trees import verify_mla as call

interpret(tree_verify_mla, split_merge)

BUDGET = 1.5
"""Largest error, in units of what rounding the truth to the output's dtype costs."""


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_oracle(name: str, record: Callable[..., None]) -> None:
    case = CASES[name]
    batch = latents(case)
    actual, truth = call(batch), oracle(batch)
    assert actual.dtype == case.dtype
    error, bar = None, BUDGET if case.kv_dtype is None else 2.0
    if sum(case.lengths) == 0 and case.num_draft == 1:  # one key: its latent, to the bit
        assert torch.equal(actual.double(), truth)
        error, bar = 0.0, 0.0
    elif case.dtype == FP32:
        # Sums in float32 over hundreds of keys: the rounding of one float32 is no measure for them.
        torch.testing.assert_close(actual.double(), truth, rtol=1e-5, atol=2e-6)
        bar = None
    else:
        error = round(excess(actual, truth), 3)
        assert error <= bar
    about = {"kernel": "tree_verify_mla", "case": name, "dtype": case.dtype, "stored": case.kv_dtype}
    record("errors", **about, oracle="float64", error=error, bar=bar, result=actual)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twin_matches_oracle(case: Case) -> None:
    batch = latents(case)
    actual, truth = call(batch, tree_verify_mla.tree_verify_mla_torch), oracle(batch)
    assert actual.dtype == case.dtype
    # Float32 and one rounding at the end.
    half_step = torch.finfo(case.dtype).eps / 2 * truth.abs().max()
    assert (actual.double() - truth).abs().max() <= 1.01 * half_step + 2e-6


@pytest.mark.parametrize(
    "launch",
    [
        TreeVerifyLaunch(16, 16, 4, 2),
        TreeVerifyLaunch(64, 32, 8, 2),
        TreeVerifyLaunch(32, 64, 8, 3),
    ],
    ids=["small", "tall", "wide"],
)
def test_every_tile_gives_the_result(launch: TreeVerifyLaunch) -> None:
    batch = latents(Case((200, 3), 13, 4, **SMALL))
    assert excess(call(batch, launch=launch), oracle(batch)) <= BUDGET


def test_writes_into_the_given_buffer_and_reads_strided_rows() -> None:
    batch = latents(Case((70, 9), 7, 3, **SMALL))
    out = torch.full((14, 3, 64), float("nan"), dtype=BF16)
    wide = torch.full((*batch.q.shape[:2], 100), float("nan"), dtype=BF16)
    wide[..., :80] = batch.q
    assert call(batch, q=wide[..., :80], out=out) is out
    assert torch.equal(out, call(batch))


@pytest.mark.parametrize("length", [0, 1, 17, 32, 63, 64])
def test_every_mask_bit_counts(length: int) -> None:
    batch = latents(Case((length,), 5, 2, target=1, batch_invariant=True, **SMALL))
    truth = oracle(batch)
    repeated, bits, flips = flip_every_bit(batch, bits_of(batch))
    changed = call(repeated, bits=bits).chunk(len(flips))
    assert [flip for flip, got in zip(flips, changed, strict=True) if excess(got, truth) <= 2 * BUDGET] == []


@pytest.mark.parametrize(
    "mutated",
    [forget_newest, take_a_stranger, lambda batch: replace_a_token(batch, lambda length: length // 2)],
    ids=["one-token-less", "one-token-more", "middle-slot"],
)
def test_one_wrong_length_or_slot_breaks_the_bar_at_every_prefix(mutated: Callable[[Batch], Batch]) -> None:
    prefixes = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64)
    batch = latents(Case(prefixes, 3, 2, target=1, batch_invariant=True, **SMALL))
    truth, wrong = oracle(batch), mutated(batch)
    # Request by request the largest rounding is that of a few hundred numbers: the bar of a whole batch is too low.
    assert max(excesses(call(batch), truth, len(prefixes))) <= 2.0
    same = [torch.equal(*pair) for pair in zip(batch.token_slots, wrong.token_slots, strict=True)]
    assert sum(same) <= 1
    changed = excesses(call(wrong), truth, len(prefixes))
    unseen = [p for p, is_same, error in zip(prefixes, same, changed, strict=True) if error <= 2.0 and not is_same]
    assert unseen == []


@pytest.mark.parametrize(("page_size", "prefix"), [(16, 5), (16, 64), (64, 64), (64, 187)])
def test_one_wrong_page_breaks_the_bar(page_size: int, prefix: int) -> None:
    batch = latents(Case((prefix,), 5, 2, page_size=page_size, **SMALL))
    truth, stranger = oracle(batch), int(batch.kv_slots[-1])
    first = int(batch.kv_slots[0]) * page_size
    pool = batch.k_pool[:, 0].clone()  # with a page of nobody's that has plausible contents
    pool[stranger * page_size : (stranger + 1) * page_size] = pool[first : first + page_size].flip(-1)
    assert excess(call(batch, latent_pool=pool), truth) <= BUDGET
    for page in range(-(-prefix // page_size)):
        slots = batch.kv_slots.clone()
        slots[page] = stranger
        assert excess(call(batch, latent_pool=pool, kv_slots=slots), truth) > 2 * BUDGET, page


MUTATIONS: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "one token less": lambda b: {"kv_indptr": b.kv_indptr - torch.tensor([0, 1], dtype=torch.int32)},
    "one token more": lambda b: {"kv_indptr": b.kv_indptr + torch.tensor([0, 1], dtype=torch.int32)},
    "first page replaced": lambda b: {"kv_slots": torch.cat([b.kv_slots[1:2], b.kv_slots[1:]])},
    "scale": lambda b: {"scale": 1.1 / math.sqrt(b.case.width)},
    "kv_scale": lambda b: {"kv_scale": 1.1 * b.case.k_scale},
    "a draft latent": lambda b: {"latent_draft": b.k_draft[:, 0].roll(1, 0)},
    "rotary query": lambda b: {"q": torch.cat([b.q[..., :64], b.q[..., 64:].roll(1, 2)], 2)},
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_argument_counts(change: Callable[[Batch], dict[str, Any]], page_size: int) -> None:
    batch = latents(Case((35,), 7, 2, page_size=page_size, kv_dtype=E4M3, k_scale=0.5, **SMALL))
    truth = oracle(batch)
    assert excess(call(batch), truth) <= BUDGET
    changed = call(batch, **change(batch))
    assert not excess(changed, truth) <= 2 * BUDGET  # NaN counts as different


def test_a_request_has_the_same_bits_in_every_batch() -> None:
    case = Case((300, 0, 133), 7, 4, batch_invariant=True, target=4, **SMALL)
    batch = latents(case)
    together = call(batch)
    for b in range(3):
        assert torch.equal(together[b * 7 : (b + 1) * 7], call(batch.alone(b)))


def test_a_pool_of_three_million_slots() -> None:
    # 3.4 billion elements: past what 32 bits address. Pages that are not touched cost no memory.
    batch = latents(Case((90, 33), 5, 3, **SMALL))
    pool = torch.empty(3_000_000, 1152, dtype=BF16)[:, :80]
    slots = torch.cat(batch.token_slots)
    far = len(pool) - 1 - 7 * torch.arange(len(slots))
    pool[far] = batch.k_pool[slots, 0]
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(call(batch, latent_pool=pool, kv_slots=far.to(dtype)), call(batch))


def test_chain_bits_and_a_chain_mask_are_one() -> None:
    batch = latents(Case((40,), 6, 2, chain=True, **SMALL))
    assert torch.equal(call(batch, bits=chain_bits(1, 6, torch.device("cpu"))), call(batch))


def test_grid_follows_from_shapes_and_no_value_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whoever asked for one, as a host that waits for the device does, would raise."""
    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    kernels = ("_plan_kernel", "_pack_mask_kernel", "_merge_kernel")
    for module, kernel in [(tree_verify_mla, "_tree_verify_mla_kernel"), *((split_merge, name) for name in kernels)]:
        monkeypatch.setattr(module, kernel, Recorder())
    batch = latents(Case((50, 0), 40, 8, page_size=16, **SMALL))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {
            field.name: mode.from_tensor(value)
            for field in dataclasses.fields(Batch)
            if isinstance(value := getattr(batch, field.name), torch.Tensor)
        }
        faked = dataclasses.replace(batch, **fake)
        call(faked, bits=pack_mask(mode.from_tensor(batch.mask), faked.kv_indptr, 40))
    # plan: a program per request and one more; 320 rows are some tiles; 16 chunks and one more per request
    tiles = grids[2][0]
    assert grids[:2] == [(2, 1), (3,)]
    assert grids[2:] == [(tiles, 18), (80, grids[3][1])]


REJECTED: dict[str, tuple[Callable[[Batch], dict[str, Any]], list[str]]] = {
    "widths": (lambda b: {"latent_width": 48}, ["latent_width: got C = 48 and R = 32"]),
    "several": (
        lambda b: {"latent_pool": b.k_pool, "ancestors": torch.zeros(3, 1), "page_size": 3},
        ["latent_pool: got", "ancestors: got", "page_size: got 3"],
    ),
    "pages without offsets": (lambda b: {"page_size": 16}, ["page_indptr: got nothing"]),
    "rows": (lambda b: {"q": b.q[:-1]}, ["q: got 13 rows for 2 requests", "latent_draft: got"]),
    "buffer": (lambda b: {"out": torch.empty(14, 3, 80, dtype=BF16)}, ["out: got"]),
    "integers": (lambda b: {"q": b.q.int()}, ["q: got"]),
}


@pytest.mark.parametrize(("change", "messages"), REJECTED.values(), ids=REJECTED)
@pytest.mark.parametrize("operator", [tree_verify_mla.tree_verify_mla, tree_verify_mla.tree_verify_mla_torch])
def test_rejects_bad_input(
    operator: Callable[..., torch.Tensor], change: Callable[[Batch], dict[str, Any]], messages: list[str]
) -> None:
    batch = latents(Case((9, 3), 7, 3, **SMALL))
    with pytest.raises(ValueError, match=re.escape(messages[0])) as raised:
        call(batch, operator, bits=bits_of(batch), plan=plan_of(batch), **change(batch))
    for message in messages:
        assert message in str(raised.value)
