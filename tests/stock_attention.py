"""SGLang's own verification of a draft batch, run in the corrected interpreter: a second oracle, and a peer in bytes.

The kernels take the tiles that SGLang has for a Hopper GPU, once ``as_on_hopper`` has said that there is one. The
values of MLA are the front of its keys; its batches are handed in as any other.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from interpreter import interpret

from benchmarks.draft_trees import Batch, offsets


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import SGLang's kernels without its plugins, interpret them, and let them choose as on compute capability 9.0."""
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(_extend(), "_is_cuda", True)
    monkeypatch.setattr(_extend(), "CUDA_CAPABILITY", (9, 0), raising=False)


def _extend() -> ModuleType:
    from sglang.kernels.ops.attention import extend_attention

    interpret(extend_attention)
    return extend_attention


def _tensors(batch: Batch, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    starts = offsets([batch.case.num_draft] * len(batch.parents))
    pools = (batch.k_pool, batch.v_pool)
    slots = torch.cat(batch.token_slots)
    return batch.q, batch.k_draft, batch.v_draft.contiguous(), out, *pools, starts, batch.kv_indptr, slots


def extend(batch: Batch) -> torch.Tensor:
    """Verify the trees as SGLang's Triton backend does on NVIDIA devices, with a mask over the whole context."""
    case, n = batch.case, batch.case.num_draft
    parts = [
        torch.cat([torch.ones(n, length, dtype=torch.bool), tree], 1).flatten()
        for length, tree in zip(case.lengths, batch.mask.view(-1, n, n), strict=True)
    ]
    out = torch.empty(*batch.q.shape[:2], batch.v_draft.shape[2], dtype=batch.q.dtype)
    _extend().extend_attention_fwd(
        *_tensors(batch, out),
        torch.cat(parts),
        True,
        torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0),
        n,
        case.k_scale,
        case.v_scale,
        case.width**-0.5,
        logit_cap=case.logit_cap,
        sliding_window_size=-1 if case.window is None else case.window,
        sinks=batch.sinks,
        window_kv_offsets=torch.zeros(len(parts), dtype=torch.int32),
    )
    return out


def verify_splitkv(batch: Batch) -> torch.Tensor:
    """Verify chains by SGLang's split kernel, which its backend keeps for AMD devices."""
    from sglang.kernels.ops.attention import verify_splitkv as module

    interpret(module)
    case = batch.case
    out = torch.empty(*batch.q.shape[:2], batch.v_draft.shape[2], dtype=batch.q.dtype)
    done = module.verify_splitkv_fwd(
        *_tensors(batch, out), None, True, None, case.num_draft, case.k_scale, case.v_scale, case.width**-0.5
    )
    assert done, "verify_splitkv_fwd does not cover this case"
    return out
