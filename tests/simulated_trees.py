"""How many drafts of a tree SGLang would have accepted, computed with the reference; ``reference`` itself knows chains.

SGLang grows ``topk`` beams, each step by the ``topk`` best tokens of each beam, keeps the ``topk`` best products of
probabilities as the next beams, and in the end verifies the best candidates of all steps together. A beam keeps the
keys of its own place, even when another beam's candidate takes that place: that costs acceptance, and is simulated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_eagle3_ext.reference import ChainResult, Chains, KVCache, ReferenceDraft, Step


class Candidate(NamedTuple):
    """A token of the tree: its score, and the candidate it goes on from (``None``: the last committed token)."""

    score: float
    token: int
    parent: int | None


def propose_tree(
    draft: ReferenceDraft, first: Step, cache: KVCache, row: int, steps: int, topk: int, draft_tokens: int
) -> dict[int, Candidate]:
    """Draft a tree behind one feature row.

    Args:
        draft: the draft.
        first: of the feature pass.
        cache: of the feature pass.
        row: the feature row.
        steps: depth of the tree.
        topk: branches of a beam.
        draft_tokens: nodes that are verified, the root included.

    Returns:
        The candidates that are verified, by their number.
    """
    step = first[row : row + 1]
    scores, ids = step.logits.softmax(-1).topk(topk)
    scores, tokens = scores[0], draft.to_target(ids[0])
    candidates = [Candidate(float(s), int(t), None) for s, t in zip(scores, tokens, strict=True)]
    beams, state = list(range(topk)), step.state.expand(topk, -1)
    running = Chains(draft, cache, torch.full((topk,), row))
    for _ in range(1, steps):
        step = running.advance(tokens, state)
        more, ids = step.logits.softmax(-1).topk(topk)
        products, tokens = (scores[:, None] * more).flatten(), draft.to_target(ids).flatten()
        start = len(candidates)
        candidates += [
            Candidate(float(s), int(t), beams[i // topk]) for i, (s, t) in enumerate(zip(products, tokens, strict=True))
        ]
        scores, best = products.topk(topk)
        beams, tokens, state = [start + i for i in best.tolist()], tokens[best], step.state[best // topk]
    kept = torch.tensor([c.score for c in candidates]).topk(draft_tokens - 1).indices.tolist()
    return {i: candidates[i] for i in kept}


def count_accepted(tree: dict[int, Candidate], after: list[int]) -> int:
    """Count the tokens of a text that the tree has from its root on."""
    parent: int | None = None
    for depth, token in enumerate(after):
        found = [i for i, c in tree.items() if c.parent == parent and c.token == token]
        if not found:
            return depth
        parent = found[0]
    return len(after)


@torch.inference_mode()
def simulate_tree(
    draft: ReferenceDraft,
    tokens: Tensor,
    features: Tensor,
    prompt_length: int,
    steps: int,
    topk: int,
    draft_tokens: int,
    completion_tokens: int,
) -> ChainResult:
    """Replay how SGLang would have served one greedy answer with trees, as ``reference.simulate_chain`` does it.

    Args:
        draft: the draft.
        tokens: [T] target ids: prompt, answer, and at least ``steps`` tokens beyond it.
        features: at least [T-1, K*M] states of the target, in fc column order.
        prompt_length: tokens of the prompt.
        steps: depth of the tree.
        topk: branches of a beam.
        draft_tokens: nodes that are verified, the root included.
        completion_tokens: tokens of the answer.
    """
    first, cache = draft.feature_pass(draft.project(features[: len(tokens) - 1]), tokens)
    histogram, emitted = [0] * (steps + 1), 1
    while emitted < completion_tokens:
        row = prompt_length + emitted - 2
        tree = propose_tree(draft, first, cache, row, steps, topk, draft_tokens)
        accepted = count_accepted(tree, tokens[row + 2 : row + 2 + steps].tolist())
        histogram[accepted] += 1
        emitted += accepted + 1
    return ChainResult(tuple(histogram), completion_tokens)
