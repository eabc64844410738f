"""Attention over a slotted key/value pool, as a list of dense problems.

A batch is cut into segments: some query rows of one request, the slots they attend to, and a mask where
not every row sees every slot. The list is made once per forward pass and used by every layer.

Legend: T query rows, HQ query heads, HKV key/value heads, D head size, L attended slots, n rows of one
segment, Q draft tokens per request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

MASK_CELLS = 1 << 20
"""Most cells of one mask; a longer query is cut so that long prompts need no mask of gigabytes."""


class Segment(NamedTuple):
    """One dense attention problem.

    Attributes:
        rows: the query rows.
        slots: the slots attended to, in order of position; a slice when they are consecutive, which
            reads the pool without a copy.
        mask: [HQ / HKV * n, L] additive, or ``None`` when every row sees every slot.
    """

    rows: slice
    slots: slice | torch.Tensor
    mask: torch.Tensor | None


class MaskStyle(NamedTuple):
    """How masks are laid out for a model: its type and how many query heads share one key head."""

    dtype: torch.dtype
    group: int

    def additive(self, visible: torch.Tensor) -> torch.Tensor | None:
        """Turn [n, L] booleans into an additive mask with one block of rows per grouped head."""
        if bool(visible.all()):
            return None
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, float("-inf"))
        return mask.repeat(self.group, 1)


def compact(slots: torch.Tensor) -> slice | torch.Tensor:
    """Write consecutive slots as a slice, others as an int64 index."""
    first, count = int(slots[0]), slots.numel()
    if int(slots[-1]) - first == count - 1 and bool((slots.diff() == 1).all()):
        return slice(first, first + count)
    return slots.long()


def decode_segments(req_to_token: torch.Tensor, requests: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    """Give each request one row that sees its whole context.

    Args:
        req_to_token: [rows, positions] slot of every position.
        requests: row of each request.
        lengths: context of each request, the new token included; a request without context has no
            segment and its row stays zero.
    """
    contexts = [
        (row, req_to_token[request, :length])
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True))
    ]
    return [Segment(slice(row, row + 1), compact(slots), None) for row, slots in contexts if slots.numel()]


def extend_segments(
    req_to_token: torch.Tensor,
    requests: Sequence[int],
    lengths: Sequence[int],
    new_lengths: Sequence[int],
    style: MaskStyle,
) -> list[Segment]:
    """Give each request its newest tokens as rows, each seeing its prefix and what precedes it.

    Args:
        req_to_token: [rows, positions] slot of every position.
        requests: row of each request.
        lengths: context of each request, the new tokens included.
        new_lengths: new tokens of each request; 0 is allowed.
        style: layout of the masks.
    """
    segments = []
    row = 0
    for request, length, count in zip(requests, lengths, new_lengths, strict=True):
        step = max(1, MASK_CELLS // (max(length, 1) * style.group))
        for start in range(0, count, step):
            stop = min(start + step, count)
            seen = length - count + stop
            visible = torch.ones(stop - start, seen, dtype=torch.bool).tril_(seen - (stop - start))
            slots = compact(req_to_token[request, :seen])
            segments.append(Segment(slice(row + start, row + stop), slots, style.additive(visible)))
        row += count
    return segments


def verify_segments(
    req_to_token: torch.Tensor,
    requests: Sequence[int],
    lengths: Sequence[int],
    tree_mask: torch.Tensor,
    num_draft_tokens: int,
    style: MaskStyle,
) -> list[Segment]:
    """Give each request its draft tree as rows, each seeing the prefix, its ancestors and itself.

    Args:
        req_to_token: [rows, positions] slot of every position, the tree's behind the committed ones.
        requests: row of each request.
        lengths: committed tokens of each request; 0 is allowed.
        tree_mask: boolean, at least [B * Q * Q]: whether a node sees a node.
        num_draft_tokens: Q.
        style: layout of the masks.
    """
    size = num_draft_tokens
    trees = tree_mask[: len(requests) * size * size].view(-1, size, size)
    segments = []
    for index, (request, length, tree) in enumerate(zip(requests, lengths, trees, strict=True)):
        visible = torch.ones(size, length + size, dtype=torch.bool)
        visible[:, length:] = tree
        slots = compact(req_to_token[request, : length + size])
        segments.append(Segment(slice(index * size, (index + 1) * size), slots, style.additive(visible)))
    return segments


def draft_segments(
    req_to_token: torch.Tensor,
    requests: Sequence[int],
    lengths: Sequence[int],
    draft_slots: torch.Tensor,
) -> Iterator[list[Segment]]:
    """Yield, for each drafting step, one row per branch that sees the prefix and the branch so far.

    A branch keeps its own slots even when a later step re-selects beams, as in SGLang's own backends:
    re-selection costs acceptance, never correctness.

    Args:
        req_to_token: [rows, positions] slot of every position.
        requests: row of each request.
        lengths: committed tokens of each request.
        draft_slots: [B, branches, steps] slots that the steps write to.
    """
    branches, steps = draft_slots.shape[1:]
    prefixes = [req_to_token[request, :length] for request, length in zip(requests, lengths, strict=True)]
    draft_slots = draft_slots.to(req_to_token.dtype)
    contexts = [
        torch.cat((prefix, own[branch]))
        for prefix, own in zip(prefixes, draft_slots, strict=True)
        for branch in range(branches)
    ]
    for step in range(1, steps + 1):
        yield [
            Segment(slice(row, row + 1), compact(context[: context.numel() - steps + step]), None)
            for row, context in enumerate(contexts)
        ]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
) -> torch.Tensor:
    """Run softmax attention for every segment.

    Contract: close; scores and sums in float32, output in ``query.dtype``. Slots that no segment names
    are not read.

    Args:
        query: [T, HQ, D].
        keys: [slots, HKV, D], the pool of one layer; ``HQ`` is a multiple of ``HKV``.
        values: [slots, HKV, DV].
        segments: each row in at most one of them; rows in none come out as zero.
        scale: factor applied to the scores before the softmax.

    Returns:
        [T, HQ * DV].
    """
    rows = query.shape[0]
    if len(segments) == 1 and segments[0].rows == slice(0, rows):
        return _attend_segment(query, keys, values, segments[0], scale)
    out = query.new_zeros(rows, query.shape[1] * values.shape[2])
    for segment in segments:
        out[segment.rows] = _attend_segment(query[segment.rows], keys, values, segment, scale)
    return out


def _attend_segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    """Attend the rows of one segment, [n, HQ, D] to [n, HQ * DV]."""
    rows, query_heads, head_size = query.shape
    heads = keys.shape[1]
    group = query_heads // heads
    # The query heads that share a key head become rows: the pool is read once, nothing is repeated.
    grouped = query.view(rows, heads, group, head_size).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(
        grouped.reshape(1, heads, group * rows, head_size),
        keys[segment.slots].transpose(0, 1).unsqueeze(0),
        values[segment.slots].transpose(0, 1).unsqueeze(0),
        attn_mask=segment.mask,
        scale=scale,
    )
    return mixed.view(heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, -1)
