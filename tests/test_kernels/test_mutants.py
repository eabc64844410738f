"""The tests of the tree kernels, tested: each of many single wrong changes to a kernel's source breaks their bar.

A mutant is a copy of a kernel file with one expression replaced. It has to be told from the original by the first of a
few small cases, as the oracle tests would tell it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreter import interpret
from sglang_eagle3_ext.kernels import split_merge, tree_verify_gqa, tree_verify_mla

from benchmarks.draft_trees import Batch, Case, excess, make_batch, oracle

SHARED = ("chunk_bounds", "merge", "online_softmax_step", "pack_mask", "plan_splits")
"""What the two tree kernels and the calls below take from ``split_merge``."""

E4M3 = torch.float8_e4m3fn
GQA_CASES = {
    "ragged": Case((130, 0, 33), 5, heads=4, kv_heads=2),
    "two-words": Case((33, 0), 66, heads=1),
    "pages": Case((67, 40), 5, page_size=16),
    "fp8": Case((70,), 5, kv_dtype=E4M3, k_scale=0.4, v_scale=2.0),
    "window": Case((200, 64), 5, window=70),
    "cap": Case((70,), 5, logit_cap=3.0, size=2.0),
    "sinks": Case((200,), 5, sinks=True),
    "padded-widths": Case((70,), 5, width=96, value_width=80),
}
MLA = {"heads": 3, "width": 80, "value_width": 64}
MLA_CASES = {
    "ragged": Case((130, 0, 33), 5, **MLA),
    "two-words": Case((33, 0), 66, 1, width=80, value_width=64),
    "pages": Case((67, 40), 5, page_size=16, **MLA),
    "fp8": Case((70,), 5, kv_dtype=E4M3, k_scale=0.4, **MLA),
}

ONCE = """top = tl.where(i_c == 0, sink, top)
            total = tl.where(i_c == 0, 1.0, total)"""
GQA_MUTANTS = [
    ("o_h = i_hk * G + o_row % G", "o_h = i_hk * G + o_row % G * 0", "ragged"),
    ("m_key = key < hi", "m_key = key <= hi", "ragged"),
    ("+ i_h * stride_k_h + slot", "+ 0 * stride_k_h + slot", "ragged"),
    ("+ i_h * stride_v_h + slot", "+ 0 * stride_v_h + slot", "ragged"),
    ("i_draft[None, :] * stride_kd_t + i_h * stride_kd_h", "i_draft[None, :] * stride_kd_t", "ragged"),
    ("i_draft[:, None] * stride_vd_t + i_h * stride_vd_h", "i_draft[:, None] * stride_vd_t", "ragged"),
    ("i_draft = (i_b * num_draft + o_draft)", "i_draft = (0 * num_draft + o_draft)", "ragged"),
    ("if i_c == chunks - 1:", "if i_c >= 0:", "ragged"),
    ("m_draft = o_draft < num_draft", "m_draft = o_draft < num_draft - 1", "ragged"),
    ("& 1) != 0) & m_draft", "& 1) >= 0) & m_draft", "ragged"),
    ("top + tl.log2(bar), -1.0e30", "top, -1.0e30", "ragged"),
    ("row = (i_slot * num_draft + o_token)", "row = (i_slot + o_token)", "ragged"),
    ("acc = acc / bar[:, None]", "acc = acc / (bar + 0.05)[:, None]", "ragged"),
    ("o_draft = i_w * WORD + o_bit", "o_draft = o_bit", "two-words"),
    ("KV_SLOTS + start + key // PAGE,", "KV_SLOTS + start + key // PAGE + 1,", "pages"),
    ("* PAGE + key % PAGE", "* PAGE", "pages"),
    ("start = tl.load(PAGE_INDPTR + i_b)", "start = tl.load(PAGE_INDPTR + i_b) * 0", "pages"),
    ("inner * k_scale", "inner", "fp8"),
    ("acc *= v_scale", "acc *= 1.0", "fp8"),
    ("key[None, :] >= oldest[:, None]", "key[None, :] > oldest[:, None]", "window"),
    ("depth = tl.full([BLOCK_M], -1, tl.int32)", "depth = tl.full([BLOCK_M], 0, tl.int32)", "window"),
    ("(length - window) // BLOCK_S * BLOCK_S", "(length - window) // BLOCK_S * BLOCK_S + BLOCK_S", "window"),
    ("outer * (1.0 - 2.0 /", "outer * (1.0 - 1.9 /", "cap"),
    ("tl.float32) * 1.4426950408889634", "tl.float32)", "sinks"),
    ("total = tl.where(i_c == 0, 1.0, total)", "total = tl.where(i_c == 0, 0.5, total)", "sinks"),
    (ONCE, ONCE.replace("i_c == 0", "i_c >= 0"), "sinks"),
    ("m_d = o_d < D", "m_d = o_d < D - 1", "padded-widths"),
    ("m_dv = o_dv < DV", "m_dv = o_dv < DV - 1", "padded-widths"),
]
MLA_MUTANTS = [
    ("m_key = key < hi", "m_key = key <= hi", "ragged"),
    ("(o_row % HQ).to(tl.int64) * stride_q_h", "(o_row % HQ * 0).to(tl.int64) * stride_q_h", "ragged"),
    ("scores = tl.dot(q_pe, k_pe,", "scores = 0.0 * tl.dot(q_pe, k_pe,", "ragged"),
    ("if i_c == chunks - 1:", "if i_c >= 0:", "ragged"),
    ("LATENT_DRAFT + (i_b * num_draft + o_draft)", "LATENT_DRAFT + (0 * num_draft + o_draft)", "ragged"),
    ("& 1) != 0) & m_draft", "& 1) >= 0) & m_draft", "ragged"),
    ("top + tl.log2(total), -1.0e30", "top, -1.0e30", "ragged"),
    ("p_columns + C + tl.arange(0, R)", "p_columns + tl.arange(0, R)", "ragged"),
    ("+ i_d // WORD, mask", "+ 0, mask", "two-words"),
    ("key // PAGE, mask", "key // PAGE + 1, mask", "pages"),
    ("inner * kv_scale", "inner", "fp8"),
    ("acc *= kv_scale", "acc *= 1.0", "fp8"),
]
SHARED_MUTANTS = [
    ("lo = (tiles * i_c // chunks) * TILE", "lo = (tiles * i_c // chunks) * TILE + 1", "ragged"),
    ("tl.minimum((tiles * (i_c + 1) // chunks) * TILE, length)", "(tiles * (i_c + 1) // chunks) * TILE", "ragged"),
    ("total = total * fade + tl.sum(weight, 1)", "total = total + tl.sum(weight, 1)", "ragged"),
    ("acc * fade[:, None], input_precision", "acc, input_precision", "ragged"),
    ("scores = tl.where(keep, scores, -1.0e30)", "scores = scores", "ragged"),
    ("weight = tl.exp2(lse - new_top)", "weight = tl.exp(lse - new_top)", "ragged"),
    ("acc = acc * fade[:, None] + part * weight[:, None]", "acc = acc + part * weight[:, None]", "ragged"),
    ("for i_c in range(0, chunks):", "for i_c in range(1, chunks):", "ragged"),
    ("tl.maximum((tiles + share - 1) // share, 1)", "tl.maximum((tiles + share - 1) // share, 0)", "ragged"),
    ("tl.where(o_b < i_b, chunks, 0)", "tl.where(o_b <= i_b, chunks, 0)", "ragged"),
    ("one << o_bit.to(tl.int64)[None, :], 0)", "one << (o_bit ^ 1).to(tl.int64)[None, :], 0)", "ragged"),
    ("o_column = i_w * WORD + o_bit", "o_column = o_bit", "two-words"),
]
MUTANTS = [
    *((tree_verify_gqa, *mutant) for mutant in GQA_MUTANTS),
    *((tree_verify_mla, *mutant) for mutant in MLA_MUTANTS),
    *((split_merge, *mutant) for mutant in SHARED_MUTANTS),
]
_number = itertools.count()
Load = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Import copies of kernel files, changed or not, interpreted, and forget them afterwards."""
    names: list[str] = []

    def copy(module: ModuleType, old: str = "", new: str = "") -> ModuleType:
        source = Path(module.__file__ or "").read_text()
        assert source.count(old) == 1 or not old, f"{old!r} stands {source.count(old)} times in {module.__name__}"
        name = f"{module.__name__}_copy_{next(_number)}"
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(source.replace(old, new) if old else source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        sys.modules[name] = fresh
        names.append(name)
        spec.loader.exec_module(fresh)
        interpret(fresh)
        return fresh

    yield copy
    for name in names:
        del sys.modules[name]


def result_of(batch: Batch, kernel: ModuleType, shared: ModuleType) -> torch.Tensor:
    """Plan, pack and attend with the functions of two modules."""
    for name in SHARED:
        if hasattr(kernel, name):
            setattr(kernel, name, getattr(shared, name))
    case = batch.case
    plan = shared.plan_splits(batch.kv_indptr, target=8, min_chunk=64)
    bits = shared.pack_mask(batch.mask, batch.kv_indptr, case.num_draft)
    if hasattr(kernel, "tree_verify_gqa"):
        return batch.call(kernel.tree_verify_gqa, plan, bits)
    return kernel.tree_verify_mla(
        batch.q,
        batch.k_draft[:, 0],
        batch.k_pool[:, 0],
        batch.kv_indptr,
        batch.kv_slots,
        bits,
        plan,
        latent_width=batch.v_draft.shape[2],
        scale=1 / math.sqrt(case.width),
        kv_scale=case.k_scale,
        page_size=case.page_size,
        page_indptr=batch.page_indptr,
    )


def batch_for(kernel: ModuleType, name: str) -> Batch:
    """Draw a case; of MLA the values are the front of the keys."""
    case = GQA_CASES[name] if kernel is tree_verify_gqa else MLA_CASES[name]
    batch = make_batch(case if kernel is tree_verify_gqa else case._replace(v_scale=case.k_scale))
    if kernel is tree_verify_mla:
        batch = dataclasses.replace(batch, v_draft=batch.k_draft[..., :64], v_pool=batch.k_pool[..., :64])
    # A mutant that runs past the end of a request finds numbers of nobody's slots there, no memory of others.
    return dataclasses.replace(batch, kv_slots=torch.cat([batch.kv_slots, batch.kv_slots.new_zeros(128)]))


IDS = [f"{module.__name__.rpartition('.')[2]}: {' '.join(new.split())}" for module, _, new, _ in MUTANTS]


def apart(measure: Callable[[], float]) -> float:
    """Measure in a process of its own; NaN where that crashes, since a mutant may write where nothing is."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the numbers that a mutant reads from nowhere
            sender.send(measure())

    process = context.Process(target=work)
    process.start()
    process.join(timeout=120)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail("the mutant was not done after 120 s")  # which tells nothing about its numbers
    if process.exitcode is not None and process.exitcode < 0:
        return math.nan
    assert process.exitcode == 0, "the mutant raised; see above"
    return float(receiver.recv())


@pytest.mark.parametrize(("module", "old", "new", "case"), MUTANTS, ids=IDS)
def test_a_mutant_is_caught(module: ModuleType, old: str, new: str, case: str, load: Load) -> None:
    kernel = tree_verify_gqa if module is split_merge else module
    batch = batch_for(kernel, case)
    shared = load(split_merge, old, new) if module is split_merge else load(split_merge)
    mutant = load(kernel, *(() if module is split_merge else (old, new)))
    error = apart(lambda: excess(result_of(batch, mutant, shared), oracle(batch)))
    assert not error <= 2.0, error  # NaN is an error, too


@pytest.mark.parametrize("kernel", [tree_verify_gqa, tree_verify_mla], ids=["gqa", "mla"])
def test_a_copy_without_a_change_passes(kernel: ModuleType, load: Load) -> None:
    copy, shared = load(kernel), load(split_merge)
    for name in GQA_CASES if kernel is tree_verify_gqa else MLA_CASES:
        batch = batch_for(kernel, name)
        assert excess(result_of(batch, copy, shared), oracle(batch)) <= 2.0, name
