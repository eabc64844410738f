"""Run SGLang's own Triton kernels of speculation in Triton's interpreter and save what they wrote.

``python tests/triton_oracle.py OUT``: a process of its own, because the interpreter is chosen when the
kernels are imported. Nothing here knows the operators under test.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.pop("SGLANG_PLATFORM", None)

import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens

Case = dict[str, Any]

TREE_SHAPES = [
    (topk, steps, width)
    for topk in (1, 2, 4)
    for steps in (1, 2, 3, 4, 5)
    for width in ({steps + 1} if topk == 1 else {2, 4, 1 + topk + (steps > 1) * topk, 13})
    if width <= 1 + topk + (steps - 1) * topk * topk
]
VOCABULARY = 7
SHARPNESS = 3.0
"""Peaked drafts keep deep paths; flat ones keep all candidates near the root."""


def draft(batch: int, topk: int, steps: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft with random probabilities, the way the worker does: parents, kept candidates, tokens."""
    probs = (SHARPNESS * torch.randn(batch, VOCABULARY)).softmax(-1)
    top_p, top_index = probs.topk(topk, dim=-1)
    hidden, scores = torch.randn(batch, 3), None
    results: tuple[list[torch.Tensor], ...] = ([], [], [])
    for step in range(steps):
        _, hidden, scores, info = select_top_k_tokens(step, top_p, top_index, hidden, scores, topk)
        for collected, part in zip(results, info, strict=True):
            collected.append(part)
        top_p, top_index = (SHARPNESS * torch.randn(batch * topk, VOCABULARY)).softmax(-1).topk(topk, dim=-1)
    return organize_draft_results(*results, width)


def targets_along(tokens: torch.Tensor, first_child: torch.Tensor, sibling: torch.Tensor) -> torch.Tensor:
    """Let the target's token after a node be one of its children's, nineteen times out of twenty."""
    wanted = torch.randint(0, VOCABULARY, tokens.shape)
    for request in range(tokens.shape[0]):
        for node in range(tokens.shape[1]):
            children, child = [], int(first_child[request, node])
            while child != -1:
                children.append(child)
                child = int(sibling[request, child])
            if children and random.random() < 0.95:
                wanted[request, node] = tokens[request, random.choice(children)]
    return wanted


def tree_case(batch: int, topk: int, steps: int, width: int, mode: int) -> Case:
    """Build one tree and verify it greedily."""
    parents, kept, tokens = draft(batch, topk, steps, width)
    lengths = torch.randint(0, 9, (batch,))
    cells = batch * width * width + (int(lengths.sum()) * width if mode == spec_tree.TreeMaskMode.FULL_MASK else 0)
    mask = torch.ones(cells, dtype=torch.bool)
    positions = torch.empty(batch * width, dtype=torch.long)
    index, first_child, sibling = torch.full((3, batch, width), -1, dtype=torch.long)
    inputs = {"parents": parents.clone(), "kept": kept.clone(), "lengths": lengths.clone()}
    spec_tree.sgl_build_tree_kernel_triton(
        parents, kept, lengths, mask, positions, index, first_child, sibling, topk, steps, width, mode
    )
    candidates = torch.cat((torch.randint(0, VOCABULARY, (batch, 1)), tokens), dim=1)
    wanted = targets_along(candidates, first_child, sibling)
    predicts = torch.zeros(batch * width, dtype=torch.int32)
    accepted = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    count = torch.empty(batch, dtype=torch.int32)
    spec_tree.verify_tree_greedy_triton(predicts, accepted, count, candidates, index, first_child, sibling, wanted)
    return inputs | {
        "shape": (batch, topk, steps, width, int(mode)),
        "mask": mask,
        "positions": positions,
        "index": index,
        "first_child": first_child,
        "sibling": sibling,
        "candidates": candidates,
        "wanted": wanted,
        "predicts": predicts,
        "accepted": accepted,
        "count": count,
    }


def request_table(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a table of random slots and pick the rows of a batch."""
    table = torch.randperm(20 * width).view(20, width).to(torch.int32)
    return table, torch.randperm(20)[:batch]


def slot_cases(batch: int) -> dict[str, Case]:
    """Run each bookkeeping operator once on random ragged input."""
    table, rows = request_table(batch, 90)
    topk, steps = random.choice([(1, 3), (4, 3), (2, 5), (1, 1)])
    starts = torch.randint(0, 20, (batch,))
    ends = starts + torch.randint(0, 40, (batch,))
    total = int((ends - starts).sum())

    draft_slots = torch.full((batch * topk * steps,), -7, dtype=torch.long)
    positions = torch.full((batch * topk,), -7, dtype=torch.long)
    mrope = torch.full((3, batch * topk), -7, dtype=torch.long)
    cache_locs.assign_draft_cache_locs_contiguous_func(rows, table, starts, draft_slots, topk, steps, positions, mrope)
    extend = torch.full((total,), -7, dtype=torch.long)
    cache_locs.assign_extend_cache_locs[(batch,)](
        rows, table, starts, ends, extend, table.shape[1], 1 << (batch - 1).bit_length()
    )
    filled, new_slots = table.clone(), torch.randint(0, 999, (total,))
    assign_req_to_token_pool_func(rows, filled, starts, ends, new_slots, batch)

    width, depth = topk * steps + 1, steps + 1
    window = torch.randperm(500)[: batch * width]
    front_counts = torch.randint(1, depth + 1, (batch,), dtype=torch.int32)
    front = torch.zeros(batch * depth, dtype=torch.long)
    cache_locs.fill_front_out_cache_loc_func(front_counts, window, front)
    nodes = torch.full((batch, depth), -1, dtype=torch.int32)
    for request, count in enumerate(front_counts.tolist()):
        nodes[request, :count] = request * width + torch.randperm(width)[:count].sort().values
    accepted = torch.zeros(batch * depth, dtype=torch.long)
    eagle.fill_accept_out_cache_loc_func(nodes, window, accepted, nodes.numel())
    tokens = torch.randint(0, 999, (batch, depth), dtype=torch.int32)
    bonus = torch.full((batch,), -7, dtype=torch.int32)
    eagle.fill_bonus_tokens_func(tokens, front_counts, bonus, depth, batch)
    return {
        "draft": {"rows": rows, "table": table, "starts": starts, "topk": topk, "steps": steps, "slots": draft_slots}
        | {"positions": positions, "mrope": mrope},
        "extend": {"rows": rows, "table": table, "starts": starts, "ends": ends, "slots": extend},
        "assign": {"rows": rows, "table": table, "starts": starts, "ends": ends, "slots": new_slots, "filled": filled},
        "front": {"counts": front_counts, "window": window, "front": front},
        "accept": {"nodes": nodes, "window": window, "accepted": accepted},
        "bonus": {"tokens": tokens, "counts": front_counts, "bonus": bonus},
    }


def main() -> None:
    """Save all cases to the path given."""
    torch.manual_seed(0)
    random.seed(0)
    trees = [tree_case(batch, *shape, mode) for shape in TREE_SHAPES for batch, mode in ((1, 1), (3, 1), (2, 0))]
    slots = [slot_cases(batch) for batch in (1, 2, 3, 5, 8) for _ in range(2)]
    torch.save({"trees": trees, "slots": slots}, sys.argv[1])


if __name__ == "__main__":
    main()
