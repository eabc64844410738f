"""Random batches of draft trees over paged KV, and what attention over them is, in float64.

The oracle walks from each draft token to its root and gathers what that token sees; nothing in it is shared with the
kernels. Slots that no request uses hold NaN, and so does the end of every last page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from sglang_eagle3_ext.kernels.split_merge import SplitPlan


class Case(NamedTuple):
    """A batch: committed lengths, draft tokens per request, and the shape of the attention."""

    lengths: tuple[int, ...]
    num_draft: int
    heads: int = 4
    kv_heads: int = 1
    width: int = 64
    value_width: int | None = None
    page_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    window: int | None = None
    logit_cap: float = 0.0
    sinks: bool = False
    chain: bool = False
    size: float = 1.0
    """Standard deviation of queries, keys and values."""
    min_chunk: int = 64
    target: int = 16
    batch_invariant: bool = False


@dataclass(frozen=True)
class Batch:
    """Tensors of a case, by the names of the operator's arguments, and the tree they belong to."""

    case: Case
    q: torch.Tensor
    k_draft: torch.Tensor
    v_draft: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_slots: torch.Tensor
    page_indptr: torch.Tensor | None
    sinks: torch.Tensor | None
    parents: tuple[tuple[int, ...], ...]
    """Per request the parent of each draft token, -1 at the root."""
    token_slots: tuple[torch.Tensor, ...]
    """Per request the slot of each committed token."""

    @property
    def mask(self) -> torch.Tensor:
        """SGLang's QLEN_ONLY tree mask, [B*Q*Q]."""
        n = self.case.num_draft
        mask = torch.zeros(len(self.parents), n, n, dtype=torch.bool)
        for b, parents in enumerate(self.parents):
            for i in range(n):
                mask[b, i, ancestors(parents, i)] = True
        return mask.flatten()

    def call(
        self, operator: Callable[..., torch.Tensor], plan: SplitPlan, bits: torch.Tensor, **changes: Any
    ) -> torch.Tensor:
        """Call a tree verification with these tensors."""
        case = self.case
        keywords = {
            "scale": 1 / math.sqrt(case.width),
            "k_scale": case.k_scale,
            "v_scale": case.v_scale,
            "page_size": case.page_size,
            "page_indptr": self.page_indptr,
            "window": case.window,
            "logit_cap": case.logit_cap,
            "sinks": self.sinks,
        }
        return operator(
            self.q,
            self.k_draft,
            self.v_draft,
            self.k_pool,
            self.v_pool,
            self.kv_indptr,
            self.kv_slots,
            bits,
            plan,
            **(keywords | changes),
        )

    def alone(self, b: int) -> Batch:
        """Take one request out of the batch; the pool stays."""
        n = self.case.num_draft
        rows, starts = slice(b * n, (b + 1) * n), self.kv_indptr if self.page_indptr is None else self.page_indptr
        pages = self.kv_slots[starts[b] : starts[b + 1]]
        return replace(
            self,
            case=self.case._replace(lengths=self.case.lengths[b : b + 1]),
            q=self.q[rows],
            k_draft=self.k_draft[rows],
            v_draft=self.v_draft[rows],
            kv_indptr=offsets([self.case.lengths[b]]),
            kv_slots=pages.contiguous(),
            page_indptr=None if self.page_indptr is None else offsets([len(pages)]),
            parents=self.parents[b : b + 1],
            token_slots=self.token_slots[b : b + 1],
        )


