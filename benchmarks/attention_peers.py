"""Other people's kernels on the computation of a tree verification: what the times of ours are compared with.

Each function of ``PEERS`` takes a ``Verify`` and returns a call that computes it; it or the call raises where the
library is missing, the device is none of its own, or the shape is not covered. Everything that a server would prepare
once per step (page tables, plans, packed masks) is prepared here and not timed. Whoever reads draft tokens from the
pool gets a pool that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.kernel_bench import Call, Peer


@dataclass(frozen=True)
class Verify:
    """One layer's verification of B requests with S committed and Q draft tokens each, in pages of one.

    Attributes:
        q: [B*Q, HQ, D].
        k_draft: [B*Q, HKV, D]; of MLA one kv head.
        v_draft: [B*Q, HKV, DV]; of MLA the front of the keys.
        k_pool: [slots, HKV, D].
        v_pool: [slots, HKV, DV].
        kv_indptr: [B + 1] int32.
        slots: [B*S] int64.
        trees: [B, Q, Q] bool, which draft token sees which.
        scale: factor of the scores.
        chain: whether the trees have no branches.
    """

    q: torch.Tensor
    k_draft: torch.Tensor
    v_draft: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    kv_indptr: torch.Tensor
    slots: torch.Tensor
    trees: torch.Tensor
    scale: float
    chain: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, S and Q."""
        batch, n = self.trees.shape[:2]
        return batch, len(self.slots) // batch, n

    @property
    def sees(self) -> torch.Tensor:
        """Which token each row sees, [B, Q, S + Q] bool: SGLang's FULL_MASK and FlashInfer's custom mask, not flat."""
        batch, context, n = self.sizes
        return torch.cat([self.trees.new_ones(batch, n, context), self.trees], 2)

    @property
    def starts(self) -> torch.Tensor:
        """Where the rows of each request begin, [B + 1] int32."""
        batch, _, n = self.sizes
        return torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=self.q.device)

    @property
    def draft_slots(self) -> torch.Tensor:
        """Where the draft tokens stand in ``pools_with_drafts``, [B, Q]."""
        batch, _, n = self.sizes
        return len(self.k_pool) + torch.arange(batch * n, device=self.q.device).view(batch, n)

    def pools_with_drafts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay the draft tokens behind the committed ones."""
        return torch.cat([self.k_pool, self.k_draft]), torch.cat([self.v_pool, self.v_draft])

    def new_out(self) -> torch.Tensor:
        """Allocate [B*Q, HQ, DV]."""
        return self.q.new_empty(*self.q.shape[:2], self.v_draft.shape[2])


def sglang_extend(v: Verify) -> Call:
    """What SGLang's Triton backend verifies trees with on NVIDIA devices."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    batch, context, n = v.sizes
    out, mask, starts = v.new_out(), v.sees.flatten(), v.starts
    ends = torch.arange(batch + 1, device=v.q.device) * n * (context + n)
    values = v.v_draft.contiguous()

    def call() -> torch.Tensor:
        extend_attention_fwd(
            v.q, v.k_draft, values, out, v.k_pool, v.v_pool, starts, v.kv_indptr, v.slots,
            mask, True, ends, n, 1.0, 1.0, v.scale,
        )  # fmt: skip
        return out

    return call


def _sglang_split(v: Verify, forward: Callable[..., bool]) -> Call:
    if not v.chain:
        raise NotImplementedError("chains only")
    out, starts, n = v.new_out(), v.starts, v.sizes[2]
    values = v.v_draft.contiguous()

    def call() -> torch.Tensor:
        if not forward(
            v.q, v.k_draft, values, out, v.k_pool, v.v_pool, starts, v.kv_indptr, v.slots,
            None, True, None, n, 1.0, 1.0, v.scale,
        ):  # fmt: skip
            raise NotImplementedError("got False; the kernel does not cover this shape")
        return out

    return call


def sglang_verify_splitkv(v: Verify) -> Call:
    """SGLang's split kernel for chains with kv heads, which its backend keeps for AMD devices."""
    from sglang.kernels.ops.attention.verify_splitkv import verify_splitkv_fwd

    return _sglang_split(v, verify_splitkv_fwd)


def sglang_verify_shared(v: Verify) -> Call:
    """SGLang's split kernel for chains over latents, which its backend keeps for AMD devices."""
    from sglang.kernels.ops.attention.verify_mla import verify_shared_kv_fwd

    return _sglang_split(v, verify_shared_kv_fwd)


