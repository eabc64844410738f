"""How ``make gpu`` calls the kernels of others: SGLang's for real, in the interpreter; those that need a device by
stand-ins written from their documentation, which show that tables, masks and lengths say what they should.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreter import interpret

from benchmarks import attention_peers
from benchmarks.attention_peers import Verify, packed_16
from benchmarks.draft_trees import Case, excess, make_batch, oracle

GQA = Case((70, 70), 7, heads=8, kv_heads=2)
CHAIN = Case((100, 100), 5, heads=8, kv_heads=2, chain=True)
MLA = Case((70, 70), 5, heads=3, width=80, value_width=64)


def drawn(case: Case) -> tuple[Verify, torch.Tensor]:
    """Draw a computation, and what it gives in float64."""
    batch = make_batch(case)
    if case.value_width:
        width = case.value_width
        batch = replace(batch, v_draft=batch.k_draft[..., :width], v_pool=batch.k_pool[..., :width])
    n = case.num_draft
    tensors = (batch.q, batch.k_draft, batch.v_draft, batch.k_pool, batch.v_pool, batch.kv_indptr)
    trees = batch.mask.view(-1, n, n)
    return Verify(*tensors, torch.cat(batch.token_slots), trees, case.width**-0.5, case.chain), oracle(batch)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend plainly: [n, HQ, D] to [S, HKV, D], and the natural log-sum-exp, [n, HQ]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,shd->qhs", q.float(), k) * scale
    scores = scores.masked_fill(~sees[:, None], float("-inf"))
    return torch.einsum("qhs,shd->qhd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1)


def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    *,
    q_seq_len: int,
    mask: torch.Tensor,
) -> None:
    assert (page_table.dtype, seq_lens.dtype, mask.dtype) == (torch.int32, torch.uint32, torch.uint16)
    assert mask.shape == (len(q), q_seq_len, (q_seq_len + 31) // 32 * 2)
    for b in range(len(q)):
        t = torch.arange(int(seq_lens.view(torch.int32)[b]))
        at = page_table[b].long()[t // page_size], t % page_size
        bits = mask[b].view(torch.int16).int() & 0xFFFF
        j = torch.arange(q_seq_len)
        draft = (bits[:, j // 16] >> (j % 16)) & 1 != 0
        sees = torch.cat([draft.new_ones(q_seq_len, len(t) - q_seq_len), draft], 1)
        output[b, 0], _ = attend(q[b, 0], k_cache[at], v_cache[at], sees, q.shape[-1] ** -0.5)


class PrefillWrapper:
    """FlashInfer's, with as much of ``plan`` as is used."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self, qo: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *sizes: int, **more: Any
    ) -> None:
        assert sizes[3] == 1
        assert (last == 1).all()
        self.planned, self.more = (qo.tolist(), kv.tolist(), indices.long()), more

    def run(self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        (qo, kv, indices), parts, at = self.planned, [], 0
        for b in range(len(qo) - 1):
            rows, slots = q[qo[b] : qo[b + 1]], indices[kv[b] : kv[b + 1]]
            cells = self.more["custom_mask"][at : at + len(rows) * len(slots)].view(len(rows), -1)
            at += cells.numel()
            parts.append(attend(rows, *(pool[slots, 0] for pool in pools), cells, self.more["sm_scale"])[0])
        return torch.cat(parts)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    qv: torch.Tensor | None = None,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    assert not causal
    assert return_softmax_lse
    if qv is not None:
        q, k_cache = torch.cat([qv, q], -1), torch.cat([v_cache, k_cache], -1)
    starts, parts = cu_seqlens_q.tolist(), []
    for b, length in enumerate(cache_seqlens.tolist()):
        rows, slots = q[starts[b] : starts[b + 1]], page_table[b, :length].long()
        assert len(rows) <= max_seqlen_q
        everything = torch.ones(len(rows), length, dtype=torch.bool)
        parts.append(attend(rows, k_cache[slots, 0], v_cache[slots, 0], everything, softmax_scale))
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts]).T, None


