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
from sglang_eagle3_ext.kernels import tree_verify_gqa, tree_verify_mla
from sglang_eagle3_ext.kernels.split_merge import SplitPlan, pack_mask, plan_splits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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

    def on(self, device: torch.device) -> Batch:
        """Move what the kernels read to a device; the oracle goes on reading the batch that stays."""
        named = ("q", "k_draft", "v_draft", "k_pool", "v_pool", "kv_indptr", "kv_slots", "page_indptr", "sinks")
        tensors = {name: getattr(self, name) for name in named}
        return replace(self, **{name: None if t is None else t.to(device) for name, t in tensors.items()})

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
            kv_indptr=offsets([self.case.lengths[b]]).to(self.q.device),
            kv_slots=pages.contiguous(),
            page_indptr=None if self.page_indptr is None else offsets([len(pages)]).to(self.q.device),
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


# ---- the cases that every implementation has to pass ---------------------------------------------------------------

GQA_CASES: dict[str, Case] = {
    "nothing-committed": Case((0, 0), 7, heads=8, kv_heads=2),
    "ragged-7": Case((300, 0, 65), 7, heads=8, kv_heads=2, width=128),
    "one-token": Case((64, 0, 1, 63, 65), 1, heads=8, kv_heads=2),
    "group-5-13-tokens": Case((100, 40), 13, heads=10, kv_heads=2),
    "64-tokens": Case((131,), 64),
    "65-tokens-two-words": Case((70, 0), 65, heads=2),
    "128-tokens-chain": Case((130,), 128, heads=2, kv_heads=2, chain=True),
    "one-head-each": Case((90, 5), 5, heads=3, kv_heads=3, width=96),
    "group-16": Case((70,), 3, heads=16),
    "page-16": Case((133, 77), 13, heads=8, kv_heads=2, page_size=16),
    "page-64-one-token-on-a-page": Case((129, 1, 0), 8, heads=8, kv_heads=1, page_size=64),
    "wide-keys": Case((100, 30), 3, width=192, value_width=128),
    "head-256": Case((100, 30), 3, width=256),
    "large-logits": Case((200, 40), 8, size=6.0),
    "chunks-of-one-tile": Case((600,), 4, target=100),
    "each-request-cut-alone": Case((600, 70), 4, batch_invariant=True, target=3),
    "float16": Case((100, 40), 6, heads=8, kv_heads=2, dtype=FP16),
    "float32": Case((130, 40), 6, heads=8, kv_heads=2, dtype=FP32),
    "fp8": Case((130, 40), 8, heads=8, kv_heads=2, kv_dtype=E4M3, k_scale=0.37, v_scale=1.9),
    "fp8-e5m2": Case((130, 40), 8, heads=8, kv_heads=2, kv_dtype=E5M2, k_scale=0.37, v_scale=1.9),
    "fp8-e5m2-float16": Case((130, 40), 8, kv_dtype=E5M2, dtype=FP16, k_scale=0.37, v_scale=1.9),
    "window": Case((300, 40, 0), 8, window=70),
    "window-two-words": Case((300,), 70, heads=2, window=90),
    "logit-cap": Case((130, 40), 8, logit_cap=5.0, size=2.0),
    "sinks": Case((130, 0, 7), 8, heads=8, kv_heads=2, sinks=True),
    "everything": Case(
        (200, 0, 7), 7, page_size=16, kv_dtype=E4M3, k_scale=0.5, v_scale=2.0, window=20, logit_cap=3.0, sinks=True
    ),
    "llama-3.1-8b": Case((200,), 8, heads=32, kv_heads=8, width=128),
}

