"""Attend draft trees over paged committed KV, for MHA and GQA targets.

Row i of request b sees every committed token of b and, of the draft tokens, itself and its ancestors:

    out_i = sum_j p_ij v_j / sum_j p_ij,    p_ij = exp(cap(scale k_scale q_i . k_j)),

over the committed tokens (values times ``v_scale``) and over the draft tokens that the ancestor bits of i name (their
keys and values as they are), where cap(x) = logit_cap tanh(x / logit_cap). An attention sink adds exp(sink) below the
bar; a sliding window hides committed tokens that stand more than ``window`` positions before row i, whose position is
the length of the context plus its depth in the tree.

Dimensions: B requests, Q draft tokens per request, T = B*Q rows, HQ query heads, HKV kv heads, G = HQ/HKV, D and DV
head widths, W = ceil(Q/64) words of ancestor bits, S committed tokens.
Layouts: any strides but a contiguous last axis; pools of any number of slots (64-bit addresses); pages of any
power of two.
Contract: close. Products of q's dtype summed in float32 (float32 itself multiplies exactly, never in tf32), softmax in
float32, its weights rounded to q's dtype for the second product, one rounding at the end. FP8 keys and values are
widened to q's dtype. Sums run over the keys of a chunk in ascending order, then over chunks in ascending order.
CUDA graphs: lengths, slots, bits and plan are read on the device; the grid follows from shapes alone.
Launches: two per layer. The first reads every byte of KV once per kv head and tile of ``block_m`` rows (a row is a
draft token with one head of the group), and of masks only the ancestor bits; the second merges the chunks.
Does not: write to the pool, apply rotary embeddings, hide draft tokens behind the window (it has to hold them all).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from sglang_eagle3_ext.kernels.arch import TreeVerifyLaunch, arch_of, tree_verify_gqa_launch
from sglang_eagle3_ext.kernels.arguments import describe, devices_that_differ, store
from sglang_eagle3_ext.kernels.split_merge import TILE, WORD, SplitPlan, chunk_bounds, merge, online_softmax_step

LOG2E = math.log2(math.e)
KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of a pool beside that of the queries."""


