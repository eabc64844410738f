"""Time ``tree_verify_gqa`` against the kernels of ``attention_peers`` and PyTorch's attention over dense keys.

python -m benchmarks.bench_tree_verify_gqa [--shape NAME ...] [--provider NAME ...] [--out FILE.json]
python -m benchmarks.bench_tree_verify_gqa --smoke
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1" if "--smoke" in sys.argv else "0"

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang_eagle3_ext.kernels.arch import arch_of, chunk_target, tree_verify_gqa_launch
from sglang_eagle3_ext.kernels.split_merge import pack_mask, plan_splits
from sglang_eagle3_ext.kernels.tree_verify_gqa import tree_verify_gqa

from benchmarks.attention_peers import Verify, peers_of
from benchmarks.bench_tree_verify_mla import draw_tree, parts
from benchmarks.kernel_bench import Prepared, main


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    context: int
    batch: int
    num_draft: int
    chain: bool = False


MODELS = {"llama-3.1-8b": (32, 8, 128), "qwen3-32b-tp4": (16, 2, 128)}
SHAPES = {
    f"{model}-{context // 1024}k-bs{batch}-{num_draft}{'-chain' if chain else ''}": Shape(
        *heads, context, batch, num_draft, chain
    )
    for model, heads in MODELS.items()
    for context in (1024, 8192, 32768, 131072)
    for batch in (1, 8, 32)
    for num_draft, chain in ((4, True), (8, False), (16, False), (64, False))
}
SMOKE = Shape(4, 2, 32, 70, 2, 5)


def flops(shape: Shape) -> int:
    """Count the operations of both matrix products."""
    rows = shape.batch * shape.num_draft * shape.heads
    return 4 * rows * (shape.context + shape.num_draft) * shape.width


def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Draw the inputs of a shape and list who computes it."""
    heads, kv_heads, width, context, batch, n, chain = shape
    rows, group, scale = batch * n, heads // kv_heads, width**-0.5
    g, on_host = torch.Generator(device).manual_seed(0), torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, device=device, dtype=torch.float32).to(dtype)

    q, own_out = draw(rows, heads, width), torch.empty(rows, heads, width, dtype=dtype, device=device)
    k_draft, v_draft = draw(rows, kv_heads, width), draw(rows, kv_heads, width)
    k_pool, v_pool = (draw(batch * context + 1, kv_heads, width) for _ in range(2))
    slots = torch.randperm(batch * context, generator=g, device=device) + 1  # slot 0 is SGLang's padding
    kv_indptr = torch.arange(0, batch * context + 1, context, dtype=torch.int32, device=device)
    trees = torch.stack([draw_tree(n, chain, on_host) for _ in range(batch)]).to(device)
    arch = arch_of(device)
    tiles = -(-n * group // tree_verify_gqa_launch(n * group, width, arch=arch, itemsize=dtype.itemsize).block_m)
    target = chunk_target(kv_heads * tiles, arch=arch)
    bits, plan = pack_mask(trees.flatten(), kv_indptr, n), plan_splits(kv_indptr, target=target)

    def ours() -> torch.Tensor:
        return tree_verify_gqa(
            q, k_draft, v_draft, k_pool, v_pool, kv_indptr, slots, bits, plan, scale=scale, out=own_out
        )

    def ours_with_the_step() -> torch.Tensor:
        pack_mask(trees.flatten(), kv_indptr, n, out=bits)
        plan_splits(kv_indptr, target=target, out=plan)
        return ours()

    # What attention over dense tensors needs: it is gathered here, so that its time is not theirs.
    dense_k, dense_v = (
        torch.cat([pool[slots].view(batch, context, kv_heads, width), draft.view(batch, n, kv_heads, width)], 1)
        for pool, draft in ((k_pool, k_draft), (v_pool, v_draft))
    )  # [B, S + Q, HKV, D]
    sees = torch.cat([torch.ones(batch, n, context, dtype=torch.bool, device=device), trees], 2)

    def attend(some: slice) -> torch.Tensor:
        y = F.scaled_dot_product_attention(
            q.view(batch, n, heads, width)[some].transpose(1, 2),
            dense_k[some].transpose(1, 2),
            dense_v[some].transpose(1, 2),
            attn_mask=sees[some, None],
            scale=scale,
            enable_gqa=True,
        )
        return y.transpose(1, 2).reshape(-1, heads, width)

    def dense() -> torch.Tensor:
        return torch.cat([attend(some) for some in parts(batch, context)])

    providers: dict[str, Callable[[], torch.Tensor]] = {
        "torch": dense,
        "ours": ours,
        "ours, plan and mask included": ours_with_the_step,
    }
    verify = Verify(q, k_draft, v_draft, k_pool, v_pool, kv_indptr, slots, trees, scale, chain)
    truth = torch.empty(rows, heads, width, dtype=torch.float64, device=device)
    for b in range(batch):
        mine = slice(b * n, (b + 1) * n)
        queries = q[mine].double().view(n, kv_heads, group, width)
        for h in range(kv_heads):  # head by head: in float64 all at once would not fit at long context
            scores = torch.einsum("qgd,sd->qgs", queries[:, h], dense_k[b, :, h].double()) * scale
            weight = scores.masked_fill(~sees[b][:, None], float("-inf")).softmax(-1)
            truth[mine, h * group : (h + 1) * group] = weight @ dense_v[b, :, h].double()
    nbytes = 2 * (batch * context + rows) * kv_heads * width * dtype.itemsize + q.nbytes + own_out.nbytes
    return Prepared(providers, truth, nbytes, peers_of("tree_verify_gqa", verify))


if __name__ == "__main__":
    main("tree_verify_gqa", (__doc__ or "").splitlines()[0], SHAPES, SMOKE, prepare)
