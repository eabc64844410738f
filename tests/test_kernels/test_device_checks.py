"""The checks that ``make gpu`` runs before it takes times, in the interpreter here; and whether they can fail."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from interpreter import interpret
from sglang_eagle3_ext.kernels import fc_proj, norm_concat, split_merge, tree_verify_gqa, tree_verify_mla

from benchmarks import device_checks
from benchmarks.draft_trees import GQA_CASES, MLA_CASES

interpret(fc_proj, norm_concat, split_merge, tree_verify_gqa, tree_verify_mla)

CPU = torch.device("cpu")
TREES = {
    ("tree_verify_gqa", name)
    for name in ("nothing-committed", "everything", "each-request-cut-alone", "float32", "other requests in a replay")
} | {("tree_verify_mla", name) for name in ("prefix 0, one token", "pages of 16", "other requests in a replay")}
"""The others are run by the tests of their kernels."""
HERE = sorted(TREES | {check for check in device_checks.CHECKS if check[0] in ("fc_proj", "norm_concat")})


def test_every_case_of_the_kernels_tests_is_checked() -> None:
    trees = {check for check in device_checks.CHECKS if check[0].startswith("tree_verify")}
    cases = {("tree_verify_gqa", name) for name in GQA_CASES} | {("tree_verify_mla", name) for name in MLA_CASES}
    replays = {(kernel, "other requests in a replay") for kernel in ("tree_verify_gqa", "tree_verify_mla")}
    assert trees == cases | replays | {("tree_verify_gqa", "slots past 32 bits")}
    options = [*GQA_CASES.values(), *MLA_CASES.values()]
    assert {case.page_size for case in options} == {1, 16, 64}
    assert {case.dtype for case in options} == {torch.bfloat16, torch.float16, torch.float32}
    assert {case.kv_dtype for case in options} == {None, torch.float8_e4m3fn, torch.float8_e5m2}
    assert any(case.num_draft > 64 for case in options)
    assert all(any(getattr(case, option) for case in options) for option in ("window", "logit_cap", "sinks", "chain"))


@pytest.mark.parametrize("check", HERE, ids=" ".join)
def test_is_right_here(check: tuple[str, str]) -> None:
    row = device_checks.run_check(check, CPU)
    assert row["problem"] is None
    assert row["skipped"] is None
    assert row["error"] <= row["bar"]


def test_what_is_wrong_breaks_or_is_no_number_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.device) -> tuple[float, float]:
        raise RuntimeError("out of shared memory")

    cases = {"wrong": lambda _: (2.0, 1.5), "no number": lambda _: (float("nan"), 1.5), "broken": broken}
    monkeypatch.setattr(device_checks, "CHECKS", {("op", name): check for name, check in cases.items()})
    problems = {name: device_checks.run_check(("op", name), CPU)["problem"] for name in cases}
    assert "got an error of 2; expected at most 1.5" in problems["wrong"]
    assert "got an error of nan" in problems["no number"]
    assert problems["broken"] == "RuntimeError: out of shared memory"


def dies(_: torch.device) -> tuple[float, float]:
    os._exit(9)


def test_a_process_that_dies_breaks_the_checks_and_does_not_hang_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "CHECKS", {("op", "dies"): dies})
    fork = multiprocessing.get_context("fork")  # which has the patched table
    monkeypatch.setattr(device_checks.multiprocessing, "get_context", lambda _: fork)
    (row,) = device_checks.run_checks(CPU)
    assert row["problem"].startswith("BrokenProcessPool")


def test_a_scale_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_checks.verify_gqa
    monkeypatch.setattr(device_checks, "verify_gqa", partial(right, k_scale=1.0))
    assert device_checks.run_check(("tree_verify_gqa", "everything"), CPU)["problem"] is not None


def test_a_request_that_depends_on_its_neighbours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_checks.verify_gqa
    monkeypatch.setattr(device_checks, "verify_gqa", lambda batch: right(batch) * len(batch.case.lengths))
    row = device_checks.run_check(("tree_verify_gqa", "each-request-cut-alone"), CPU)
    assert "stands beside it" in row["problem"]


CARRIED = """
import importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
import sglang
from sglang.kernels.ops.attention import extend_attention, verify_mla, verify_splitkv
assert sglang.__file__.startswith(sys.argv[1]), sglang.__file__
assert not [name for name in sys.modules if name.startswith("sglang.srt.") and name.count(".") > 2]
assert importlib.metadata.version("sglang") == "1.2.3"
print(*(f.__name__ for f in (
    extend_attention.extend_attention_fwd, verify_splitkv.verify_splitkv_fwd, verify_mla.verify_shared_kv_fwd)))
"""


@pytest.mark.host
def test_carried_kernels_need_nothing_else_of_sglang(tmp_path: Path) -> None:
    import sglang

    from benchmarks.carry_peers import carry

    for _ in range(2):  # the second time over the first
        carry(Path(sglang.__file__).parent, "1.2.3", tmp_path)
    done = subprocess.run([sys.executable, "-c", CARRIED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["extend_attention_fwd", "verify_splitkv_fwd", "verify_shared_kv_fwd"]
