"""Split the committed KV of a batch over a whole device, and merge what the parts found.

What the two tree-verify kernels share. Attention over a request's keys, cut into chunks c, is

    out = sum_c 2^(lse_c - lse) out_c,    lse = log2 sum_c 2^lse_c,

so chunks may run anywhere in any order. Three things are computed here: the *plan* (which request and which part of
it each chunk slot works on), the *ancestor bits* (which draft tokens a draft token sees), and the *merge*.

Dimensions: B requests, Q draft tokens per request, T = B*Q rows, HQ query heads, DV width of a value head,
W = ceil(Q/64) words of ancestor bits, slots = the static number of chunk slots.
Contract: close; log-sum-exp in base 2; sums in float32, chunks in ascending order, so that a result depends on the
plan and on nothing that varies from run to run.
CUDA graphs: lengths are read on the device and grids follow from shapes alone; nothing waits for the device. Plan and
bits are computed once per step and shared by all layers.
Does not: touch a mask over the context. Of SGLang's FULL_MASK only the Q x Q corner of each request is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from sglang_eagle3_ext.kernels.arguments import describe, devices_that_differ

TILE = 64
"""Keys in one tile: chunks begin at multiples of it, so a kernel may step by any power of two up to it."""

WORD = 64
"""Draft tokens in one word of ancestor bits."""

MaskLayout = Literal["qlen_only", "full"]


@dataclass(frozen=True)
class SplitPlan:
    """Which request each chunk slot works on; chunk ``i`` of request ``b`` lives in slot ``first_slot[b] + i``.

    Attributes:
        slot_request: [slots] int32 request, or -1 where the slot has no work.
        num_chunks: [B] int32, at least 1 (a request without committed tokens still has its draft tokens).
        first_slot: [B] int32.
    """

    slot_request: torch.Tensor
    num_chunks: torch.Tensor
    first_slot: torch.Tensor


def allocate_plan(num_requests: int, *, target: int, batch_invariant: bool, device: torch.device) -> SplitPlan:
    """Allocate the buffers of a plan, whose number of slots no lengths can exceed.

    Cut at ``ceil(all tiles / target)`` tiles, B requests make at most ``target + B`` chunks, as each rounds up once;
    cut by its own length alone, each makes at most ``target``.

    Args:
        num_requests: B.
        target: chunks wanted: of the whole batch, or of each request where ``batch_invariant``.
        batch_invariant: see ``plan_splits``.
        device: where the kernels run.

    Returns:
        Buffers without content.
    """
    slots = num_requests * target if batch_invariant else num_requests + target
    return SplitPlan(*(torch.empty(n, dtype=torch.int32, device=device) for n in (slots, num_requests, num_requests)))


def plan_splits_torch(
    kv_indptr: torch.Tensor,
    *,
    target: int,
    min_chunk: int = 256,
    batch_invariant: bool = False,
    out: SplitPlan | None = None,
) -> SplitPlan:
    """Cut the committed KV of a batch into chunks; PyTorch twin of ``plan_splits``, same arguments and result."""
    plan = _checked_plan(kv_indptr, target, min_chunk, batch_invariant, out)
    tiles = -(-kv_indptr.diff() // TILE)  # [B]
    share = -(-(tiles if batch_invariant else tiles.sum()) // target)
    chunks = (-(-tiles // share.clamp(min=min_chunk // TILE))).clamp(min=1)
    plan.num_chunks.copy_(chunks)
    plan.first_slot.copy_(chunks.cumsum(0) - chunks)
    plan.slot_request.fill_(-1)
    owners = torch.repeat_interleave(torch.arange(len(chunks), device=chunks.device), chunks)
    plan.slot_request[: len(owners)] = owners.int()
    return plan


def pack_mask_torch(
    mask: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_draft: int,
    *,
    layout: MaskLayout = "qlen_only",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack a tree mask into ancestor bits; PyTorch twin of ``pack_mask``, same arguments and result."""
    bits = _checked_bits(mask, kv_indptr, num_draft, layout, out)
    row = torch.arange(num_draft, device=mask.device)[:, None]
    column = torch.arange(num_draft, device=mask.device)
    shifts = (column % WORD).long()
    starts, lengths = kv_indptr[:-1].long(), kv_indptr.diff().long()
    for b in range(len(lengths)):
        offset = b * num_draft * num_draft + row * num_draft + column
        if layout == "full":
            offset = offset + num_draft * starts[b] + (row + 1) * lengths[b]
        sees = mask.view(torch.uint8)[offset] != 0  # [Q, Q]
        for w in range(bits.shape[1]):
            part = slice(w * WORD, (w + 1) * WORD)
            bits[b * num_draft : (b + 1) * num_draft, w] = (sees[:, part].long() << shifts[part]).sum(1)
    return bits