SMALL_LATENT = {"width": 80, "value_width": 64}
KIMI_LATENT = {"width": 576, "value_width": 512}
MLA_CASES: dict[str, Case] = {
    "prefix 0, one token": Case((0,), 1, 1, **SMALL_LATENT),
    "prefix 0, 3 requests": Case((0, 0, 0), 7, 3, **SMALL_LATENT),
    "ragged": Case((1, 0, 63, 65, 300), 7, 5, **SMALL_LATENT),
    "one token, ragged": Case((64, 0, 1, 63, 65), 1, 5, **SMALL_LATENT),
    "13 tokens": Case((130, 17), 13, 5, **SMALL_LATENT),
    "13 tokens, fp16": Case((130, 17), 13, 5, dtype=FP16, **SMALL_LATENT),
    "fp32": Case((66, 17), 5, 2, dtype=FP32, **SMALL_LATENT),
    "64 tokens": Case((70,), 64, 2, **SMALL_LATENT),
    "70 tokens: two words of bits": Case((3,), 70, 1, **SMALL_LATENT),
    "chain": Case((90, 5), 6, 3, chain=True, **SMALL_LATENT),
    "pages of 16": Case((133, 77), 7, 3, page_size=16, **SMALL_LATENT),
    "pages of 64": Case((130, 1), 7, 3, page_size=64, **SMALL_LATENT),
    "fp8 with a scale": Case((140, 9), 5, 3, kv_dtype=E4M3, k_scale=0.37, **SMALL_LATENT),
    "e5m2 with a scale": Case((140, 9), 5, 3, kv_dtype=E5M2, k_scale=0.37, **SMALL_LATENT),
    "large scores": Case((150, 40), 5, 3, size=5.0, **SMALL_LATENT),
    "128 heads": Case((70,), 2, 128, **SMALL_LATENT),
    "many chunks in float16": Case((700,), 8, 8, target=32, **SMALL_LATENT),
    "kimi-k2.5 tp8": Case((150, 0), 8, 8, **KIMI_LATENT),
    "kimi-k2.5 tp8, fp8, pages": Case((140,), 4, 8, kv_dtype=E4M3, k_scale=0.5, page_size=64, **KIMI_LATENT),
}


def latents(case: Case, seed: int = 0) -> Batch:
    """Draw a batch whose one kv head has the front of its keys for values."""
    batch = make_batch(case._replace(v_scale=case.k_scale), seed)
    width = batch.v_draft.shape[2]
    return replace(batch, v_draft=batch.k_draft[..., :width], v_pool=batch.k_pool[..., :width])


def plan_of(batch: Batch) -> SplitPlan:
    """Plan the chunks of a batch as its case asks."""
    case = batch.case
    return plan_splits(
        batch.kv_indptr, target=case.target, min_chunk=case.min_chunk, batch_invariant=case.batch_invariant
    )


def bits_of(batch: Batch) -> torch.Tensor:
    """Pack the ancestors of every draft token of a batch."""
    return pack_mask(batch.mask.to(batch.q.device), batch.kv_indptr, batch.case.num_draft)


def verify_gqa(
    batch: Batch,
    operator: Callable[..., torch.Tensor] = tree_verify_gqa.tree_verify_gqa,
    plan: SplitPlan | None = None,
    bits: torch.Tensor | None = None,
    **changes: Any,
) -> torch.Tensor:
    """Plan, pack and attend, all with our kernels."""
    plan, bits = plan_of(batch) if plan is None else plan, bits_of(batch) if bits is None else bits
    return batch.call(operator, plan, bits, **changes)


def verify_mla(
    batch: Batch,
    operator: Callable[..., torch.Tensor] = tree_verify_mla.tree_verify_mla,
    plan: SplitPlan | None = None,
    bits: torch.Tensor | None = None,
    **changes: Any,
) -> torch.Tensor:
    """Do the same over latents, with the tensors of a batch or with some of them changed."""
    tensors = {
        "q": batch.q,
        "latent_draft": batch.k_draft[:, 0],
        "latent_pool": batch.k_pool[:, 0],
        "kv_indptr": batch.kv_indptr,
        "kv_slots": batch.kv_slots,
        "ancestors": bits_of(batch) if bits is None else bits,
        "plan": plan_of(batch) if plan is None else plan,
        "latent_width": batch.v_draft.shape[2],
        "scale": 1 / math.sqrt(batch.case.width),
        "kv_scale": batch.case.k_scale,
        "page_size": batch.case.page_size,
        "page_indptr": batch.page_indptr,
    }
    return operator(**(tensors | changes))