def tree_verify_gqa_torch(
    q: torch.Tensor,
    k_draft: torch.Tensor,
    v_draft: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_slots: torch.Tensor,
    ancestors: torch.Tensor,
    plan: SplitPlan,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    page_indptr: torch.Tensor | None = None,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: TreeVerifyLaunch | None = None,
) -> torch.Tensor:
    """Attend draft trees in float32 PyTorch: the twin of ``tree_verify_gqa``, same arguments and result.

    ``plan`` and ``launch`` say how to divide the work and change nothing here.
    """
    _validate(
        q, k_draft, v_draft, k_pool, v_pool, kv_indptr, kv_slots, ancestors, plan,
        page_size, page_indptr, window, logit_cap, sinks, out,
    )  # fmt: skip
    group = q.shape[1] // k_draft.shape[1]
    num_draft = q.shape[0] // (len(kv_indptr) - 1)
    bit = torch.arange(num_draft, device=q.device)
    sees_draft = (ancestors[:, bit // WORD] >> (bit % WORD)) & 1 != 0  # [T, Q]
    depth = sees_draft.sum(1) - 1
    starts = (kv_indptr if page_size == 1 or page_indptr is None else page_indptr).tolist()
    result = torch.empty(*q.shape[:2], v_draft.shape[2], dtype=q.dtype, device=q.device)
    for b, length in enumerate(kv_indptr.diff().tolist()):
        rows = slice(b * num_draft, (b + 1) * num_draft)
        key = torch.arange(length, device=q.device)
        slots = kv_slots[starts[b] + key // page_size].long() * page_size + key % page_size
        sees = torch.ones(num_draft, length, dtype=torch.bool, device=q.device)
        if window is not None:
            sees = key >= (length + depth[rows] - window)[:, None]
        sees = torch.cat([sees, sees_draft[rows]], dim=1)  # [Q, S + Q]
        k = torch.cat([k_pool[slots].float() * k_scale, k_draft[rows].float()]).repeat_interleave(group, dim=1)
        v = torch.cat([v_pool[slots].float() * v_scale, v_draft[rows].float()]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,shd->hqs", q[rows].float(), k) * scale
        if logit_cap:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = scores.masked_fill(~sees, float("-inf"))
        if sinks is not None:  # one more key, whose value is nothing
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, num_draft, 1)], dim=2)
        weight = scores.softmax(-1)[..., : length + num_draft]
        result[rows] = torch.einsum("hqs,shd->qhd", weight, v).to(q.dtype)
    return store(result, out, "out")


def _validate(
    q: torch.Tensor,
    k_draft: torch.Tensor,
    v_draft: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_slots: torch.Tensor,
    ancestors: torch.Tensor,
    plan: SplitPlan,
    page_size: int,
    page_indptr: torch.Tensor | None,
    window: int | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check every argument against the docstring of the public function."""
    problems: list[str] = []
    if q.dim() != 3 or q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.numel():
        problems.append(
            f"q: got {describe(q)}; expected [T, HQ, D] in float16, bfloat16 or float32. Pass a row per draft token."
        )
    if kv_indptr.dim() != 1 or kv_indptr.dtype != torch.int32 or len(kv_indptr) < 2 or kv_indptr.stride(0) != 1:
        problems.append(
            f"kv_indptr: got {describe(kv_indptr)}; expected a contiguous vector of B + 1 int32 offsets for B >= 1."
            " Cut SGLang's buffer to the batch."
        )
    if problems:
        raise ValueError("\n".join(problems))
    (rows, heads, width), requests = q.shape, len(kv_indptr) - 1
    num_draft = rows // requests
    if rows % requests:
        problems.append(
            f"q: got {rows} rows for {requests} requests; expected the same number of draft tokens for each."
            " Cut kv_indptr to the batch."
        )
    if k_draft.dim() != 3 or k_draft.shape[0] != rows or k_draft.shape[2] != width or heads % max(k_draft.shape[1], 1):
        problems.append(
            f"k_draft: got {describe(k_draft)}; expected [{rows}, HKV, {width}] with HKV a divisor of {heads}."
            " Pass a key per draft token."
        )
    kv_heads = k_draft.shape[1] if k_draft.dim() == 3 else 0
    if v_draft.dim() != 3 or tuple(v_draft.shape[:2]) != (rows, kv_heads):
        problems.append(
            f"v_draft: got {describe(v_draft)}; expected [{rows}, {kv_heads}, DV], a row beside each key."
            " Pass the values of these keys."
        )
    value_width = v_draft.shape[2] if v_draft.dim() == 3 else 0
    for name, pool, last in (("k_pool", k_pool, width), ("v_pool", v_pool, value_width)):
        if pool.dim() != 3 or tuple(pool.shape[1:]) != (kv_heads, last) or pool.dtype not in (q.dtype, *KV_DTYPES):
            dtype = str(q.dtype).removeprefix("torch.")
            problems.append(
                f"{name}: got {describe(pool)}; expected [slots, {kv_heads}, {last}] in {dtype} or fp8."
                " Pass the layer's buffer of SGLang's pool."
            )
    for name, t in (("k_draft", k_draft), ("v_draft", v_draft)):
        if t.dtype != q.dtype:
            problems.append(f"{name}: got {describe(t)}; expected {q.dtype}, as q has. Convert it.")
    for name, t in (("q", q), ("k_draft", k_draft), ("v_draft", v_draft), ("k_pool", k_pool), ("v_pool", v_pool)):
        if t.dim() == 3 and t.stride(2) != 1:
            problems.append(
                f"{name}: got a last axis of stride {t.stride(2)}; expected a contiguous one. Call .contiguous() once."
            )
    if kv_slots.dim() != 1 or kv_slots.dtype not in (torch.int32, torch.int64) or not kv_slots.is_contiguous():
        problems.append(
            f"kv_slots: got {describe(kv_slots)}; expected a contiguous vector of int32 or int64 numbers."
            " Pass the numbers of the keys' slots."
        )
    words = -(-num_draft // WORD)
    if tuple(ancestors.shape) != (rows, words) or ancestors.dtype != torch.int64 or not ancestors.is_contiguous():
        problems.append(
            f"ancestors: got {describe(ancestors)}; expected contiguous [{rows}, {words}] int64."
            " Make them with `pack_mask` or `chain_bits`."
        )
    if len(plan.num_chunks) != requests:
        problems.append(
            f"plan: got one for {len(plan.num_chunks)} requests; expected {requests}. Make it from this kv_indptr."
        )
    if page_size < 1 or page_size & (page_size - 1):
        problems.append(f"page_size: got {page_size}; expected a power of two. Pass SGLang's page size.")
    if page_indptr is None and page_size > 1:
        problems.append(
            "page_indptr: got nothing; expected the offsets of the requests' pages, as page_size is above 1. Pass them."
        )
    if page_indptr is not None and (tuple(page_indptr.shape) != (requests + 1,) or page_indptr.dtype != torch.int32):
        problems.append(
            f"page_indptr: got {describe(page_indptr)}; expected [{requests + 1}] int32."
            " Count the pages before each request."
        )
    if window is not None and window < num_draft - 1:
        problems.append(
            f"window: got {window} for {num_draft} draft tokens; expected at least {num_draft - 1}."
            " Draft fewer tokens, or leave this layer to stock."
        )
    if logit_cap < 0:
        problems.append(f"logit_cap: got {logit_cap}; expected 0 (none) or a positive number. Pass the target's.")
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not sinks.is_floating_point()):
        problems.append(
            f"sinks: got {describe(sinks)}; expected [{heads}], one logit per query head. Pass the layer's own."
        )
    if out is not None and (
        tuple(out.shape) != (rows, heads, value_width) or out.dtype != q.dtype or out.stride(2) != 1
    ):
        problems.append(
            f"out: got {describe(out)}; expected [{rows}, {heads}, {value_width}] in q's dtype, last axis contiguous."
            " Allocate it for these rows, or leave it out."
        )
    named = {
        "k_draft": k_draft, "v_draft": v_draft, "k_pool": k_pool, "v_pool": v_pool, "kv_indptr": kv_indptr,
        "kv_slots": kv_slots, "ancestors": ancestors, "plan": plan.slot_request, "page_indptr": page_indptr,
        "sinks": sinks, "out": out,
    }  # fmt: skip
    problems += devices_that_differ(q.device, named, "q")
    if problems:
        raise ValueError("\n".join(problems))


@triton.jit
def _scores_log2(q, k, inner, outer, HAS_CAP: tl.constexpr):
    """Give the scores of a tile of keys, times log2(e): ``inner q.k`` with its cap, where there is one."""
    # "ieee" concerns float32 alone, which would be rounded to tf32.
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * inner
    if HAS_CAP:
        # tanh by the one exponential that both the interpreter and every GPU have; it saturates at both ends.
        scores = outer * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def _tree_verify_gqa_kernel(
    Q,
    K_DRAFT,
    V_DRAFT,
    K_POOL,
    V_POOL,
    KV_INDPTR,
    KV_SLOTS,
    PAGE_INDPTR,
    ANCESTORS,
    SINKS,
    SLOT_REQUEST,
    NUM_CHUNKS,
    FIRST_SLOT,
    PARTIAL_OUT,
    PARTIAL_LSE,
    OUT,
    stride_q_t,
    stride_q_h,
    stride_kd_t,
    stride_kd_h,
    stride_vd_t,
    stride_vd_h,
    stride_k_s,
    stride_k_h,
    stride_v_s,
    stride_v_h,
    stride_out_t,
    stride_out_h,
    num_draft,
    inner,
    outer,
    k_scale,
    v_scale,
    window,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Tiles of rows are the fastest axis: those that share keys run side by side and find them in the cache.
    i_m = tl.program_id(0)
    i_hk = tl.program_id(1)
    i_slot = tl.program_id(2)
    i_b = tl.load(SLOT_REQUEST + i_slot)
    if i_b >= 0:
        i_c, chunks, start, lo, hi = chunk_bounds(KV_INDPTR, NUM_CHUNKS, FIRST_SLOT, i_b, i_slot, TILE)
        o_row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_token = o_row // G
        o_h = i_hk * G + o_row % G
        m_row = o_token < num_draft
        o_d = tl.arange(0, BLOCK_D)
        o_dv = tl.arange(0, BLOCK_DV)
        o_key = tl.arange(0, BLOCK_S)
        o_bit = tl.arange(0, BLOCK_Q)
        m_d = o_d < D
        m_dv = o_dv < DV
        i_t = (i_b * num_draft + o_token).to(tl.int64)
        i_h = i_hk.to(tl.int64)
        p_q = Q + i_t[:, None] * stride_q_t + o_h.to(tl.int64)[:, None] * stride_q_h + o_d[None, :]
        b_q = tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0)

        top = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if HAS_SINKS:
            # A key without a value, and once per request.
            sink = tl.load(SINKS + o_h, mask=m_row, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.where(i_c == 0, sink, top)
            total = tl.where(i_c == 0, 1.0, total)
        if HAS_WINDOW:
            # A token sees itself and its ancestors, so its depth is one less than their number.
            depth = tl.full([BLOCK_M], -1, tl.int32)
            for i_w in tl.static_range(WORDS):
                bits = tl.load(ANCESTORS + i_t * WORDS + i_w, mask=m_row, other=0)
                seen = (bits[:, None] >> o_bit.to(tl.int64)[None, :]) & 1
                depth += tl.sum(seen.to(tl.int32), 1)
            length = tl.load(KV_INDPTR + i_b + 1) - start
            oldest = length + depth - window
            lo = tl.maximum(lo, (length - window) // BLOCK_S * BLOCK_S)
        if PAGE > 1:
            start = tl.load(PAGE_INDPTR + i_b)

        for i_s in tl.range(lo, hi, BLOCK_S, num_stages=STAGES):
            key = i_s + o_key
            m_key = key < hi
            slot = tl.load(KV_SLOTS + start + key // PAGE, mask=m_key, other=0).to(tl.int64) * PAGE + key % PAGE
            p_k = K_POOL + i_h * stride_k_h + slot[None, :] * stride_k_s + o_d[:, None]
            b_k = tl.load(p_k, mask=m_key[None, :] & m_d[:, None], other=0.0)
            scores = _scores_log2(b_q, b_k, inner * k_scale, outer, HAS_CAP)
            keep = m_key[None, :]
            if HAS_WINDOW:
                keep = keep & (key[None, :] >= oldest[:, None])
            p_v = V_POOL + i_h * stride_v_h + slot[:, None] * stride_v_s + o_dv[None, :]
            b_v = tl.load(p_v, mask=m_key[:, None] & m_dv[None, :], other=0.0).to(b_q.dtype)
            top, total, acc = online_softmax_step(scores, keep, b_v, top, total, acc, HIDES=HAS_WINDOW)
        acc *= v_scale

        if i_c == chunks - 1:
            # The last chunk also does the draft tokens, a word of ancestor bits at a time.
            for i_w in tl.static_range(WORDS):
                o_draft = i_w * WORD + o_bit
                m_draft = o_draft < num_draft
                i_draft = (i_b * num_draft + o_draft).to(tl.int64)
                p_k = K_DRAFT + i_draft[None, :] * stride_kd_t + i_h * stride_kd_h + o_d[:, None]
                b_k = tl.load(p_k, mask=m_draft[None, :] & m_d[:, None], other=0.0)
                scores = _scores_log2(b_q, b_k, inner, outer, HAS_CAP)
                bits = tl.load(ANCESTORS + i_t * WORDS + i_w, mask=m_row, other=0)
                keep = (((bits[:, None] >> o_bit.to(tl.int64)[None, :]) & 1) != 0) & m_draft[None, :]
                p_v = V_DRAFT + i_draft[:, None] * stride_vd_t + i_h * stride_vd_h + o_dv[None, :]
                b_v = tl.load(p_v, mask=m_draft[:, None] & m_dv[None, :], other=0.0)
                top, total, acc = online_softmax_step(scores, keep, b_v, top, total, acc, HIDES=True)

        # Below the window a row may have seen nothing of a chunk.
        bar = tl.where(total > 0.0, total, 1.0)
        acc = acc / bar[:, None]
        m_out = m_row[:, None] & m_dv[None, :]
        if chunks == 1:
            p_out = OUT + i_t[:, None] * stride_out_t + o_h.to(tl.int64)[:, None] * stride_out_h + o_dv[None, :]
            tl.store(p_out, acc.to(OUT.dtype.element_ty), mask=m_out)
        else:
            row = (i_slot * num_draft + o_token).to(tl.int64) * (HKV * G) + o_h
            tl.store(PARTIAL_OUT + row[:, None] * DV + o_dv[None, :], acc, mask=m_out)
            lse = tl.where(total > 0.0, top + tl.log2(bar), -1.0e30)
            tl.store(PARTIAL_LSE + row, lse, mask=m_row)


def tree_verify_gqa(
    q: torch.Tensor,
    k_draft: torch.Tensor,
    v_draft: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_slots: torch.Tensor,
    ancestors: torch.Tensor,
    plan: SplitPlan,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    page_indptr: torch.Tensor | None = None,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: TreeVerifyLaunch | None = None,
) -> torch.Tensor:
    """Attend each draft token to its request's committed tokens and to its own ancestors.

    Two launches. Scratch of ``slots * Q * HQ * (DV + 1)`` float32 is allocated per call.

    Args:
        q: [T, HQ, D], float16, bfloat16 or float32, rotary applied; a request's rows stand together.
        k_draft: [T, HKV, D], q's dtype: the keys of the draft tokens, not read from the pool.
        v_draft: [T, HKV, DV], q's dtype.
        k_pool: [slots, HKV, D], q's dtype or fp8 (e4m3fn needs compute capability 8.9).
        v_pool: [slots, HKV, DV], likewise.
        kv_indptr: [B + 1] int32 offsets of the requests' committed tokens; none is allowed.
        kv_slots: int32 or int64. Page size 1: the slot of each committed token, at its offset in ``kv_indptr``.
            Above: the number of each page, at its offset in ``page_indptr``. Entries past a request's end are not read.
        ancestors: [T, W] int64 of ``pack_mask`` or ``chain_bits``.
        plan: of ``plan_splits`` for this ``kv_indptr``.
        scale: factor of the scores before softmax (natural, not base 2).
        k_scale: what keys in the pool are to be multiplied with.
        v_scale: what values in the pool are to be multiplied with.
        page_size: tokens per page; the token at offset t of a page has slot ``page * page_size + t``.
        page_indptr: [B + 1] int32 offsets of the requests' pages; needed above page size 1.
        window: hide committed tokens more than this many positions before the row; at least Q - 1. ``kv_indptr`` may
            cover the whole context or only its end, where no row sees more than that.
        logit_cap: 0 for none.
        sinks: optional [HQ] logits that only add to the denominator.
        out: optional [T, HQ, DV] buffer in q's dtype, last axis contiguous.
        launch: tile and pipeline; default from ``kernels.arch``.

    Returns:
        [T, HQ, DV] in q's dtype.

    Raises:
        ValueError: a shape, dtype, device, stride or number differs from the above; names the argument.
    """
    _validate(
        q, k_draft, v_draft, k_pool, v_pool, kv_indptr, kv_slots, ancestors, plan,
        page_size, page_indptr, window, logit_cap, sinks, out,
    )  # fmt: skip
    rows, heads, width = q.shape
    kv_heads, value_width = v_draft.shape[1:]
    group, num_draft = heads // kv_heads, rows // (len(kv_indptr) - 1)
    launch = launch or tree_verify_gqa_launch(
        group * num_draft, max(width, value_width), arch=arch_of(q.device), itemsize=q.element_size()
    )
    out = torch.empty(rows, heads, value_width, dtype=q.dtype, device=q.device) if out is None else out
    slots = len(plan.slot_request)
    partial_out = torch.empty(slots, num_draft, heads, value_width, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(slots, num_draft, heads, dtype=torch.float32, device=q.device)
    # tanh(x) needs 2^(2 x log2(e)); without a cap one factor takes scores to base 2.
    inner, outer = (2 * LOG2E * scale / logit_cap, LOG2E * logit_cap) if logit_cap else (LOG2E * scale, 1.0)
    _tree_verify_gqa_kernel[(triton.cdiv(group * num_draft, launch.block_m), kv_heads, slots)](
        q,
        k_draft,
        v_draft,
        k_pool,
        v_pool,
        kv_indptr,
        kv_slots,
        kv_indptr if page_indptr is None else page_indptr,
        ancestors,
        kv_indptr if sinks is None else sinks,
        plan.slot_request,
        plan.num_chunks,
        plan.first_slot,
        partial_out,
        partial_lse,
        out,
        q.stride(0),
        q.stride(1),
        k_draft.stride(0),
        k_draft.stride(1),
        v_draft.stride(0),
        v_draft.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        out.stride(0),
        out.stride(1),
        num_draft,
        inner,
        outer,
        k_scale,
        v_scale,
        0 if window is None else window,
        G=group,
        HKV=kv_heads,
        D=width,
        DV=value_width,
        PAGE=page_size,
        WORDS=ancestors.shape[1],
        HAS_CAP=logit_cap > 0,
        HAS_SINKS=sinks is not None,
        HAS_WINDOW=window is not None,
        TILE=TILE,
        WORD=WORD,
        BLOCK_M=launch.block_m,
        BLOCK_S=launch.block_s,
        BLOCK_Q=min(WORD, max(16, triton.next_power_of_2(num_draft))),
        BLOCK_D=triton.next_power_of_2(width),
        BLOCK_DV=triton.next_power_of_2(value_width),
        STAGES=launch.stages,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return merge(partial_out, partial_lse, plan, out)