def chain_bits(num_requests: int, num_draft: int, device: torch.device) -> torch.Tensor:
    """Give the ancestor bits of a chain, in which every draft token sees itself and all before it.

    Args:
        num_requests: B.
        num_draft: Q.
        device: where the kernels run.

    Returns:
        [T, W] int64.
    """
    rows = torch.arange(num_draft, device=device)[:, None]
    words = torch.arange(-(-num_draft // WORD), device=device)
    seen = (rows + 1 - WORD * words).clamp(0, WORD)  # [Q, W] bits set in each word, from the lowest up
    # A shift by the width of a word is undefined: a full word is written as -1.
    bits = torch.where(seen == WORD, -1, (1 << seen.clamp(max=WORD - 1)) - 1)
    return bits.repeat(num_requests, 1)


def merge_torch(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, plan: SplitPlan, out: torch.Tensor
) -> torch.Tensor:
    """Merge the chunks of each request that has several; PyTorch twin of ``merge``, same arguments and result."""
    num_draft = _checked_merge(partial_out, partial_lse, plan, out)
    for b, (first, count) in enumerate(zip(plan.first_slot.tolist(), plan.num_chunks.tolist(), strict=True)):
        if count > 1:
            lse = partial_lse[first : first + count].float()  # [chunks, Q, HQ]
            weight = torch.exp2(lse - lse.amax(0))[..., None]
            merged = (partial_out[first : first + count].float() * weight).sum(0) / weight.sum(0)
            out[b * num_draft : (b + 1) * num_draft] = merged.to(out.dtype)
    return out


def _checked_plan(
    kv_indptr: torch.Tensor, target: int, min_chunk: int, batch_invariant: bool, out: SplitPlan | None
) -> SplitPlan:
    """Check every argument against the docstring of ``plan_splits`` and return the buffers to fill."""
    problems = _problems_of_indptr(kv_indptr)
    if target < 1:
        problems.append(f"target: got {target}; expected at least 1 chunk. Ask for as many as the device runs at once.")
    if min_chunk < TILE or min_chunk % TILE:
        problems.append(f"min_chunk: got {min_chunk} keys; expected a positive multiple of {TILE}. Round it up.")
    if problems:
        raise ValueError("\n".join(problems))
    fresh = allocate_plan(len(kv_indptr) - 1, target=target, batch_invariant=batch_invariant, device=kv_indptr.device)
    if out is None:
        return fresh
    for name in ("slot_request", "num_chunks", "first_slot"):
        got, want = getattr(out, name), getattr(fresh, name)
        if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
            problems.append(
                f"out.{name}: got {describe(got)}; expected {describe(want)}."
                " Allocate it with `allocate_plan` for this batch size and target."
            )
    if problems:
        raise ValueError("\n".join(problems))
    return out


def _problems_of_indptr(kv_indptr: torch.Tensor) -> list[str]:
    if kv_indptr.dim() != 1 or kv_indptr.dtype != torch.int32 or len(kv_indptr) < 2 or not kv_indptr.is_contiguous():
        return [
            f"kv_indptr: got {describe(kv_indptr)}; expected a contiguous vector of B + 1 int32 offsets for B >= 1."
            " Cut SGLang's buffer to the batch."
        ]
    return []


def _checked_bits(
    mask: torch.Tensor, kv_indptr: torch.Tensor, num_draft: int, layout: str, out: torch.Tensor | None
) -> torch.Tensor:
    """Check every argument against the docstring of ``pack_mask`` and return the buffer to fill."""
    problems = _problems_of_indptr(kv_indptr)
    if layout not in get_args(MaskLayout):
        problems.append(
            f"layout: got {layout!r}; expected one of {', '.join(get_args(MaskLayout))}."
            " Name the layout that SGLang builds."
        )
    if num_draft < 1:
        problems.append(f"num_draft: got {num_draft}; expected at least 1 draft token. Pass the rows of a request.")
    if problems:
        raise ValueError("\n".join(problems))
    rows = (len(kv_indptr) - 1) * num_draft
    # A FULL_MASK holds more than this; how much more is known to the device alone.
    if mask.dim() != 1 or mask.element_size() != 1 or not mask.is_contiguous() or mask.numel() < rows * num_draft:
        problems.append(
            f"mask: got {describe(mask)}; expected a contiguous vector of at least {rows * num_draft} cells of one byte"
            f" for {rows} rows of {num_draft} draft tokens. Pass SGLang's tree mask as it is."
        )
    shape = (rows, -(-num_draft // WORD))
    problems += devices_that_differ(kv_indptr.device, {"mask": mask, "out": out}, "kv_indptr")
    if out is not None and (tuple(out.shape) != shape or out.dtype != torch.int64 or not out.is_contiguous()):
        problems.append(
            f"out: got {describe(out)}; expected contiguous {list(shape)} int64. Allocate it for these rows."
        )
    if problems:
        raise ValueError("\n".join(problems))
    return torch.empty(shape, dtype=torch.int64, device=mask.device) if out is None else out


def _checked_merge(partial_out: torch.Tensor, partial_lse: torch.Tensor, plan: SplitPlan, out: torch.Tensor) -> int:
    """Check every argument against the docstring of ``merge`` and return Q."""
    problems: list[str] = []
    slots, requests = len(plan.slot_request), len(plan.num_chunks)
    if out.dim() != 3 or out.shape[0] % requests or out.stride(2) != 1:
        raise ValueError(
            f"out: got {describe(out)}; expected [T, HQ, DV] for {requests} requests, last axis contiguous."
            " Allocate it for these rows."
        )
    num_draft, heads, width = out.shape[0] // requests, out.shape[1], out.shape[2]
    for name, t, shape in (
        ("partial_out", partial_out, (slots, num_draft, heads, width)),
        ("partial_lse", partial_lse, (slots, num_draft, heads)),
    ):
        if tuple(t.shape) != shape or not t.is_contiguous():
            problems.append(f"{name}: got {describe(t)}; expected contiguous {list(shape)}. Allocate it for this plan.")
    named = {"partial_out": partial_out, "partial_lse": partial_lse, "plan": plan.slot_request}
    problems += devices_that_differ(out.device, named, "out")
    if problems:
        raise ValueError("\n".join(problems))
    return num_draft


@triton.jit
def _plan_kernel(
    KV_INDPTR,
    SLOT_REQUEST,
    NUM_CHUNKS,
    FIRST_SLOT,
    num_requests,
    num_slots,
    target,
    MIN_TILES: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    # One program per request, and a last one for the slots that are left over. Each adds up all lengths again: that is
    # cheaper than a second launch.
    i_b = tl.program_id(0)
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < num_requests
    lengths = tl.load(KV_INDPTR + o_b + 1, mask=m_b, other=0) - tl.load(KV_INDPTR + o_b, mask=m_b, other=0)
    tiles = (lengths + TILE - 1) // TILE
    if BATCH_INVARIANT:
        share = (tiles + target - 1) // target
    else:
        share = (tl.zeros_like(tiles) + tl.sum(tiles, 0) + target - 1) // target
    share = tl.maximum(share, MIN_TILES)
    chunks = tl.where(m_b, tl.maximum((tiles + share - 1) // share, 1), 0)
    first = tl.sum(tl.where(o_b < i_b, chunks, 0), 0)
    count = tl.sum(tl.where(o_b == i_b, chunks, 0), 0)
    end = first + count
    owner = i_b
    if i_b < num_requests:
        tl.store(NUM_CHUNKS + i_b, count)
        tl.store(FIRST_SLOT + i_b, first)
    else:
        end = num_slots
        owner = -1
    for slot in range(first, end, BLOCK_SLOTS):
        o_slot = slot + tl.arange(0, BLOCK_SLOTS)
        tl.store(SLOT_REQUEST + o_slot, tl.zeros_like(o_slot) + owner, mask=o_slot < end)


@triton.jit
def _pack_mask_kernel(
    MASK,
    KV_INDPTR,
    BITS,
    num_draft,
    FULL: tl.constexpr,
    WORDS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    i_b = tl.program_id(0)
    i_w = tl.program_id(1)
    o_row = tl.arange(0, BLOCK_Q)
    o_bit = tl.arange(0, WORD)
    o_column = i_w * WORD + o_bit
    keep = (o_row < num_draft)[:, None] & (o_column < num_draft)[None, :]
    offset = (i_b.to(tl.int64) * num_draft + o_row[:, None]) * num_draft + o_column[None, :]
    if FULL:
        start = tl.load(KV_INDPTR + i_b).to(tl.int64)
        length = tl.load(KV_INDPTR + i_b + 1).to(tl.int64) - start
        offset += num_draft * start + (o_row[:, None] + 1) * length
    sees = tl.load(MASK + offset, mask=keep, other=0) != 0
    one = tl.full([1], 1, tl.int64)
    word = tl.where(sees, one << o_bit.to(tl.int64)[None, :], 0)
    # Every bit stands in one column, so the sum is their union.
    row = i_b * num_draft + o_row
    tl.store(BITS + row * WORDS + i_w, tl.sum(word, 1), mask=o_row < num_draft)


@triton.jit
def chunk_bounds(KV_INDPTR, NUM_CHUNKS, FIRST_SLOT, i_b, i_slot, TILE: tl.constexpr):
    """Give chunk number, number of chunks, start of the request in ``kv_indptr``, first and last key of the chunk."""
    chunks = tl.load(NUM_CHUNKS + i_b)
    i_c = i_slot - tl.load(FIRST_SLOT + i_b)
    start = tl.load(KV_INDPTR + i_b)
    length = tl.load(KV_INDPTR + i_b + 1) - start
    tiles = (length + TILE - 1) // TILE
    # Shares that differ by one tile at most. Tiles times chunks fits 32 bits: 2^21 tiles are 128 million keys.
    lo = (tiles * i_c // chunks) * TILE
    hi = tl.minimum((tiles * (i_c + 1) // chunks) * TILE, length)
    return i_c, chunks, start, lo, hi


@triton.jit
def online_softmax_step(scores, keep, v, top, total, acc, HIDES: tl.constexpr):
    """Add a tile of keys to the running maximum, sum and weighted values of each row; scores are in base 2.

    Hidden keys score -1e30; maxima start there or above, finite: nowhere is infinity taken from infinity. HIDES: a row
    whose maximum is -1e30 still may see none of a tile, and would weigh each hidden key with 2^0 until it sees one.
    """
    scores = tl.where(keep, scores, -1.0e30)
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(scores - new_top[:, None])
    if HIDES:
        weight = tl.where(keep, weight, 0.0)
    total = total * fade + tl.sum(weight, 1)
    # "ieee" concerns float32 alone, which would be rounded to tf32.
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _merge_kernel(
    PARTIAL_OUT,
    PARTIAL_LSE,
    OUT,
    NUM_CHUNKS,
    FIRST_SLOT,
    stride_out_t,
    stride_out_h,
    num_draft,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    i_t = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_dv = tl.arange(0, BLOCK_DV)
    m_h = o_h < HQ
    m_out = m_h[:, None] & (o_dv < DV)[None, :]
    i_b = i_t // num_draft
    chunks = tl.load(NUM_CHUNKS + i_b)
    # A request with one chunk was written by that chunk.
    if chunks > 1:
        slot = tl.load(FIRST_SLOT + i_b)
        top = tl.full([BLOCK_H], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
        for i_c in range(0, chunks):
            row = ((slot + i_c) * num_draft + i_t % num_draft).to(tl.int64) * HQ + o_h
            lse = tl.load(PARTIAL_LSE + row, mask=m_h, other=-1.0e30)
            part = tl.load(PARTIAL_OUT + row[:, None] * DV + o_dv[None, :], mask=m_out, other=0.0).to(tl.float32)
            new_top = tl.maximum(top, lse)
            fade = tl.exp2(top - new_top)
            weight = tl.exp2(lse - new_top)
            acc = acc * fade[:, None] + part * weight[:, None]
            total = total * fade + weight
            top = new_top
        acc = acc / tl.where(m_h, total, 1.0)[:, None]
        p_out = OUT + i_t.to(tl.int64) * stride_out_t + o_h.to(tl.int64)[:, None] * stride_out_h + o_dv[None, :]
        tl.store(p_out, acc.to(OUT.dtype.element_ty), mask=m_out)


def plan_splits(
    kv_indptr: torch.Tensor,
    *,
    target: int,
    min_chunk: int = 256,
    batch_invariant: bool = False,
    out: SplitPlan | None = None,
) -> SplitPlan:
    """Cut the committed KV of a batch into chunks of nearly equal size, on the device.

    One launch per step; every layer with the same ``kv_indptr`` shares the result.

    Args:
        kv_indptr: [B + 1] int32 offsets of the requests' committed tokens; a request may have none.
        target: number of chunks the batch is cut into (B more at most), such that they fill the device once.
        min_chunk: fewest keys of a chunk, a multiple of ``TILE``: below it partial results cost more than they gain.
        batch_invariant: cut each request by its own length alone, into at most ``target`` chunks, so that its result
            has the same bits in every batch. Long requests beside short ones then balance worse.
        out: buffers of ``allocate_plan`` with the same arguments, for CUDA graphs.

    Returns:
        The plan.

    Raises:
        ValueError: a shape, dtype, device or number differs from the above; names the argument.
    """
    plan = _checked_plan(kv_indptr, target, min_chunk, batch_invariant, out)
    num_requests = len(kv_indptr) - 1
    _plan_kernel[(num_requests + 1,)](
        kv_indptr,
        plan.slot_request,
        plan.num_chunks,
        plan.first_slot,
        num_requests,
        len(plan.slot_request),
        target,
        MIN_TILES=min_chunk // TILE,
        BATCH_INVARIANT=batch_invariant,
        TILE=TILE,
        BLOCK_B=triton.next_power_of_2(num_requests),
        BLOCK_SLOTS=32,
        num_warps=1,
    )
    return plan


def pack_mask(
    mask: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_draft: int,
    *,
    layout: MaskLayout = "qlen_only",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack SGLang's tree mask into ancestor bits: bit j of word w of row i says that token i sees token 64w + j.

    Args:
        mask: contiguous bool, int8 or uint8 cells, more than needed allowed. ``qlen_only``: [B*Q*Q]. ``full``: for each
            request [Q, S + Q] with S its committed tokens, one after the other; the S columns of the context are not
            read.
        kv_indptr: [B + 1] int32 offsets of all committed tokens (of no window), as the mask was built with.
        num_draft: Q.
        layout: which of SGLang's two layouts ``mask`` has.
        out: optional [T, W] int64 buffer.

    Returns:
        [T, W] int64, W = ceil(Q / 64).

    Raises:
        ValueError: a shape, dtype or device differs from the above; names the argument.
    """
    bits = _checked_bits(mask, kv_indptr, num_draft, layout, out)
    _pack_mask_kernel[(len(kv_indptr) - 1, bits.shape[1])](
        mask.view(torch.int8),
        kv_indptr,
        bits,
        num_draft,
        FULL=layout == "full",
        WORDS=bits.shape[1],
        WORD=WORD,
        BLOCK_Q=triton.next_power_of_2(num_draft),
        num_warps=4,
    )
    return bits


def merge(partial_out: torch.Tensor, partial_lse: torch.Tensor, plan: SplitPlan, out: torch.Tensor) -> torch.Tensor:
    """Merge the chunks of each request that has several; leave the rows of the others alone.

    Args:
        partial_out: [slots, Q, HQ, DV] floating point, contiguous; slots without work are not read.
        partial_lse: [slots, Q, HQ] float32 log-sum-exp in base 2, contiguous; -1e30 where a row sees nothing.
        plan: the plan that the chunks were computed with.
        out: [T, HQ, DV], last axis contiguous; written in place.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or device differs from the above; names the argument.
    """
    num_draft = _checked_merge(partial_out, partial_lse, plan, out)
    rows, heads, width = out.shape
    block_h = min(4, triton.next_power_of_2(heads))
    _merge_kernel[(rows, triton.cdiv(heads, block_h))](
        partial_out,
        partial_lse,
        out,
        plan.num_chunks,
        plan.first_slot,
        out.stride(0),
        out.stride(1),
        num_draft,
        HQ=heads,
        DV=width,
        BLOCK_H=block_h,
        BLOCK_DV=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out
