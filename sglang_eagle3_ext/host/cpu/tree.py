"""The draft tree on a CPU: building it, verifying it greedily, verifying it by sampling.

Each function takes the arguments of the SGLang operator that it stands in for and writes the same
outputs. The structures are tiny (a few dozen nodes), so they are walked in Python.

Legend: B requests, Q nodes per request (node 0 is the root: the last committed token), D the longest
accepted path with its root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.cpu import BACKEND

FULL_MASK, QLEN_ONLY = 0, 1
"""SGLang's mask layouts: [Q, prefix + Q] per request, or [Q, Q] per request."""

NOTHING = -1


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Turn the candidates that drafting selected into a tree that verification can walk.

    Args:
        parent_list: [B, 1 + topk * (steps - 1)] candidate number of every beam's parent.
        top_scores_index: [B, Q - 1] ascending candidate numbers that were kept; candidate ``c`` was
            drawn from beam ``c // topk``, beam 0 being the root.
        seq_lens: [B] committed tokens.
        tree_mask: boolean, written: whether a node sees a node (its ancestors and itself), in the layout
            that ``tree_mask_mode`` says. Columns of the prefix are left as they are.
        positions: [B * Q], written: the position of every node.
        retrieve_index: [B, Q], written: node numbers over the whole batch.
        retrieve_next_token: [B, Q], filled with -1 before, written: the first child of a node.
        retrieve_next_sibling: [B, Q], filled with -1 before, written: its next sibling.
        topk: branches per beam.
        spec_steps: depth of the tree.
        num_verify_tokens: Q.
        tree_mask_mode: ``FULL_MASK`` or ``QLEN_ONLY``.

    Raises:
        UnsupportedError: another mask layout was asked for.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise UnsupportedError(
            f"tree_mask_mode: got {tree_mask_mode!r}; expected FULL_MASK or QLEN_ONLY, which the CPU platform builds. "
            f"Serve with --attention-backend {BACKEND}."
        )
    size = num_verify_tokens
    lengths = seq_lens.tolist()
    masks, depths, next_tokens, next_siblings = [], [], [], []
    for kept, beams in zip(top_scores_index.tolist(), parent_list.tolist(), strict=True):
        parents = _parents_of(kept, beams, topk)
        ancestors = [_path_to_root(node, parents, spec_steps) for node in range(size)]
        masks.append([[column == 0 or column in path for column in range(size)] for path in ancestors])
        depths.append([len(path) for path in ancestors])
        children, siblings = _links_of(parents)
        next_tokens.append(children)
        next_siblings.append(siblings)

    positions.copy_((seq_lens.unsqueeze(1) + torch.tensor(depths)).view(-1))
    retrieve_index.copy_(torch.arange(len(lengths) * size).view(-1, size))
    retrieve_next_token.copy_(torch.tensor(next_tokens))
    retrieve_next_sibling.copy_(torch.tensor(next_siblings))
    visible = torch.tensor(masks, dtype=torch.bool)
    if tree_mask_mode == QLEN_ONLY:
        tree_mask[: visible.numel()] = visible.view(-1)
        return
    start = 0
    for mask, length in zip(visible, lengths, strict=True):
        end = start + size * (length + size)
        tree_mask[start:end].view(size, length + size)[:, length:] = mask
        start = end


def _parents_of(kept: Sequence[int], beams: Sequence[int], topk: int) -> list[int]:
    """Find the parent node of every node; ``NOTHING`` for the root and where the parent was not kept."""
    node_of: dict[int, int] = {}
    for node, candidate in enumerate(kept, start=1):
        node_of.setdefault(candidate, node)
    parents = [NOTHING]
    for candidate in kept:
        beam = candidate // topk
        parents.append(0 if beam == 0 else node_of.get(beams[beam], NOTHING))
    return parents


def _path_to_root(node: int, parents: Sequence[int], depth: int) -> list[int]:
    """List a node and its ancestors, the root left out; its length is the node's depth."""
    path: list[int] = []
    while node > 0 and len(path) < depth:
        path.append(node)
        node = parents[node]
    return path


