"""The benchmarks of ``fc_proj`` and ``norm_concat`` as far as they run without a GPU, and what decides who serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang_eagle3_ext.kernels.arch import H200, arch_of, implementation_for

from benchmarks import kernel_bench

ROOT = Path(__file__).parents[2]


def run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *flags]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("op", ["fc_proj", "norm_concat"])
def test_smoke_checks_every_provider_and_leaves_rows(op: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = run(f"bench_{op}", "--smoke", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["schema"] == 1
    assert [row["provider"] for row in result["rows"]] == ["torch", "ours"]
    for row in result["rows"]:
        assert row["op"] == op
        assert 0 <= row["max_err"] <= row["budget"]
        assert row["p50_us"] is None, "a time from the interpreter means nothing"
        assert row["provider"] in done.stdout


def test_times_need_a_gpu() -> None:
    done = run("bench_norm_concat")
    assert done.returncode == 1
    assert done.stderr.startswith("norm_concat: got no CUDA device; expected one")


def test_what_is_wrong_is_not_timed() -> None:
    truth = torch.ones(4, dtype=torch.float64)
    providers = {"torch": lambda: torch.ones(4).half(), "wrong": lambda: torch.full((4,), 1.01).half()}
    prepared = kernel_bench.Prepared(providers, truth, 8)
    with pytest.raises(RuntimeError, match=r"op, shape, wrong: got an error of 9\.766e-03; expected at most 4\.88"):
        kernel_bench.measure("op", "shape", prepared, "wrong", None)


def test_twins_serve_on_the_cpu_unless_the_interpreter_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert arch_of(cpu) == H200
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert implementation_for(cpu) == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert implementation_for(cpu) == "triton"
    assert implementation_for(torch.device("meta")) == "torch"
