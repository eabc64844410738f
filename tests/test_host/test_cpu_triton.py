"""The CPU operators of speculation against SGLang's own Triton kernels, run in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_eagle3_ext.host.cpu import cache_locs, tree

pytestmark = pytest.mark.host

ORACLE = Path(__file__).parent.parent / "triton_oracle.py"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run the kernels once, in their own process."""
    path = tmp_path_factory.mktemp("oracle") / "cases.pt"
    subprocess.run([sys.executable, str(ORACLE), str(path)], check=True, timeout=900)
    return torch.load(path)


def test_trees_are_built_as_the_kernel_builds_them(oracle: dict[str, list[Any]]) -> None:
    for case in oracle["trees"]:
        batch, topk, steps, width, mode = case["shape"]
        mask = torch.ones_like(case["mask"])
        positions = torch.full_like(case["positions"], -9)
        index, first_child, sibling = torch.full((3, batch, width), -1)
        arguments = (case["parents"], case["kept"], case["lengths"], mask, positions)
        tree.build_tree(*arguments, index, first_child, sibling, topk, steps, width, mode)
        written = {"mask": mask, "positions": positions, "index": index, "first_child": first_child, "sibling": sibling}
        for name, tensor in written.items():
            assert torch.equal(tensor, case[name]), (case["shape"], name)


def test_trees_are_verified_as_the_kernel_verifies_them(oracle: dict[str, list[Any]]) -> None:
    deepest: dict[int, int] = {}
    for case in oracle["trees"]:
        batch, topk, steps, width, _ = case["shape"]
        predicts = torch.zeros_like(case["predicts"])
        accepted = torch.full_like(case["accepted"], -1)
        count = torch.full_like(case["count"], -9)
        links = (case["index"], case["first_child"], case["sibling"])
        returned = tree.verify_tree_greedy(
            predicts, accepted, count, case["candidates"], *links, case["wanted"], topk=topk
        )
        assert torch.equal(accepted, case["accepted"]), case["shape"]
        assert torch.equal(count, case["count"]), case["shape"]
        path = accepted[accepted >= 0].long()
        assert torch.equal(predicts[path], case["predicts"][path]), case["shape"]
        assert all(a is b for a, b in zip(returned, (predicts, accepted, count), strict=True))
        deepest[topk] = max(deepest.get(topk, 0), int(count.max()))
    assert min(deepest.values()) >= 3, f"the cases accept too little to mean anything: {deepest}"


def test_slots_are_kept_as_the_kernels_keep_them(oracle: dict[str, list[Any]]) -> None:
    for cases in oracle["slots"]:
        case = cases["draft"]
        slots, positions, mrope = (torch.full_like(case[k], -9) for k in ("slots", "positions", "mrope"))
        arguments = (case["rows"], case["table"], case["starts"], slots, case["topk"], case["steps"])
        cache_locs.assign_draft_cache_locs_contiguous(*arguments, positions, mrope)
        assert torch.equal(slots, case["slots"])
        assert torch.equal(positions, case["positions"])
        assert torch.equal(mrope, case["mrope"])

        case = cases["extend"]
        slots = cache_locs.gather_extend_cache_locs(
            req_pool_indices=case["rows"],
            req_to_token=case["table"],
            start_offset=case["starts"],
            end_offset=case["ends"],
            batch_size=len(case["rows"]),
            draft_token_num=0,
            device="cpu",
        )
        assert torch.equal(slots, case["slots"])

        case = cases["assign"]
        filled = case["table"].clone()
        arguments = (case["rows"], filled, case["starts"], case["ends"], case["slots"], len(case["rows"]))
        cache_locs.assign_req_to_token_pool(*arguments)
        assert torch.equal(filled, case["filled"])

        case = cases["front"]
        front = torch.zeros_like(case["front"])
        cache_locs.fill_front_out_cache_loc(case["counts"], case["window"], front)
        assert torch.equal(front, case["front"])

        case = cases["accept"]
        accepted = torch.zeros_like(case["accepted"])
        cache_locs.fill_accept_out_cache_loc(case["nodes"], case["window"], accepted, case["nodes"].numel())
        assert torch.equal(accepted, case["accepted"])

        case = cases["bonus"]
        bonus = torch.full_like(case["bonus"], -9)
        batch, stride = case["tokens"].shape
        cache_locs.fill_bonus_tokens(case["tokens"].flatten(), case["counts"], bonus, stride, batch)
        assert torch.equal(bonus, case["bonus"])


def test_the_cases_cover_ragged_windows(oracle: dict[str, list[Any]]) -> None:
    lengths = torch.cat([case["extend"]["ends"] - case["extend"]["starts"] for case in oracle["slots"]])
    assert lengths.unique().numel() > 5
    assert any(case["shape"][0] > 1 for case in oracle["trees"])
