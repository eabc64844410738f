"""Attention of the CPU backend against a dense float64 oracle written from the definition."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch

from sglang_eagle3_ext.host.cpu import segments
from sglang_eagle3_ext.host.cpu.segments import MaskStyle, attend

POISON = float("nan")


class Case(NamedTuple):
    """Head counts and sizes; ``contiguous`` says whether the slots of a request follow one another."""

    heads: int
    group: int
    head_size: int
    value_size: int
    contiguous: bool
    dtype: torch.dtype


CASES = [
    pytest.param(Case(1, 1, 8, 8, True, torch.float32), id="1x1_d8"),
    pytest.param(Case(3, 3, 64, 64, False, torch.float32), id="3x3_d64_scattered"),
    pytest.param(Case(2, 8, 40, 24, False, torch.float32), id="2x8_d40_v24_scattered"),
    pytest.param(Case(3, 3, 64, 64, True, torch.bfloat16), id="3x3_d64_bf16"),
    pytest.param(Case(2, 1, 16, 16, False, torch.bfloat16), id="2x1_d16_bf16_scattered"),
]


class Pool:
    """A pool whose slots are poison except those that belong to a request."""

    def __init__(self, case: Case, lengths: list[int], shared_prefix: int = 0) -> None:
        generator = torch.Generator().manual_seed(len(lengths) + shared_prefix)
        total = sum(lengths) + 50
        self.keys = torch.full((total, case.heads, case.head_size), POISON, dtype=case.dtype)
        self.values = torch.full((total, case.heads, case.value_size), POISON, dtype=case.dtype)
        self.table = torch.full((len(lengths) + 3, max(lengths) + 5), total - 1, dtype=torch.int32)
        self.requests = random.Random(0).sample(range(len(lengths) + 3), len(lengths))
        free = torch.arange(7, total) if case.contiguous else 1 + torch.randperm(total - 1, generator=generator)
        prefix = free[:shared_prefix]
        taken = shared_prefix
        for request, length in zip(self.requests, lengths, strict=True):
            own = free[taken : taken + length - shared_prefix]
            taken += length - shared_prefix
            slots = torch.cat((prefix, own)).long()
            self.table[request, :length] = slots.int()
            self.keys[slots] = torch.randn(length, *self.keys.shape[1:], generator=generator).to(case.dtype)
            self.values[slots] = torch.randn(length, *self.values.shape[1:], generator=generator).to(case.dtype)

    def attended(self, request: int, query: torch.Tensor, seen: list[int], scale: float) -> torch.Tensor:
        """Attend one query row [HQ, D] to the positions ``seen`` of a request, in float64, by loops."""
        slots = self.table[request, seen].long()
        keys, values = self.keys[slots].double(), self.values[slots].double()
        group = query.shape[0] // keys.shape[1]
        out = []
        for head, row in enumerate(query.double()):
            scores = torch.stack([(row * key[head // group]).sum() * scale for key in keys])
            weights = (scores - scores.max()).exp()
            weights = weights / weights.sum()
            out.append(sum(w * value[head // group] for w, value in zip(weights, values, strict=True)))
        return torch.cat(out)


def queries(case: Case, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, case.heads * case.group, case.head_size)
    return torch.randn(shape, generator=generator).to(case.dtype)


def check(
    case: Case,
    pool: Pool,
    plan: list[segments.Segment],
    query: torch.Tensor,
    rows: list[tuple[int, list[int]]],
) -> None:
    """Compare with the oracle, row by row; ``rows`` names each row's request and what it sees."""
    scale = 1 / math.sqrt(case.head_size)
    out = attend(query, pool.keys, pool.values, plan, scale)
    assert out.shape == (len(rows), case.heads * case.group * case.value_size)
    assert out.dtype == case.dtype
    tolerance = 2e-6 if case.dtype == torch.float32 else 2e-2
    for index, (request, seen) in enumerate(rows):
        expected = pool.attended(request, query[index], seen, scale)
        assert (out[index].double() - expected).abs().max() < tolerance, f"row {index}"