def _links_of(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Link every node to its first child and to its next sibling, in node order."""
    first_child, next_sibling = [NOTHING] * len(parents), [NOTHING] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent != NOTHING:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


def _children(node: int, first_child: Sequence[int], next_sibling: Sequence[int]) -> Iterator[int]:
    child = first_child[node]
    while child != NOTHING:
        yield child
        child = next_sibling[child]


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the tree for as long as a child is the token the target would have produced.

    Args:
        predicts: [B * Q], written at the nodes of the accepted path: the target's token after them.
        accept_index: [B, D], written: the accepted nodes over the whole batch, root first, then -1.
        accept_token_num: [B], written: accepted draft tokens.
        candidates: [B, Q] token of every node.
        retrieve_index: [B, Q], as ``build_tree`` wrote it.
        retrieve_next_token: [B, Q] first children.
        retrieve_next_sibling: [B, Q] next siblings.
        target_predict: [B, Q] the target's own token after every node.
        topk: unused.

    Returns:
        The three tensors that were written.
    """
    size, depth = candidates.shape[1], accept_index.shape[1]
    trees = zip(
        candidates.tolist(),
        retrieve_next_token.tolist(),
        retrieve_next_sibling.tolist(),
        target_predict.tolist(),
        strict=True,
    )
    written, tokens, paths, accepted = [], [], [], []
    for request, (drafted, first_child, next_sibling, wanted) in enumerate(trees):
        path = [0]
        while len(path) < depth:
            want = wanted[path[-1]]
            children = _children(path[-1], first_child, next_sibling)
            match = next((child for child in children if drafted[child] == want), NOTHING)
            if match == NOTHING:
                break
            path.append(match)
        nodes = [request * size + node for node in path]
        written += nodes
        tokens += [wanted[node] for node in path]
        paths.append(nodes + [NOTHING] * (depth - len(nodes)))
        accepted.append(len(path) - 1)
    predicts[torch.tensor(written)] = torch.tensor(tokens, dtype=predicts.dtype)
    accept_index.copy_(torch.tensor(paths))
    accept_token_num.copy_(torch.tensor(accepted))
    return predicts, accept_index, accept_token_num


def verify_tree_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a path at random so that every token follows the target's distribution.

    At a node the children are tried in order; one coin decides between them and rejection, a child
    taking its share of the target's probability. After a rejection the last token is drawn from the
    target's distribution without the rejected children. (Argument names as in the CUDA operator.)

    Args:
        predicts: [B * Q], written at the nodes of the accepted path.
        accept_index: [B, D], filled with -1 before, written: accepted nodes over the whole batch.
        accept_token_num: [B], written: accepted draft tokens.
        candidates: [B, Q] token of every node.
        retrive_index: [B, Q], as ``build_tree`` wrote it.
        retrive_next_token: [B, Q] first children.
        retrive_next_sibling: [B, Q] next siblings.
        uniform_samples: [B, Q] one coin per node, in [0, 1).
        uniform_samples_for_final_sampling: [B] one coin per request for its last token.
        target_probs: [B, Q, V] the target's distribution after every node.
        draft_probs: unused; proposals are deterministic.
        threshold_single: accept a child at this probability whatever the coin says.
        threshold_acc: divide the accumulated probability by this before comparing.
        deterministic: unused; the result is always deterministic given the coins.
    """
    size, depth = candidates.shape[1], accept_index.shape[1]
    relaxation = max(threshold_acc, 1e-9)
    trees = zip(
        candidates.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        uniform_samples.tolist(),
        uniform_samples_for_final_sampling.tolist(),
        target_probs,
        strict=True,
    )
    for request, (drafted, first_child, next_sibling, coins, last_coin, probs) in enumerate(trees):
        path, rejected = [0], list[int]()
        while len(path) < depth:
            node, mass, rejected = path[-1], 0.0, []
            for child in _children(node, first_child, next_sibling):
                prob = float(probs[node, drafted[child]])
                mass += prob
                if prob > 0 and (coins[node] < mass / relaxation or prob >= threshold_single):
                    path.append(child)
                    break
                rejected.append(drafted[child])
            if path[-1] == node:
                break
        else:
            rejected = []  # nothing was tried after the last node
        nodes = torch.tensor([request * size + node for node in path])
        predicts[nodes[:-1]] = torch.tensor([drafted[node] for node in path[1:]], dtype=predicts.dtype)
        predicts[nodes[-1]] = _draw(probs[path[-1]], rejected, last_coin)
        accept_index[request, : len(path)] = nodes.to(accept_index.dtype)
        accept_token_num[request] = len(path) - 1


def _draw(probs: torch.Tensor, excluded: Sequence[int], coin: float) -> int:
    """Draw a token from ``probs`` without the excluded ones, renormalised."""
    rest = probs.to(torch.float64, copy=True)
    rest[list(excluded)] = 0.0
    cumulative = rest.cumsum(0)
    above = torch.searchsorted(cumulative, coin * cumulative[-1], right=True)
    if above < len(rest):
        return int(above)
    # Rounding at the very end of the distribution: the last token with mass, or the last one at all.
    possible = rest.nonzero()
    return int(possible[-1]) if len(possible) else len(rest) - 1


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the ``top_k`` likeliest tokens of each row, and those that tie with the last of them.

    Args:
        probs: [rows, V].
        top_k: [rows]; V or more keeps all.

    Returns:
        [rows, V] renormalised.
    """
    vocabulary = probs.shape[-1]
    cut = top_k.view(-1, 1).long()
    restricted = cut < vocabulary
    if not bool(restricted.any()):
        return probs
    widest = int(cut[restricted].max())
    best = probs.topk(widest, dim=-1).values
    least = best.gather(-1, cut.clamp(1, widest) - 1)
    kept = torch.where((probs >= least) | ~restricted, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest likeliest tokens of each row that together reach ``top_p``.

    Args:
        probs: [rows, V].
        top_p: [rows].

    Returns:
        [rows, V] renormalised.
    """
    ordered, tokens = probs.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(-1) - ordered
    ordered = torch.where(mass_before < top_p.view(-1, 1), ordered, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, tokens, ordered)
    return kept / kept.sum(-1, keepdim=True)
