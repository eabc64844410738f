"""Prove and time every kernel on the CUDA device at hand, in less than six minutes.

    python -m benchmarks.gpu [--minutes 5.5] [--out FOLDER]

For every shape, one operator after the other in turn: each provider's result against float64; ours captured in a CUDA
graph and replayed over poisoned output, and repeated to catch races, both to the bit; then the times of all. What a
missing peer or the end of the time leaves out is named in the result, as is what failed. Leaves
``gpu-<device>-<date>.json`` and prints the table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.kernel_bench import ROOT, Prepared, machine, measure, print_table, times_us
from sglang_eagle3_ext import __version__

OPERATORS: dict[str, tuple[str, ...]] = {
    "tree_verify_mla": ("sglang_extend", "sglang_verify_shared"),
    "tree_verify_gqa": (
        "sglang_extend",
        "sglang_verify_splitkv",
        "flashinfer_prefill",
        "flashinfer_xqa",
        "fa3_cascade",
    ),
    "fc_proj": (),
    "norm_concat": (),
}
"""What to run, with the peers that not every machine or shape has: a missing one is named in the result.

Each has a module ``bench_<name>`` with ``SHAPES`` and ``prepare``, and ``flops`` where not the bytes alone may bind."""

REPETITIONS = 200

Row = dict[str, Any]


def benchmarks_of(operators: Collection[str]) -> dict[str, ModuleType]:
    """Import the benchmark of every operator."""
    return {op: importlib.import_module(f"benchmarks.bench_{op}") for op in operators}


def in_turn(shapes: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Give operators' shapes in turn, each list spread evenly, so that an early end leaves something of everything.

    A list is taken in the order of its positions' bits read backwards: first, middle, quarters, eighths.
    """

    def spread(names: Sequence[str]) -> list[str]:
        bits = max(1, (len(names) - 1).bit_length())
        order = sorted(range(2**bits), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
        return [names[i] for i in order if i < len(names)]

    rounds = itertools.zip_longest(*([(op, name) for name in spread(names)] for op, names in shapes.items()))
    return (pair for each in rounds for pair in each if pair is not None)


def destination(folder: Path, device: str, day: datetime.date) -> Path:
    """Name the result; an earlier one of the same day keeps its name."""
    stem = f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-{day.isoformat()}"
    names = itertools.chain([f"{stem}.json"], (f"{stem}-{i}.json" for i in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def skipped(op: str, shape: str, provider: str, reason: str) -> Row:
    """Make the row of something that was not measured."""
    empty = ("dtype", "p20_us", "p50_us", "p80_us", "gbps", "of_copy", "max_err", "budget", "of_roofline")
    return {"op": op, "shape": shape, "provider": provider, "skipped": reason} | dict.fromkeys(empty)


def of_roofline(row: Row, nbytes: int, flops: int, copy_gbps: float, matmul_tflops: float) -> float | None:
    """Say what part of a provider's time the device would need for the bytes and products alone."""
    if row["p50_us"] is None:
        return None
    floor_us = max(nbytes / copy_gbps / 1e3, flops / matmul_tflops / 1e6)
    return round(floor_us / row["p50_us"], 3)


def differences_in_a_graph(call: Callable[[], torch.Tensor]) -> int:
    """Capture a call, poison what it writes, replay it, and count the elements that differ from a plain call's."""
    expected = call().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    result.fill_(float("nan"))
    graph.replay()
    return int((result != expected).sum())


def differences_in_repetitions(call: Callable[[], torch.Tensor], repetitions: int) -> int:
    """Repeat a call and count the elements that ever differ from the first result; ours are deterministic."""
    expected = call().clone()
    differences = torch.zeros((), dtype=torch.int64, device=expected.device)
    for _ in range(repetitions):
        differences += (call() != expected).sum()
    return int(differences)


def matmul_tflops(device: torch.device) -> float:
    """Measure what a product of two bf16 matrices of 8192 squared reaches, in TFLOP/s."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * 8192**3 / times_us(lambda: a @ a)[1] / 1e6


def run_shape(
    op: str, name: str, prepared: Prepared, peers: Sequence[str], flops: int, about: Mapping[str, Any]
) -> tuple[list[Row], list[str]]:
    """Check and time everyone who computes a shape.

    Args:
        op: the operator.
        name: the shape.
        prepared: of the operator's benchmark.
        peers: providers that may be missing.
        flops: operations of the shape's matrix products.
        about: the machine, with its ``copy_gbps`` and ``matmul_tflops``; without the first there are no times.

    Returns:
        A row per provider, and what went wrong. One provider that breaks costs only its own row: the machine may not
        be at hand again.
    """
    rows: list[Row] = []
    problems: list[str] = []
    for provider, call in prepared.providers.items():
        try:
            [row] = measure(op, name, prepared, [provider], about["copy_gbps"])
            if about["copy_gbps"] is not None:
                row["of_roofline"] = of_roofline(
                    row, prepared.nbytes, flops, about["copy_gbps"], about["matmul_tflops"]
                )
                if provider.startswith("ours"):
                    row["differences_in_a_graph"] = differences_in_a_graph(call)
                    row["differences_in_repetitions"] = differences_in_repetitions(call, REPETITIONS)
                    problems += [
                        f"{op}, {name}, {provider}: got {row[check]} {check.replace('_', ' ')}; expected none."
                        for check in ("differences_in_a_graph", "differences_in_repetitions")
                        if row[check]
                    ]
        except Exception as problem:
            problems.append(f"{op}, {name}, {provider}: {type(problem).__name__}: {str(problem)[-400:]}")
            row = skipped(op, name, provider, type(problem).__name__)
        rows.append(row)
    rows += [
        skipped(op, name, peer, "not installed here, not for this shape, or not written yet")
        for peer in peers
        if peer not in prepared.providers
    ]
    return rows, problems


def main() -> None:
    """Run everything that fits the time, leave the JSON, and exit with 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.5, help="no shape is begun after this (5.5)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "gpu: got no CUDA device; expected one. Run this on a machine that has one.\n")
    end = time.monotonic() + 60 * args.minutes
    device = torch.device("cuda")
    benches = benchmarks_of(OPERATORS)
    about = machine(device) | {"matmul_tflops": round(matmul_tflops(device), 1)}
    rows: list[Row] = []
    problems: list[str] = []
    for op, name in tqdm(list(in_turn({op: list(bench.SHAPES) for op, bench in benches.items()})), desc="gpu"):
        if time.monotonic() > end:
            rows.append(skipped(op, name, "all", f"{args.minutes} minutes were over"))
            continue
        bench = benches[op]
        flops = bench.flops(bench.SHAPES[name]) if hasattr(bench, "flops") else 0
        try:
            prepared = bench.prepare(bench.SHAPES[name], device, torch.bfloat16)
        except Exception as problem:
            problems.append(f"{op}, {name}: {type(problem).__name__}: {str(problem)[-400:]}")
            rows.append(skipped(op, name, "all", type(problem).__name__))
            continue
        of_shape, wrong = run_shape(op, name, prepared, OPERATORS[op], flops, about)
        rows += of_shape
        problems += wrong
        del prepared
        torch.cuda.empty_cache()
    print_table(rows)
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    result = {"schema": 1, "git_sha": sha.stdout.strip() or None, "version": __version__}
    result |= {"date": datetime.date.today().isoformat(), "machine": about, "rows": rows, "problems": problems}
    args.out.mkdir(parents=True, exist_ok=True)
    path = destination(args.out, about["gpu"], datetime.date.today())
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
