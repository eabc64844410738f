"""Attend draft trees over paged committed latents, for MLA targets (DeepSeek, Kimi) in the absorbed form.

All query heads share one latent row per token, which is key and value at once. Row i of request b sees every committed
token of b and, of the draft tokens, itself and its ancestors:

    out_i = sum_j p_ij c_j / sum_j p_ij,    p_ij = exp(scale (q_i . c_j + q_pe_i . k_pe_j)),

where a query is [q | q_pe] (the first already multiplied by the absorbed key weight) and a latent row is [c | k_pe].
Committed rows are times ``kv_scale``, draft rows as they are. The value up-projection is not applied.

Dimensions: B requests, Q draft tokens per request, T = B*Q rows, HQ query heads of this rank, C latent width, R rotary
width, W = ceil(Q/64) words of ancestor bits, S committed tokens.
Layouts: queries, draft and pool rows of any stride with a contiguous last axis; a pool of any number of slots (64-bit
addresses); pages of any power of two.
Contract: close. Products of q's dtype summed in float32 (float32 itself multiplies exactly, never in tf32), softmax in
float32, its weights rounded to q's dtype for the second product, one rounding at the end. FP8 latents are widened to
q's dtype. Where q is bfloat16, a request has several chunks and Q*HQ is 64 or more, the results of the chunks are kept
in float16, as in float32 they would be as many bytes as the latents: eight times finer than bfloat16, for latents
below 65504, which those of MLA are, being RMS-normalised. Sums run over the keys of a chunk in ascending order, then
over chunks in ascending order.
CUDA graphs: lengths, slots, bits and plan are read on the device; the grid follows from shapes alone.
Launches: two per layer. The first reads every latent byte once per tile of ``block_m`` rows (a row is a draft token
with one head), values included, and of masks only the ancestor bits; the second merges the chunks.
Does not: write to the pool, apply rotary embeddings, windows, logit caps or sinks (no MLA target has them).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from sglang_eagle3_ext.kernels.arch import TreeVerifyLaunch, arch_of, tree_verify_mla_launch
from sglang_eagle3_ext.kernels.arguments import (
    buffer_that_differs,
    describe,
    devices_that_differ,
    rows_that_are_not_contiguous,
)
from sglang_eagle3_ext.kernels.split_merge import TILE, WORD, SplitPlan, chunk_bounds, merge, online_softmax_step
from sglang_eagle3_ext.kernels.tree_verify_gqa import KV_DTYPES, tree_verify_gqa_torch

LOG2E = math.log2(math.e)
HALF_PARTIALS_FROM = 64
"""Rows of a request (Q*HQ) from which on the results of chunks are kept in float16, for queries in bfloat16."""


def tree_verify_mla_torch(
    q: torch.Tensor,
    latent_draft: torch.Tensor,
    latent_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_slots: torch.Tensor,
    ancestors: torch.Tensor,
    plan: SplitPlan,
    *,
    latent_width: int,
    scale: float,
    kv_scale: float = 1.0,
    page_size: int = 1,
    page_indptr: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: TreeVerifyLaunch | None = None,
) -> torch.Tensor:
    """Attend draft trees in float32 PyTorch: the twin of ``tree_verify_mla``, same arguments and result.

    Absorbed MLA is attention with one kv head, whose value is the front of its key. ``plan`` and ``launch`` say how to
    divide the work and change nothing here.
    """
    _validate(
        q, latent_draft, latent_pool, kv_indptr, kv_slots, ancestors, plan, latent_width, page_size, page_indptr, out
    )
    k_draft, k_pool = latent_draft[:, None], latent_pool[:, None]  # [T, 1, C + R], [slots, 1, C + R]
    return tree_verify_gqa_torch(
        q,
        k_draft,
        k_draft[..., :latent_width],
        k_pool,
        k_pool[..., :latent_width],
        kv_indptr,
        kv_slots,
        ancestors,
        plan,
        scale=scale,
        k_scale=kv_scale,
        v_scale=kv_scale,
        page_size=page_size,
        page_indptr=page_indptr,
        out=out,
    )


def _validate(
    q: torch.Tensor,
    latent_draft: torch.Tensor,
    latent_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_slots: torch.Tensor,
    ancestors: torch.Tensor,
    plan: SplitPlan,
    latent_width: int,
    page_size: int,
    page_indptr: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check every argument against the docstring of the public function."""
    problems: list[str] = []
    if q.dim() != 3 or q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.numel():
        problems.append(
            f"q: got {describe(q)}; expected [T, HQ, C + R] in float16, bfloat16 or float32."
            " Pass a row per draft token."
        )
    if kv_indptr.dim() != 1 or kv_indptr.dtype != torch.int32 or len(kv_indptr) < 2:
        problems.append(
            f"kv_indptr: got {describe(kv_indptr)}; expected a vector of B + 1 int32 offsets for B >= 1."
            " Cut SGLang's buffer to the batch."
        )
    if problems:
        raise ValueError("\n".join(problems))
    (rows, heads, width), requests = q.shape, len(kv_indptr) - 1
    num_draft, rope_width = rows // requests, width - latent_width
    if rows % requests:
        problems.append(
            f"q: got {rows} rows for {requests} requests; expected the same number of draft tokens for each."
            " Cut kv_indptr to the batch."
        )
    for name, part, least in (("latent_width", latent_width, 32), ("q", rope_width, 16)):
        if part < least or part & (part - 1):
            problems.append(
                f"{name}: got C = {latent_width} and R = {rope_width}; expected powers of two from 32 and 16 on,"
                f" which together are the width of q, {width}. Check kv_lora_rank and qk_rope_head_dim."
            )
            break
    dtype = str(q.dtype).removeprefix("torch.")
    if tuple(latent_draft.shape) != (rows, width) or latent_draft.dtype != q.dtype:
        problems.append(
            f"latent_draft: got {describe(latent_draft)}; expected [{rows}, {width}] in {dtype}, as q has."
            " Pass the latent and the rotated key of each draft token."
        )
    if latent_pool.dim() != 2 or latent_pool.shape[1] != width or latent_pool.dtype not in (q.dtype, *KV_DTYPES):
        problems.append(
            f"latent_pool: got {describe(latent_pool)}; expected [slots, {width}] in {dtype} or fp8."
            " View a pool of [slots, 1, C + R] without its second axis."
        )
    problems += rows_that_are_not_contiguous(
        {"q": q, "latent_draft": latent_draft, "latent_pool": latent_pool, "kv_slots": kv_slots, "ancestors": ancestors}
        | {"kv_indptr": kv_indptr, "out": out},
        whole=("kv_slots", "ancestors", "kv_indptr", "out"),
    )
    if kv_slots.dim() != 1 or kv_slots.dtype not in (torch.int32, torch.int64):
        problems.append(
            f"kv_slots: got {describe(kv_slots)}; expected a vector of int32 or int64 numbers."
            " Pass the numbers of the keys' slots."
        )
    words = -(-num_draft // WORD)
    if tuple(ancestors.shape) != (rows, words) or ancestors.dtype != torch.int64:
        problems.append(
            f"ancestors: got {describe(ancestors)}; expected [{rows}, {words}] int64."
            " Make them with `pack_mask` or `chain_bits`."
        )
    if len(plan.num_chunks) != requests:
        problems.append(
            f"plan: got one for {len(plan.num_chunks)} requests; expected {requests}. Make it from this kv_indptr."
        )
    if page_size < 1 or page_size & (page_size - 1):
        problems.append(f"page_size: got {page_size}; expected a power of two. Pass SGLang's page size.")
    if page_size > 1 and page_indptr is None:
        problems.append(
            "page_indptr: got nothing; expected the offsets of the requests' pages, as a page has several tokens."
            " Pass them."
        )
    if page_indptr is not None and (tuple(page_indptr.shape) != (requests + 1,) or page_indptr.dtype != torch.int32):
        problems.append(
            f"page_indptr: got {describe(page_indptr)}; expected [{requests + 1}] int32."
            " Count the pages before each request."
        )
    problems += buffer_that_differs(out, (rows, heads, latent_width), q, "out")
    named = {"latent_draft": latent_draft, "latent_pool": latent_pool, "kv_indptr": kv_indptr, "kv_slots": kv_slots}
    named |= {"ancestors": ancestors, "plan": plan.slot_request}
    problems += devices_that_differ(q.device, named | {"page_indptr": page_indptr}, "q")
    if problems:
        raise ValueError("\n".join(problems))


@triton.jit
def _load_latents(p_rows, p_columns, m_row, C: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr):
    """Load a tile of rows once: c as [rows, C] for both products, k_pe as [R, rows]."""
    c = tl.load(p_rows + tl.arange(0, C)[None, :], mask=m_row[:, None], other=0.0).to(DTYPE)
    k_pe = tl.load(p_columns + C + tl.arange(0, R)[:, None], mask=m_row[None, :], other=0.0).to(DTYPE)
    return c, k_pe


@triton.jit
def _scores_log2(q, q_pe, c, k_pe, inner):
    """Give the scores of a tile of latents, times log2(e): ``inner (q.c + q_pe.k_pe)``."""
    # The short product first: in the other order a Hopper block runs out of registers. "ieee" concerns float32 alone,
    # which would be rounded to tf32.
    scores = tl.dot(q_pe, k_pe, input_precision="ieee")
    return tl.dot(q, tl.trans(c), scores, input_precision="ieee") * inner


@triton.jit
def _tree_verify_mla_kernel(
    Q,
    LATENT_DRAFT,
    LATENT_POOL,
    KV_INDPTR,
    KV_SLOTS,
    PAGE_INDPTR,
    ANCESTORS,
    SLOT_REQUEST,
    NUM_CHUNKS,
    FIRST_SLOT,
    PARTIAL_OUT,
    PARTIAL_LSE,
    OUT,
    stride_q_t,
    stride_q_h,
    stride_draft_t,
    stride_pool_s,
    num_draft,
    inner,
    kv_scale,
    HQ: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Tiles of rows are the fastest axis: those that share latents run side by side and find them in the cache.
    i_slot = tl.program_id(1)
    i_b = tl.load(SLOT_REQUEST + i_slot)
    if i_b >= 0:
        i_c, chunks, start, lo, hi = chunk_bounds(KV_INDPTR, NUM_CHUNKS, FIRST_SLOT, i_b, i_slot, TILE)
        o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = o_row < num_draft * HQ
        o_c = tl.arange(0, C)
        o_key = tl.arange(0, BLOCK_S)
        i_t = (i_b * num_draft + o_row // HQ).to(tl.int64)
        p_q = Q + (i_t * stride_q_t + (o_row % HQ).to(tl.int64) * stride_q_h)[:, None]
        q = tl.load(p_q + o_c[None, :], mask=m_row[:, None], other=0.0)
        q_pe = tl.load(p_q + C + tl.arange(0, R)[None, :], mask=m_row[:, None], other=0.0)
        # Above what hidden keys score: their weight is 0 even where a row has seen nothing yet.
        top = tl.full([BLOCK_M], -5.0e29, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, C], tl.float32)
        if PAGE > 1:
            start = tl.load(PAGE_INDPTR + i_b)

        for i_s in tl.range(lo, hi, BLOCK_S, num_stages=STAGES):
            key = i_s + o_key
            m_key = key < hi
            slot = tl.load(KV_SLOTS + start + key // PAGE, mask=m_key, other=0).to(tl.int64) * PAGE + key % PAGE
            p_latent = LATENT_POOL + slot * stride_pool_s
            c, k_pe = _load_latents(p_latent[:, None], p_latent[None, :], m_key, C, R, q.dtype)
            scores = _scores_log2(q, q_pe, c, k_pe, inner * kv_scale)
            top, total, acc = online_softmax_step(scores, m_key[None, :], c, top, total, acc, HIDES=False)
        acc *= kv_scale

        if i_c == chunks - 1:
            # The last chunk also does the draft tokens.
            for i_d in tl.range(0, num_draft, BLOCK_S, num_stages=STAGES):
                o_draft = i_d + o_key
                m_draft = o_draft < num_draft
                bits = tl.load(ANCESTORS + i_t * WORDS + i_d // WORD, mask=m_row, other=0)
                keep = (((bits[:, None] >> (o_draft % WORD).to(tl.int64)[None, :]) & 1) != 0) & m_draft[None, :]
                p_latent = LATENT_DRAFT + (i_b * num_draft + o_draft).to(tl.int64) * stride_draft_t
                c, k_pe = _load_latents(p_latent[:, None], p_latent[None, :], m_draft, C, R, q.dtype)
                scores = _scores_log2(q, q_pe, c, k_pe, inner)
                top, total, acc = online_softmax_step(scores, keep, c, top, total, acc, HIDES=False)

        acc *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
        if chunks == 1:
            p_out = OUT + (i_b.to(tl.int64) * num_draft * HQ + o_row)[:, None] * C + o_c[None, :]
            tl.store(p_out, acc.to(OUT.dtype.element_ty), mask=m_row[:, None])
        else:
            row = i_slot.to(tl.int64) * num_draft * HQ + o_row
            p_partial = PARTIAL_OUT + row[:, None] * C + o_c[None, :]
            tl.store(p_partial, acc.to(PARTIAL_OUT.dtype.element_ty), mask=m_row[:, None])
            lse = tl.where(total > 0.0, top + tl.log2(total), -1.0e30)
            tl.store(PARTIAL_LSE + row, lse, mask=m_row)


def tree_verify_mla(
    q: torch.Tensor,
    latent_draft: torch.Tensor,
    latent_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_slots: torch.Tensor,
    ancestors: torch.Tensor,
    plan: SplitPlan,
    *,
    latent_width: int,
    scale: float,
    kv_scale: float = 1.0,
    page_size: int = 1,
    page_indptr: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: TreeVerifyLaunch | None = None,
) -> torch.Tensor:
    """Attend each draft token to its request's committed latents and to its own ancestors.

    Two launches. Scratch of ``slots * Q * HQ * (C + 1)`` elements is allocated per call.

    Args:
        q: [T, HQ, C + R], float16, bfloat16 or float32: the query times the absorbed key weight, then the rotary query;
            a request's rows stand together.
        latent_draft: [T, C + R], q's dtype: the latents and rotary keys of the draft tokens, not read from the pool.
        latent_pool: [slots, C + R], q's dtype or fp8 (e4m3fn needs compute capability 8.9).
        kv_indptr: [B + 1] int32 offsets of the requests' committed tokens; none is allowed.
        kv_slots: int32 or int64. Page size 1: the slot of each committed token, at its offset in ``kv_indptr``.
            Above: the number of each page, at its offset in ``page_indptr``. Entries past a request's end are not read.
        ancestors: [T, W] int64 of ``pack_mask`` or ``chain_bits``.
        plan: of ``plan_splits`` for this ``kv_indptr``.
        latent_width: C, a power of two from 32 on (``kv_lora_rank``); R is what is left, a power of two from 16 on.
        scale: factor of the scores before softmax (natural, not base 2).
        kv_scale: what rows of the pool are to be multiplied with.
        page_size: tokens per page; the token at offset t of a page has slot ``page * page_size + t``.
        page_indptr: [B + 1] int32 offsets of the requests' pages; needed above page size 1.
        out: optional contiguous [T, HQ, C] buffer in q's dtype.
        launch: tile and pipeline; default from ``kernels.arch``.

    Returns:
        [T, HQ, C] in q's dtype: attention over latents, before the value up-projection.

    Raises:
        ValueError: a shape, dtype, device, stride or number differs from the above; names the argument.
    """
    _validate(
        q, latent_draft, latent_pool, kv_indptr, kv_slots, ancestors, plan, latent_width, page_size, page_indptr, out
    )
    rows, heads, width = q.shape
    num_draft, slots = rows // (len(kv_indptr) - 1), len(plan.slot_request)
    launch = launch or tree_verify_mla_launch(
        num_draft * heads, arch=arch_of(q.device), itemsize=q.element_size(), kv_itemsize=latent_pool.element_size()
    )
    halve = q.dtype == torch.bfloat16 and num_draft * heads >= HALF_PARTIALS_FROM
    partial_dtype = torch.float16 if halve else torch.float32
    out = torch.empty(rows, heads, latent_width, dtype=q.dtype, device=q.device) if out is None else out
    partial_out = torch.empty(slots, num_draft, heads, latent_width, dtype=partial_dtype, device=q.device)
    partial_lse = torch.empty(slots, num_draft, heads, dtype=torch.float32, device=q.device)
    _tree_verify_mla_kernel[(triton.cdiv(num_draft * heads, launch.block_m), slots)](
        q,
        latent_draft,
        latent_pool,
        kv_indptr,
        kv_slots,
        kv_indptr if page_indptr is None else page_indptr,
        ancestors,
        plan.slot_request,
        plan.num_chunks,
        plan.first_slot,
        partial_out,
        partial_lse,
        out,
        q.stride(0),
        q.stride(1),
        latent_draft.stride(0),
        latent_pool.stride(0),
        num_draft,
        LOG2E * scale,
        kv_scale,
        HQ=heads,
        C=latent_width,
        R=width - latent_width,
        PAGE=page_size,
        WORDS=ancestors.shape[1],
        TILE=TILE,
        WORD=WORD,
        BLOCK_M=launch.block_m,
        BLOCK_S=launch.block_s,
        STAGES=launch.stages,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return merge(partial_out, partial_lse, plan, out)