def flashinfer_prefill(v: Verify) -> Call:
    """FlashInfer's paged prefill with a custom mask; its plan, made on the host, is not timed."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    batch, context, n = v.sizes
    k, values = v.pools_with_drafts()
    pools = (k[:, None], values[:, None])  # [pages, 1, HKV, D]
    indices = torch.cat([v.slots.view(batch, context), v.draft_slots], 1).flatten().int()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=v.q.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        v.starts,
        torch.arange(batch + 1, dtype=torch.int32, device=v.q.device) * (context + n),
        indices,
        torch.ones(batch, dtype=torch.int32, device=v.q.device),
        v.q.shape[1],
        k.shape[1],
        k.shape[2],
        1,
        head_dim_vo=values.shape[2],
        custom_mask=v.sees.flatten(),
        sm_scale=v.scale,
        q_data_type=v.q.dtype,
        kv_data_type=v.q.dtype,
    )
    return lambda: wrapper.run(v.q, pools)


def flashinfer_xqa(v: Verify) -> Call:
    """TensorRT-LLM's XQA in FlashInfer, with its packed tree mask, over shuffled pages of 16."""
    from flashinfer.xqa import xqa

    batch, context, n = v.sizes
    kv_heads, width = v.k_pool.shape[1:]
    if abs(v.scale * width**0.5 - 1) > 1e-6:
        raise NotImplementedError("scores divided by the root of the head width only")
    pages = -(-(context + n) // 16)
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).view(batch, pages)
    table = table.to(v.q.device)
    caches = []
    for pool, draft in ((v.k_pool, v.k_draft), (v.v_pool, v.v_draft)):
        rows = torch.cat([pool[v.slots].view(batch, context, kv_heads, -1), draft.view(batch, n, kv_heads, -1)], 1)
        cache = rows.new_zeros(batch * pages, 16, *rows.shape[2:])
        padded = torch.cat([rows, rows.new_zeros(batch, pages * 16 - context - n, *rows.shape[2:])], 1)
        cache[table.flatten()] = padded.view(batch * pages, 16, *rows.shape[2:])
        caches.append(cache)
    lengths = torch.full((batch, 1), context + n, dtype=torch.int32, device=v.q.device).view(torch.uint32)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=v.q.device)
    queries, out = v.q.view(batch, 1, n, *v.q.shape[1:]), v.new_out()
    mask, table = packed_16(v.trees), table.int()

    def call() -> torch.Tensor:
        xqa(
            queries, *caches, table, lengths, out.view_as(queries), workspace[8 << 20 :], workspace[: 8 << 20],
            kv_heads, 16, q_seq_len=n, mask=mask,
        )  # fmt: skip
        return out

    return call


def packed_16(trees: torch.Tensor) -> torch.Tensor:
    """Pack which draft token sees which as XQA reads it: [B, Q, 2 * ceil(Q / 32)] uint16, token j in bit j of a row."""
    batch, n = trees.shape[:2]
    words = 2 * (-(-n // 32))
    cells = trees.new_zeros(batch, n, 16 * words)
    cells[..., :n] = trees
    weights = 1 << torch.arange(16, device=trees.device, dtype=torch.int32)
    return (cells.view(batch, n, words, 16).int() * weights).sum(-1).to(torch.int16).view(torch.uint16)


def fa3_cascade(v: Verify) -> Call:
    """FlashAttention 3 twice, over the context and over each row's ancestors, and a merge: SGLang's ``fa3`` backend."""
    from sgl_kernel import merge_state_v2
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    batch, context, n = v.sizes
    (k, values), device = v.pools_with_drafts(), v.q.device
    latent = values.shape[2]
    # With latents the rotary part is key and query, and the rest is value and "qv".
    absorbed = latent != k.shape[2]
    tensors = {"q": v.q, "k_cache": k[:, None], "v_cache": values[:, None]}
    if absorbed:
        tensors |= {"q": v.q[..., latent:].contiguous(), "k_cache": k[:, None, :, latent:].contiguous()}
        tensors |= {"qv": v.q[..., :latent].contiguous(), "v_cache": values[:, None].contiguous()}
    common = {"softmax_scale": v.scale, "causal": False, "return_softmax_lse": True}
    rows = batch * n
    of_context = {
        "page_table": v.slots.view(batch, context).int(),
        "cache_seqlens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "cu_seqlens_q": v.starts,
        "max_seqlen_q": n,
    }
    ancestors = v.trees.int().argsort(dim=2, descending=True, stable=True)  # [B, Q, Q], those that are seen in front
    of_draft = {
        "page_table": (v.draft_slots[:, :1, None] + ancestors).view(rows, n).int(),
        "cache_seqlens": v.trees.sum(2).flatten().int(),
        "cu_seqlens_q": torch.arange(rows + 1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
    }

    def call() -> torch.Tensor:
        o, lse, *_ = flash_attn_with_kvcache(**tensors, **common, **of_context)
        o_draft, lse_draft, *_ = flash_attn_with_kvcache(**tensors, **common, **of_draft)
        return merge_state_v2(o, lse.T.contiguous(), o_draft, lse_draft.T.contiguous())[0]

    return call


PEERS: Mapping[str, Mapping[str, Callable[[Verify], Call]]] = {
    "tree_verify_gqa": {
        "sglang_extend": sglang_extend,
        "sglang_verify_splitkv": sglang_verify_splitkv,
        "flashinfer_prefill": flashinfer_prefill,
        "flashinfer_xqa": flashinfer_xqa,
        "fa3_cascade": fa3_cascade,
    },
    "tree_verify_mla": {
        "sglang_extend": sglang_extend,
        "sglang_verify_shared": sglang_verify_shared,
        "fa3_cascade": fa3_cascade,
    },
}


COMPILES: Mapping[str, Callable[[Verify], tuple[int, ...]]] = {
    "flashinfer_prefill": lambda v: (v.k_pool.shape[2],),
    "flashinfer_xqa": lambda v: (v.q.shape[1] // v.k_pool.shape[1], v.sizes[2]),
}
"""The peers that compile themselves at their first call, which takes minutes, and what of a shape that depends on."""


def module_of(peer: str, v: Verify) -> str | None:
    """Name what a peer compiles for a shape, if it does."""
    return "-".join(map(str, (peer, *COMPILES[peer](v)))) if peer in COMPILES else None


def peers_of(op: str, v: Verify) -> dict[str, Peer]:
    """List the peers of an operator, each with a function that prepares its call."""
    return {name: Peer(partial(prepare, v), module_of(name, v)) for name, prepare in PEERS[op].items()}
