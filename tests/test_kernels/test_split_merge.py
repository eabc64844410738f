"""Plan, ancestor bits and merge of ``split_merge``, against counts and sums written from their definitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpret
from sglang_eagle3_ext.kernels import split_merge
from sglang_eagle3_ext.kernels.arch import H200, chunk_target
from sglang_eagle3_ext.kernels.split_merge import (
    TILE,
    SplitPlan,
    allocate_plan,
    chain_bits,
    merge,
    merge_torch,
    pack_mask,
    pack_mask_torch,
    plan_splits,
    plan_splits_torch,
)

from benchmarks.draft_trees import offsets

interpret(split_merge)

CPU = torch.device("cpu")
PLANNERS = pytest.mark.parametrize("planner", [plan_splits, plan_splits_torch], ids=["kernel", "twin"])
LENGTHS = {
    "nothing": (0,),
    "one-token": (1,),
    "a-tile-and-one": (TILE + 1,),
    "empty-between": (500, 0, 64, 0, 1),
    "one-long-among-short": (32768, *[512] * 7),
    "33-requests": tuple(37 * i * i for i in range(33)),
}


def chunks_of(plan: SplitPlan, lengths: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Read a plan as a kernel does: per request the tiles of each of its chunks."""
    owners, first, count = plan.slot_request.tolist(), plan.first_slot.tolist(), plan.num_chunks.tolist()
    chunks: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for slot, b in enumerate(owners):
        if b >= 0:
            tiles, i = -(-lengths[b] // TILE), slot - first[b]
            assert 0 <= i < count[b]
            chunks[b].append((tiles * i // count[b], tiles * (i + 1) // count[b]))
    return chunks


@PLANNERS
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("target", [1, 7, 16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_chunks_cover_every_tile_once(
    planner: Any, lengths: tuple[int, ...], target: int, batch_invariant: bool
) -> None:
    plan = planner(offsets(lengths), target=target, min_chunk=TILE, batch_invariant=batch_invariant)
    for request, length in zip(chunks_of(plan, lengths), lengths, strict=True):
        covered = [tile for lo, hi in request for tile in range(lo, hi)]
        assert request, "a request without committed tokens still has draft tokens"
        assert covered == list(range(-(-length // TILE)))


@PLANNERS
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "chunks", "most", "bar"),
    [
        pytest.param(LENGTHS["one-long-among-short"], 8, 16, 35, 1.1, id="32k"),
        pytest.param((131072, *[1024] * 15), 8, 16, 137, 1.1, id="128k"),
        # A latent's chunks are short: four tiles and a third would be ideal, and tiles are whole.
        pytest.param(LENGTHS["one-long-among-short"], 1, 132, 5, None, id="32k-latent"),
        pytest.param((131072, *[1024] * 15), 1, 132, 18, 1.1, id="128k-latent"),
    ],
)
def test_one_long_request_does_not_wait_for_itself(
    planner: Any,
    lengths: tuple[int, ...],
    kv_heads: int,
    chunks: int,
    most: int,
    bar: float | None,
    record: Callable[..., None],
) -> None:
    target = chunk_target(kv_heads, arch=H200)
    cut = chunks_of(planner(offsets(lengths), target=target), lengths)
    ideal = sum(-(-length // TILE) for length in lengths) / target
    longest = max(hi - lo for request in cut for lo, hi in request)
    assert (target, longest) == (chunks, most)
    assert bar is None or longest <= bar * ideal
    assert longest < ideal + 1
    if planner is plan_splits:
        share = round(longest / ideal, 3)
        record("balance", lengths=list(lengths), kv_heads=kv_heads, longest_chunk_of_ideal=share, bar=bar)


def test_memory_that_is_not_written_shows() -> None:
    """What all tests here rely on: fresh memory of the kernels' wrappers is poisoned."""
    plan = allocate_plan(2, target=3, batch_invariant=False, device=CPU)
    assert plan.slot_request.tolist() == [101] * 5
    scope: dict[str, Any] = {"__name__": "sglang_eagle3_ext.kernels.any"}
    exec("import torch\nlike = torch.empty_like(torch.zeros(3))\nmade = torch.empty(2, 3)", scope)
    assert scope["like"].isnan().all()
    assert scope["made"].isnan().all()


@PLANNERS
def test_a_long_context_alone_fills_the_device(planner: Any) -> None:
    for rows_tiles, kv_heads in ((1, 8), (2, 8), (1, 2)):
        plan = planner(offsets((32768,)), target=chunk_target(rows_tiles * kv_heads, arch=H200))
        assert int(plan.num_chunks) * rows_tiles * kv_heads >= 120


@PLANNERS
def test_short_chunks_are_not_made(planner: Any) -> None:
    plan = planner(offsets((1000, 200)), target=100, min_chunk=256)
    assert plan.num_chunks.tolist() == [4, 1]


@PLANNERS
def test_a_request_cut_alone_is_cut_the_same_in_every_batch(planner: Any) -> None:
    counts = [
        planner(offsets(lengths), target=5, min_chunk=TILE, batch_invariant=True).num_chunks[0]
        for lengths in ((900,), (900, 5), (900, 100_000, 3))
    ]
    assert counts == [5, 5, 5]


@PLANNERS
def test_a_plan_is_written_again_into_its_buffers(planner: Any) -> None:
    """As a CUDA graph replays: what a longer batch left behind must be gone."""
    buffers = allocate_plan(3, target=6, batch_invariant=False, device=CPU)
    planner(offsets((9000, 9000, 9000)), target=6, out=buffers)
    assert (buffers.slot_request >= 0).sum() > 3
    again = planner(offsets((0, 300, 0)), target=6, out=buffers)
    assert again is buffers
    assert buffers.slot_request.tolist() == [0, 1, 1, 2, *[-1] * 5]


def full_mask(sees: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Lay the trees out as SGLang's FULL_MASK, with noise over the context, which nobody may read."""
    parts = [torch.cat([torch.rand(len(s), n) < 0.5, s], dim=1).flatten() for s, n in zip(sees, lengths, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("packer", [pack_mask, pack_mask_torch], ids=["kernel", "twin"])
@pytest.mark.parametrize("num_draft", [1, 7, 13, 63, 64, 65, 128])
def test_bits_say_what_the_mask_says(packer: Any, num_draft: int, record: Callable[..., None]) -> None:
    torch.manual_seed(num_draft)
    lengths = (5, 0, 70)
    sees = torch.rand(3, num_draft, num_draft) < 0.5
    expected = [
        [sum(1 << j for j, seen in enumerate(row[at : at + 64]) if seen) for at in range(0, num_draft, 64)]
        for request in sees.tolist()
        for row in request
    ]
    signed = [[word - (1 << 64) if word >> 63 else word for word in words] for words in expected]
    indptr = offsets(lengths)
    packed = packer(sees.flatten(), indptr, num_draft)
    assert packed.tolist() == signed
    if packer is pack_mask:
        about = {"kernel": "split_merge", "case": f"bits of {num_draft} draft tokens", "dtype": packed.dtype}
        record("errors", **about, oracle="the mask, cell by cell", result=packed)
    assert packer(full_mask(sees, lengths).to(torch.uint8), indptr, num_draft, layout="full").tolist() == signed


@pytest.mark.parametrize("num_draft", [1, 2, 63, 64, 65, 100, 129])
def test_a_chain_sees_all_before_it(num_draft: int) -> None:
    lower = torch.ones(num_draft, num_draft, dtype=torch.bool).tril().repeat(2, 1).flatten()
    assert torch.equal(chain_bits(2, num_draft, CPU), pack_mask_torch(lower, offsets((3, 4)), num_draft))


@pytest.mark.parametrize("merger", [merge, merge_torch], ids=["kernel", "twin"])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (5, 40), (8, 128)])
def test_merges_as_one_softmax(merger: Any, heads: int, width: int, record: Callable[..., None]) -> None:
    torch.manual_seed(heads)
    plan = plan_splits_torch(offsets((600, 0, 1300)), target=6, min_chunk=TILE)
    slots, n = len(plan.slot_request), 3
    partial_out = torch.randn(slots, n, heads, width)
    partial_lse = 5 * torch.randn(slots, n, heads)
    partial_lse[2, 1] = -1.0e30  # a chunk of which one row sees nothing
    partial_out[plan.slot_request < 0] = partial_lse[plan.slot_request < 0] = float("nan")
    out = torch.full((3 * n, heads, width), 7.0)
    assert merger(partial_out, partial_lse, plan, out) is out
    assert plan.num_chunks.tolist() == [2, 1, 4]
    for b, (first, count) in enumerate(zip(plan.first_slot.tolist(), plan.num_chunks.tolist(), strict=True)):
        rows = out[b * n : (b + 1) * n]
        if count == 1:
            assert (rows == 7.0).all(), "written by its only chunk"
            continue
        mass = torch.exp2(partial_lse[first : first + count].double())[..., None]
        expected = (mass * partial_out[first : first + count].double()).sum(0) / mass.sum(0)
        torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)
    if merger is merge:
        case = f"merge, {heads} heads of {width}"
        record("errors", kernel="split_merge", case=case, dtype=out.dtype, oracle="float64", result=out)


@pytest.mark.host
@pytest.mark.parametrize(("topk", "steps", "width"), [(1, 3, 4), (2, 3, 7), (4, 5, 13), (4, 4, 20)])
def test_reads_the_masks_that_sglang_builds(topk: int, steps: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own tree kernel, in both layouts, against a walk along the parents that it returns beside the mask."""
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    interpret(spec_tree)
    torch.manual_seed(width)
    random.seed(width)
    lengths = (5, 0, 9)
    p, index = torch.randn(3, 7).softmax(-1).topk(topk, dim=-1)
    hidden, scores, results = torch.randn(3, 2), None, ([], [], [])
    for step in range(steps):
        _, hidden, scores, info = select_top_k_tokens(step, p, index, hidden, scores, topk)
        for collected, part in zip(results, info, strict=True):
            collected.append(part)
        p, index = torch.randn(3 * topk, 7).softmax(-1).topk(topk, dim=-1)
    parents, kept, _ = organize_draft_results(*results, width)
    for mode, layout in ((spec_tree.TreeMaskMode.FULL_MASK, "full"), (spec_tree.TreeMaskMode.QLEN_ONLY, "qlen_only")):
        cells = 3 * width * width + (sum(lengths) * width if layout == "full" else 0)
        mask = torch.ones(cells, dtype=torch.bool)
        position = torch.empty(3 * width, dtype=torch.long)
        retrieve, first_child, sibling = torch.full((3, 3, width), -1, dtype=torch.long)
        spec_tree.sgl_build_tree_kernel_triton(
            parents,
            kept,
            torch.tensor(lengths),
            mask,
            position,
            retrieve,
            first_child,
            sibling,
            topk,
            steps,
            width,
            mode,
        )
        bits = pack_mask(mask, offsets(lengths), width, layout=layout)
        for b in range(3):
            parent = [-1] * width
            for node in range(width):
                child = int(first_child[b, node])
                while child != -1:
                    parent[child] = node
                    child = int(sibling[b, child])
            for node in range(width):
                walk, at = 0, node
                while at != -1:
                    walk |= 1 << at
                    at = parent[at]
                assert int(bits[b * width + node]) == walk, (layout, b, node)


GOOD_PLAN: dict[str, Any] = {"kv_indptr": offsets((3,)), "target": 4}
GOOD_MASK: dict[str, Any] = {"mask": torch.ones(16, dtype=torch.bool), "kv_indptr": offsets((3,)), "num_draft": 4}
OTHER = allocate_plan(1, target=5, batch_invariant=False, device=CPU)
REFUSALS = {
    "indptr": (plan_splits, GOOD_PLAN | {"kv_indptr": offsets((3,)).long()}, r"kv_indptr: got \[2\] int64"),
    "no-request": (plan_splits, GOOD_PLAN | {"kv_indptr": offsets(())}, r"kv_indptr: got \[1\]"),
    "target": (plan_splits, GOOD_PLAN | {"target": 0}, "target: got 0"),
    "min-chunk": (plan_splits, GOOD_PLAN | {"min_chunk": 100}, "min_chunk: got 100 keys; expected .* multiple of 64"),
    "plan-out": (plan_splits, GOOD_PLAN | {"out": OTHER}, r"out.slot_request: got \[6\] .*expected \[5\]"),
    "layout": (pack_mask, GOOD_MASK | {"layout": "packed"}, "layout: got 'packed'; expected one of qlen_only, full"),
    "num-draft": (pack_mask, GOOD_MASK | {"num_draft": 0}, "num_draft: got 0"),
    "mask-length": (pack_mask, GOOD_MASK | {"num_draft": 5}, r"mask: got \[16\] bool .*at least 25"),
    "mask-dtype": (pack_mask, GOOD_MASK | {"mask": torch.ones(16)}, "mask: got .*cells of one byte"),
    "mask-device": (pack_mask, GOOD_MASK | {"mask": torch.ones(16, dtype=torch.bool, device="meta")}, "on meta"),
    "bits-out": (pack_mask, GOOD_MASK | {"out": torch.zeros(4, 2, dtype=torch.int64)}, r"out: got \[4, 2\]"),
}


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_rejects(function: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_merge_rejects_partials_of_another_plan() -> None:
    out = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"(?s)partial_out: got .*\[6, 4, 2, 8\].*partial_lse: got .*\[6, 4, 2\]"):
        merge(torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2), OTHER, out)
    with pytest.raises(ValueError, match="out: got"):
        merge(torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2), OTHER, out.transpose(1, 2))
