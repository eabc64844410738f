"""Bookkeeping of KV slots and of accepted tokens: the small index operators of speculation.

Each function takes the arguments of the SGLang operator that it stands in for, and writes what that
operator's Triton kernel writes. The tensors hold a few dozen integers, so plain Python loops over
requests are faster than clever indexing.

Legend: B requests, Q draft tokens per request, S slots of one request.
"""

from __future__ import annotations

import torch


def gather_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Read each request's slots of the positions ``start_offset .. end_offset``, one after the other.

    Args:
        req_pool_indices: [B] row of each request in ``req_to_token``.
        req_to_token: [rows, positions] slot of every position.
        start_offset: [B] first position.
        end_offset: [B] position after the last; ``end - start`` may differ between requests.
        batch_size: B, unused.
        draft_token_num: Q, unused.
        device: unused; the result lies where ``req_to_token`` does.

    Returns:
        [sum(end - start)] int64 slots.
    """
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    windows = [req_to_token[row, start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
    return torch.cat(windows).to(torch.int64) if windows else torch.empty(0, dtype=torch.int64)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write the ``topk * num_cols`` slots after each request's committed tokens to ``out_cache_loc``.

    Args:
        req_pool_indices: [B] row of each request.
        req_to_token: [rows, positions].
        seq_lens: [B] committed tokens.
        out_cache_loc: [B * topk * num_cols], written.
        topk: branches of the draft tree.
        num_cols: slots per branch.
        positions: optional [B * topk], written: the position of the first draft token.
        mrope: optional [3, B * topk], written: the same on three axes.
    """
    width = topk * num_cols
    windows = out_cache_loc.view(-1, width)
    for window, row, start in zip(windows, req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        window.copy_(req_to_token[row, start : start + width])
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk))
    if mrope is not None:
        mrope.copy_(seq_lens.repeat_interleave(topk).expand(3, -1))


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Enter newly allocated slots into each request's row, at positions ``start_offset .. end_offset``.

    Args:
        req_pool_indices: [B] row of each request.
        req_to_token: [rows, positions], written.
        start_offset: [B] first position.
        end_offset: [B] position after the last.
        out_cache_loc: [sum(end - start)] slots, request after request.
        batch_size: B, unused.
    """
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    taken = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def fill_front_out_cache_loc(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Pack the first ``num_front[b]`` slots of each request's window to the front of the output.

    Args:
        num_front: [B] slots to take of each window.
        out_cache_loc: [B * S] windows of equal width.
        front_out_cache_loc: at least [sum(num_front)], written; what lies behind is left as it is.
    """
    windows = out_cache_loc.view(num_front.numel(), -1)
    packed = torch.cat([window[:count] for window, count in zip(windows, num_front.tolist(), strict=True)])
    front_out_cache_loc[: packed.numel()] = packed.to(front_out_cache_loc.dtype)


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Pack the slots of the accepted tree nodes to the front of the output.

    Args:
        accept_index: [B, depth] node numbers over the whole batch, -1 where nothing was accepted.
        out_cache_loc: [B * Q] slot of each node.
        accept_out_cache_loc: at least [accepted], written; what lies behind is left as it is.
        size: numel of ``accept_index``, unused.
    """
    nodes = accept_index.reshape(-1)
    slots = out_cache_loc[nodes[nodes >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots.to(accept_out_cache_loc.dtype)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last accepted token of each request, the one the target itself produced.

    Args:
        accept_tokens: [B * accept_stride] tokens along each accepted path.
        accept_lens: [B] accepted tokens, the target's own included.
        bonus_tokens: [B], written.
        accept_stride: row width of ``accept_tokens``.
        batch_size: B.
    """
    paths = accept_tokens.reshape(-1)[: batch_size * accept_stride].view(batch_size, accept_stride)
    bonus_tokens.copy_(paths.gather(1, accept_lens.long().unsqueeze(1) - 1).squeeze(1))