def offsets(lengths: list[int] | tuple[int, ...]) -> torch.Tensor:
    """Where each of several stretches begins, and where the last one ends."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    """Walk from a draft token to its root; the token itself comes first."""
    walk = []
    while node != -1:
        walk.append(node)
        node = parents[node]
    return walk


def make_batch(case: Case, seed: int = 0) -> Batch:
    """Draw a batch, rounded to its dtypes."""
    g = torch.Generator().manual_seed(seed)
    rows = len(case.lengths) * case.num_draft
    value_width, kv_dtype = case.value_width or case.width, case.kv_dtype or case.dtype

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * case.size).to(dtype)

    pages = [-(-length // case.page_size) for length in case.lengths]
    # Never the first pages: a masked lane that reads slot 0 must find NaN there.
    numbers = 3 + torch.randperm(sum(pages) + 4, generator=g)
    pools = [
        torch.full(((sum(pages) + 7) * case.page_size, case.kv_heads, width), float("nan")).to(kv_dtype)
        for width in (case.width, value_width)
    ]
    first, token_slots = offsets(pages), []
    for b, length in enumerate(case.lengths):
        key = torch.arange(length)
        slots = numbers[first[b] + key // case.page_size] * case.page_size + key % case.page_size
        for pool in pools:
            pool[slots] = draw(length, *pool.shape[1:], dtype=kv_dtype)
        token_slots.append(slots)
    parents = tuple(
        tuple(
            i - 1 if case.chain or i == 0 else int(torch.randint(0, i, (1,), generator=g))
            for i in range(case.num_draft)
        )
        for _ in case.lengths
    )
    return Batch(
        case=case,
        q=draw(rows, case.heads, case.width),
        k_draft=draw(rows, case.kv_heads, case.width),
        v_draft=draw(rows, case.kv_heads, value_width),
        k_pool=pools[0],
        v_pool=pools[1],
        kv_indptr=offsets(case.lengths),
        # Four more numbers than pages: what stands behind the last page of a batch must not matter.
        kv_slots=numbers,
        page_indptr=None if case.page_size == 1 else first,
        sinks=torch.randn(case.heads, generator=g) if case.sinks else None,
        parents=parents,
        token_slots=tuple(token_slots),
    )


def oracle(batch: Batch) -> torch.Tensor:
    """Attend one draft token after the other, to exactly the keys it sees, in float64: [T, HQ, DV]."""
    case, n = batch.case, batch.case.num_draft
    group = case.heads // case.kv_heads
    out = torch.empty(len(batch.q), case.heads, batch.v_draft.shape[2], dtype=torch.float64)
    for b, slots in enumerate(batch.token_slots):
        k_context = batch.k_pool[slots].double() * case.k_scale
        v_context = batch.v_pool[slots].double() * case.v_scale
        for i in range(n):
            walk = ancestors(batch.parents[b], i)
            seen = slots.new_tensor(range(len(slots)))
            if case.window is not None:
                position = len(slots) + len(walk) - 1
                seen = seen[position - seen <= case.window]
            rows = torch.tensor([b * n + j for j in walk])
            k = torch.cat([k_context[seen], batch.k_draft[rows].double()])  # [keys, HKV, D]
            v = torch.cat([v_context[seen], batch.v_draft[rows].double()])
            q = batch.q[b * n + i].double().view(case.kv_heads, group, -1)  # heads of a group stand together
            scores = torch.einsum("hgd,khd->hgk", q, k) / math.sqrt(case.width)
            if case.logit_cap:
                scores = case.logit_cap * torch.tanh(scores / case.logit_cap)
            top = scores.amax(-1, keepdim=True)
            weight = torch.exp(scores - top)
            bar = weight.sum(-1, keepdim=True)
            if batch.sinks is not None:
                bar = bar + torch.exp(batch.sinks.double().view(case.kv_heads, group, 1) - top)
            out[b * n + i] = torch.einsum("hgk,khd->hgd", weight / bar, v).reshape(case.heads, -1)
    return out


def forget_newest(batch: Batch) -> Batch:
    """Take the newest committed token from every request that has one."""
    lengths = tuple(max(0, length - 1) for length in batch.case.lengths)
    return _with_slots(batch, [slots[:n] for slots, n in zip(batch.token_slots, lengths, strict=True)])


def take_a_stranger(batch: Batch) -> Batch:
    """Give every request one committed token more: a slot of nobody's, with plausible contents."""
    return _with_slots(batch, [torch.cat([slots, slots.new_zeros(1)]) for slots in batch.token_slots])


def replace_a_token(batch: Batch, at: Callable[[int], int]) -> Batch:
    """Put the stranger in the place of one committed token of every request that has one; ``at`` says which."""
    slots = [s.clone() for s in batch.token_slots]
    for s in slots:
        if len(s):
            s[at(len(s))] = 0
    return _with_slots(batch, slots)


def _with_slots(batch: Batch, slots: list[torch.Tensor]) -> Batch:
    """Give each request other committed tokens, in pages of one; slot 0 is nobody's and gets plausible contents."""
    assert batch.case.page_size == 1
    lengths = tuple(len(s) for s in slots)
    pools = [pool.clone() for pool in (batch.k_pool, batch.v_pool)]
    for pool, draft in zip(pools, (batch.k_draft, batch.v_draft), strict=True):
        pool[0] = draft[0].to(pool.dtype)
    return replace(
        batch,
        case=batch.case._replace(lengths=lengths),
        k_pool=pools[0],
        v_pool=pools[1],
        kv_indptr=offsets(lengths),
        kv_slots=torch.cat([*slots, slots[0].new_zeros(1)]),
        token_slots=tuple(slots),
    )


def flip_every_bit(batch: Batch, bits: torch.Tensor) -> tuple[Batch, torch.Tensor, list[tuple[int, int]]]:
    """Repeat the only request of a batch for every bit of its ancestors, each time with that bit wrong."""
    n, length = batch.case.num_draft, batch.case.lengths[0]
    flips = [(i, j) for i in range(n) for j in range(n)]
    many = bits.repeat(len(flips), 1).view(len(flips), n, -1)
    for request, (i, j) in enumerate(flips):
        many[request, i, j // 64] ^= torch.tensor(1) << (j % 64)
    lengths = (length,) * len(flips)
    repeated = replace(
        batch,
        case=batch.case._replace(lengths=lengths),
        q=batch.q.repeat(len(flips), 1, 1),
        k_draft=batch.k_draft.repeat(len(flips), 1, 1),
        v_draft=batch.v_draft.repeat(len(flips), 1, 1),
        kv_indptr=offsets(lengths),
        kv_slots=batch.token_slots[0].repeat(len(flips) + 1),
        parents=batch.parents * len(flips),
        token_slots=batch.token_slots * len(flips),
    )
    return repeated, many.flatten(0, 1), flips


def excesses(actual: torch.Tensor, expected: torch.Tensor, requests: int) -> list[float]:
    """Measure ``excess`` request by request."""
    return [excess(a, e) for a, e in zip(actual.chunk(requests), expected.chunk(requests), strict=True)]


def excess(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Divide the largest error by the largest that rounding the truth to the output's dtype makes."""
    rounding = (expected.to(actual.dtype).double() - expected).abs().max().item()
    return (actual.double() - expected).abs().max().item() / rounding


def steps_apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Divide the largest difference by the step of the dtype at the largest value of each row."""
    step = torch.finfo(theirs.dtype).eps * theirs.float().abs().amax(-1, keepdim=True)
    return round(((ours.float() - theirs.float()).abs() / step).max().item(), 3)