def merge_state_v2(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    share = torch.sigmoid(s_a - s_b)[..., None]  # [T, HQ, 1]
    return (share * v_a.float() + (1 - share) * v_b.float()).to(v_a.dtype), torch.logaddexp(s_a, s_b)


STAND_INS = {
    "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper},
    "flashinfer.xqa": {"xqa": xqa},
    "sgl_kernel": {"merge_state_v2": merge_state_v2},
    "sgl_kernel.flash_attn": {"flash_attn_with_kvcache": flash_attn_with_kvcache},
}


@pytest.mark.parametrize("case", [GQA, CHAIN, MLA, GQA._replace(num_draft=40)], ids=["tree", "chain", "mla", "40"])
@pytest.mark.parametrize("peer", ["flashinfer_prefill", "flashinfer_xqa", "fa3_cascade"])
def test_a_peer_is_asked_for_the_same_computation(peer: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    computation, truth = drawn(case)
    if case.value_width and peer == "flashinfer_xqa":
        return  # one width only
    # Two results of 16 bits are merged: one rounding more than of one.
    assert excess(getattr(attention_peers, peer)(computation)(), truth) <= 2.5


def test_bits_of_a_long_row_are_packed_in_words_of_16() -> None:
    trees = torch.zeros(1, 40, 40, dtype=torch.bool)
    trees[0, 3, [0, 15, 16, 39]] = True
    assert packed_16(trees).view(torch.int16)[0, 3].tolist() == [1 - (1 << 15), 1, 1 << 7, 0]


def test_what_is_not_covered_is_said() -> None:
    computation, _ = drawn(GQA)
    with pytest.raises(NotImplementedError, match="chains only"):
        attention_peers._sglang_split(computation, lambda *args: True)
    with pytest.raises(NotImplementedError, match="does not cover"):
        attention_peers._sglang_split(drawn(CHAIN)[0], lambda *args: False)()


@pytest.mark.host
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("peer", "case"),
    [
        ("sglang_extend", GQA),
        ("sglang_extend", MLA._replace(width=576, value_width=512)),
        ("sglang_verify_splitkv", CHAIN),
        ("sglang_verify_shared", MLA._replace(width=576, value_width=512, heads=16, chain=True)),
    ],
)
def test_sglangs_kernels_compute_the_same(peer: str, case: Case) -> None:
    from sglang.kernels.ops.attention import verify_mla, verify_splitkv

    interpret(verify_mla, verify_splitkv)
    computation, truth = drawn(case)
    assert excess(getattr(attention_peers, peer)(computation)(), truth) <= 2.5


SIGNATURES: dict[str, Callable[..., Any]] = {
    "flashinfer/xqa.py": xqa,
    "sgl_kernel/flash_attn.py": flash_attn_with_kvcache,
    "sgl_kernel/attention.py": merge_state_v2,
}


@pytest.mark.host
@pytest.mark.parametrize("file", SIGNATURES)
def test_the_stand_ins_have_parameters_of_the_real_ones(file: str) -> None:
    """Read from the source: without a CUDA driver the packages cannot be imported."""
    package = importlib.util.find_spec(file.partition("/")[0])
    if package is None or package.origin is None:
        pytest.skip("not installed")
    stand_in = SIGNATURES[file]
    source = ast.parse((Path(package.origin).parents[1] / file).read_text())
    [real] = [f for f in source.body if isinstance(f, ast.FunctionDef) and f.name == stand_in.__name__]
    theirs = [argument.arg for argument in real.args.args]
    mine = inspect.signature(stand_in).parameters.values()
    assert {p.name for p in mine} <= {*theirs, *(a.arg for a in real.args.kwonlyargs)}
    by_position = [p.name for p in mine if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert theirs[: len(by_position)] == by_position
