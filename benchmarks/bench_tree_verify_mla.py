"""Time ``tree_verify_mla`` against the kernels of ``attention_peers`` and PyTorch's attention over dense latents.

python -m benchmarks.bench_tree_verify_mla [--shape NAME ...] [--provider NAME ...] [--out FILE.json]
python -m benchmarks.bench_tree_verify_mla --smoke
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1" if "--smoke" in sys.argv else "0"

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_eagle3_ext.kernels.arch import arch_of, chunk_target, tree_verify_mla_launch
from sglang_eagle3_ext.kernels.split_merge import pack_mask, plan_splits
from sglang_eagle3_ext.kernels.tree_verify_mla import tree_verify_mla

from benchmarks.attention_peers import Verify, peers_of
from benchmarks.kernel_bench import Prepared, main


class Shape(NamedTuple):
    heads: int
    context: int
    batch: int
    num_draft: int
    chain: bool = False
    latent: int = 512
    rope: int = 64


SHAPES = {
    f"kimi-k2.5-tp8-{context // 1024}k-bs{batch}-{num_draft}{'-chain' if chain else ''}": Shape(
        8, context, batch, num_draft, chain
    )
    for context in (1024, 8192, 32768, 131072)
    for batch in (1, 8, 32)
    for num_draft, chain in ((4, True), (8, False), (16, False), (64, False))
}
SMOKE = Shape(2, 70, 2, 5, latent=64, rope=16)


def flops(shape: Shape) -> int:
    """Count the operations of both matrix products."""
    rows = shape.batch * shape.num_draft * shape.heads
    return 2 * rows * (shape.context + shape.num_draft) * (2 * shape.latent + shape.rope)


def draw_tree(num_draft: int, chain: bool, generator: torch.Generator) -> torch.Tensor:
    """Draw a tree in which each token's parent is some token before it: its mask, [Q, Q] bool."""
    mask = torch.eye(num_draft, dtype=torch.bool)
    for i in range(1, num_draft):
        parent = i - 1 if chain else int(torch.randint(0, i, (1,), generator=generator))
        mask[i] |= mask[parent]
    return mask


def parts(batch: int, context: int) -> list[slice]:
    """Cut a batch so that a mebitoken of context is read at a time: PyTorch repeats it for every query head."""
    most = max(1, 2**20 // context)
    return [slice(at, at + most) for at in range(0, batch, most)]


def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Draw the inputs of a shape and list who computes it."""
    heads, context, batch, n, chain, latent, rope = shape
    width, rows, scale = latent + rope, batch * n, (latent + rope) ** -0.5
    g, on_host = torch.Generator(device).manual_seed(0), torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, device=device, dtype=torch.float32).to(dtype)

    q, draft, pool = draw(rows, heads, width), draw(rows, width), draw(batch * context + 1, width)
    slots = torch.randperm(batch * context, generator=g, device=device) + 1  # slot 0 is SGLang's padding
    kv_indptr = torch.arange(0, batch * context + 1, context, dtype=torch.int32, device=device)
    trees = torch.stack([draw_tree(n, chain, on_host) for _ in range(batch)]).to(device)
    tiles = -(-n * heads // tree_verify_mla_launch(n * heads, arch=arch_of(device), itemsize=q.element_size()).block_m)
    target = chunk_target(tiles, arch=arch_of(device))
    bits, plan = pack_mask(trees.flatten(), kv_indptr, n), plan_splits(kv_indptr, target=target)
    own_out = torch.empty(rows, heads, latent, dtype=dtype, device=device)
    slots_32 = slots.int()

    def ours() -> torch.Tensor:
        return tree_verify_mla(
            q, draft, pool, kv_indptr, slots_32, bits, plan, latent_width=latent, scale=scale, out=own_out
        )

    def ours_with_the_step() -> torch.Tensor:
        pack_mask(trees.flatten(), kv_indptr, n, out=bits)
        plan_splits(kv_indptr, target=target, out=plan)
        return ours()

    # What attention over dense tensors needs: it is gathered here, so that its time is not theirs.
    context_rows = pool[slots].view(batch, context, width)
    k = torch.cat([context_rows, draft.view(batch, n, width)], 1)[:, None]  # [B, 1, S + Q, C + R]
    sees = torch.cat([torch.ones(batch, n, context, dtype=torch.bool, device=device), trees], 2)[:, None]

    def attend(some: slice) -> torch.Tensor:
        rows_first = q.view(batch, n, heads, width)[some].transpose(1, 2)
        keys = k[some].expand(-1, heads, -1, -1)
        y = F.scaled_dot_product_attention(rows_first, keys, keys[..., :latent], attn_mask=sees[some], scale=scale)
        return y.transpose(1, 2).reshape(-1, heads, latent)

    def dense() -> torch.Tensor:
        return torch.cat([attend(some) for some in parts(batch, context)])

    providers: dict[str, Callable[[], torch.Tensor]] = {
        "torch": dense,
        "ours": ours,
        "ours, plan and mask included": ours_with_the_step,
    }
    latents, pools = draft[:, None], pool[:, None]
    verify = Verify(
        q, latents, latents[..., :latent], pools, pools[..., :latent], kv_indptr, slots, trees, scale, chain
    )
    truth = torch.empty(rows, heads, latent, dtype=torch.float64, device=device)
    for b in range(batch):
        keys = k[b, 0].double()
        mine = slice(b * n, (b + 1) * n)
        scores = torch.einsum("qhd,sd->qhs", q[mine].double(), keys) * scale
        weight = scores.masked_fill(~sees[b, 0][:, None], float("-inf")).softmax(-1)
        truth[mine] = torch.einsum("qhs,sc->qhc", weight, keys[:, :latent])
    nbytes = (batch * context + rows) * width * pool.element_size() + q.nbytes + own_out.nbytes
    return Prepared(providers, truth, nbytes, peers_of("tree_verify_mla", verify))


if __name__ == "__main__":
    main("tree_verify_mla", (__doc__ or "").splitlines()[0], SHAPES, SMOKE, prepare)