@pytest.mark.parametrize("case", CASES)
def test_decode(case: Case) -> None:
    lengths = [1, 9, 2, 33]
    pool = Pool(case, lengths)
    plan = segments.decode_segments(pool.table, pool.requests, lengths)
    rows = [(r, list(range(n))) for r, n in zip(pool.requests, lengths, strict=True)]
    check(case, pool, plan, queries(case, 4), rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cells", [segments.MASK_CELLS, 40], ids=["whole", "in_pieces"])
def test_extend(case: Case, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix of 0, of one token, of many; a request without new tokens; one new token (mixed batches)."""
    monkeypatch.setattr(segments, "MASK_CELLS", cells)
    lengths, new = [5, 12, 8, 20, 3], [5, 11, 1, 7, 0]
    pool = Pool(case, lengths)
    style = MaskStyle(case.dtype, case.group)
    plan = segments.extend_segments(pool.table, pool.requests, lengths, new, style)
    rows = [
        (request, list(range(length - count + i + 1)))
        for request, length, count in zip(pool.requests, lengths, new, strict=True)
        for i in range(count)
    ]
    check(case, pool, plan, queries(case, sum(new)), rows)


@pytest.mark.parametrize("case", CASES)
def test_extend_behind_a_shared_prefix(case: Case) -> None:
    lengths, new = [14, 11, 19], [4, 1, 9]
    pool = Pool(case, lengths, shared_prefix=10)
    style = MaskStyle(case.dtype, case.group)
    plan = segments.extend_segments(pool.table, pool.requests, lengths, new, style)
    rows = [
        (request, list(range(length - count + i + 1)))
        for request, length, count in zip(pool.requests, lengths, new, strict=True)
        for i in range(count)
    ]
    check(case, pool, plan, queries(case, sum(new)), rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_verify_with_random_trees(case: Case, size: int) -> None:
    committed = [0, 3, 17]
    pool = Pool(case, [length + size for length in committed])
    rng = random.Random(size)
    mask = torch.zeros(len(committed) + 2, size, size, dtype=torch.bool)
    rows = []
    for index, (request, length) in enumerate(zip(pool.requests, committed, strict=True)):
        parents = [-1] + [rng.randrange(node) for node in range(1, size)]
        for node in range(size):
            path, ancestor = [], node
            while ancestor != -1:
                path.append(ancestor)
                ancestor = parents[ancestor]
            mask[index, node, path] = True
            rows.append((request, [*range(length), *(length + n for n in sorted(path))]))
    plan = segments.verify_segments(
        pool.table, pool.requests, committed, mask.view(-1), size, MaskStyle(case.dtype, case.group)
    )
    check(case, pool, plan, queries(case, len(rows)), rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("branches", "steps"), [(1, 1), (1, 4), (4, 2), (3, 3)])
def test_draft_steps(case: Case, branches: int, steps: int) -> None:
    """Branch b of step s sees the prefix and its own first s slots, branches lying one after the other."""
    committed = [2, 9]
    pool = Pool(case, [length + branches * steps for length in committed])
    draft_slots = torch.stack(
        [
            pool.table[request, length : length + branches * steps].view(branches, steps)
            for request, length in zip(pool.requests, committed, strict=True)
        ]
    )
    plans = list(segments.draft_segments(pool.table, pool.requests, committed, draft_slots.long()))
    assert len(plans) == steps
    for step, plan in enumerate(plans, start=1):
        rows = [
            (request, [*range(length), *range(length + b * steps, length + b * steps + step)])
            for request, length in zip(pool.requests, committed, strict=True)
            for b in range(branches)
        ]
        check(case, pool, plan, queries(case, len(rows)), rows)


def test_a_request_alone_is_the_request_in_a_batch() -> None:
    case = Case(3, 3, 64, 64, False, torch.float32)
    lengths = [30, 7, 19]
    pool = Pool(case, lengths)
    query = queries(case, 3)
    together = attend(
        query, pool.keys, pool.values, segments.decode_segments(pool.table, pool.requests, lengths), 0.125
    )
    for row, (request, length) in enumerate(zip(pool.requests, lengths, strict=True)):
        plan = segments.decode_segments(pool.table, [request], [length])
        alone = attend(query[row : row + 1], pool.keys, pool.values, plan, 0.125)
        assert torch.equal(alone[0], together[row])


def test_rows_without_a_segment_are_zero() -> None:
    case = Case(2, 2, 8, 8, True, torch.float32)
    pool = Pool(case, [4, 6])
    plan = segments.decode_segments(pool.table, [*pool.requests, pool.requests[0], 0], [4, 0, 0, 0])
    out = attend(queries(case, 4), pool.keys, pool.values, plan, 1.0)
    assert out[0].abs().sum() > 0
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))


def test_no_rows_at_all() -> None:
    case = Case(2, 2, 8, 8, True, torch.float32)
    pool = Pool(case, [4])
    assert attend(queries(case, 0), pool.keys, pool.values, [], 1.0).shape == (0, 32)


def test_consecutive_slots_are_read_without_a_copy() -> None:
    assert segments.compact(torch.tensor([4, 5, 6])) == slice(4, 7)
    assert segments.compact(torch.tensor([9])) == slice(9, 10)
    scattered = segments.compact(torch.tensor([4, 6, 5, 7], dtype=torch.int32))
    assert torch.equal(scattered, torch.tensor([4, 6, 5, 7]))
