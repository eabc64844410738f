"""Prove and time every kernel on the CUDA device at hand, in less than six minutes.

    python -m benchmarks.gpu [--minutes 5.5] [--out FOLDER]

First every option of every kernel (``device_checks``): dtypes, FP8, pages, windows, caps, sinks, ragged batches, long
masks, far slots. Then for every shape, one operator after the other in turn: each provider's result against float64;
ours captured in a CUDA graph and replayed over poisoned output, and repeated to catch races, both to the bit; then the
times of all, and of the kernels in ``attention_peers``. Those of FlashInfer compile themselves in a process beside and
join once they are ready. What a missing peer or the end of the time leaves out is named in the result, as is what
failed. Leaves ``gpu-<device>-<date>.json`` and prints the table.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.device_checks import run_checks
from benchmarks.kernel_bench import (
    COLUMNS,
    ROOT,
    TOO_LARGE,
    Prepared,
    Row,
    machine,
    measure,
    measure_peer,
    print_table,
    progress,
    provenance,
    skipped,
    times_us,
)

OPERATORS = ("tree_verify_mla", "tree_verify_gqa", "fc_proj", "norm_concat")
"""What to run: each has a module ``bench_<name>`` with ``SHAPES`` and ``prepare``, and ``flops`` where not the bytes
alone may bind."""

REPETITIONS = 200


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
    op: str,
    name: str,
    prepared: Prepared,
    flops: int,
    about: Mapping[str, Any],
    missing: Callable[[str], str | None] = lambda module: None,
) -> tuple[list[Row], list[str]]:
    """Check and time everyone who computes a shape.

    Args:
        op: the operator.
        name: the shape.
        prepared: of the operator's benchmark.
        flops: operations of the shape's matrix products.
        about: the machine, with its ``copy_gbps`` and ``matmul_tflops``; without the first there are no times.
        missing: says of what a peer compiles why it is not ready, if it is not.

    Returns:
        A row per provider and peer, and what went wrong with ours and PyTorch's. One that breaks costs only its own
        row: the machine may not be at hand again. Where PyTorch's has no memory there is one row for all.
    """
    rows: list[Row] = []
    problems: list[str] = []
    copy = about["copy_gbps"]
    for provider, call in prepared.providers.items():
        try:
            row = measure(op, name, prepared, provider, copy)
            if copy is not None and provider.startswith("ours"):
                row["differences_in_a_graph"] = differences_in_a_graph(call)
                row["differences_in_repetitions"] = differences_in_repetitions(call, REPETITIONS)
                problems += [
                    f"{op}, {name}, {provider}: got {row[check]} {check.replace('_', ' ')}; expected none. Report it."
                    for check in ("differences_in_a_graph", "differences_in_repetitions")
                    if row[check]
                ]
        except Exception as problem:
            if isinstance(problem, torch.OutOfMemoryError) and provider == "torch":
                # Its error is the budget of all others: the shape is too large for this device.
                return [*rows, skipped(op, name, "all", TOO_LARGE)], problems
            problems.append(f"{op}, {name}, {provider}: {type(problem).__name__}: {str(problem)[-400:]}")
            row = skipped(op, name, provider, type(problem).__name__)
        rows.append(row)
    for peer, how in prepared.peers.items():
        if how.module is not None and (reason := missing(how.module)):
            rows.append(skipped(op, name, peer, reason))
        else:
            rows.append(measure_peer(op, name, prepared, peer, copy))
    if copy is not None:
        for row in rows:
            row["of_roofline"] = of_roofline(row, prepared.nbytes, flops, copy, about["matmul_tflops"])
    return rows, problems


def compile_peers(folder: Path, device: torch.device) -> None:
    """Have every peer that compiles itself do so for a small shape like each, and leave a file per module.

    The file is empty, or says what failed. Runs in a process beside the measurements, as it takes minutes of the host
    and next to nothing of the device.
    """
    bench = importlib.import_module("benchmarks.bench_tree_verify_gqa")
    for shape in bench.SHAPES.values():
        prepared = bench.prepare(shape._replace(context=64, batch=1), device, torch.bfloat16)
        for peer in prepared.peers.values():
            if peer.module is None or (folder / peer.module).exists():
                continue
            try:
                peer.prepare()()
                torch.cuda.synchronize()
                outcome = ""
            except Exception as problem:
                outcome = f"{type(problem).__name__}: {str(problem)[-300:]}"
            (folder / f"{peer.module}.new").write_text(outcome)
            (folder / f"{peer.module}.new").rename(folder / peer.module)  # whoever finds it finds all of it


def why_missing(folder: Path, module: str) -> str | None:
    """Read what ``compile_peers`` left about a module."""
    return (folder / module).read_text() or None if (folder / module).exists() else f"{module}: still being compiled"


def main() -> None:
    """Run everything that fits the time, leave the JSON, and exit with 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.5, help="no shape is begun after this (5.5)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--compile-peers", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "gpu: got no CUDA device; expected one. Run this on a machine that has one.\n")
    end = time.monotonic() + 60 * args.minutes
    device = torch.device("cuda")
    if args.compile_peers is not None:
        compile_peers(args.compile_peers, device)
        return
    folder = Path(tempfile.mkdtemp())
    compiler = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", "--compile-peers", str(folder)], cwd=ROOT)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(compiler.terminate)
    benches = benchmarks_of(OPERATORS)
    about = machine(device) | {"matmul_tflops": round(matmul_tflops(device), 1)}
    checks = sorted(run_checks(device), key=lambda row: (row["op"], row["case"]))
    problems = [f"{row['op']}, {row['case']}: {row['problem']}" for row in checks if row["problem"]]
    print(f"{len(checks)} checks, {len(problems)} failed, {sum(row['skipped'] is not None for row in checks)} left out")
    rows: list[Row] = []
    shapes = list(in_turn({op: list(bench.SHAPES) for op, bench in benches.items()}))
    for op, name in progress(shapes, len(shapes), "gpu"):
        if time.monotonic() > end:
            rows.append(skipped(op, name, "all", f"{args.minutes} minutes were over"))
            continue
        bench = benches[op]
        flops = bench.flops(bench.SHAPES[name]) if hasattr(bench, "flops") else 0
        try:
            prepared = bench.prepare(bench.SHAPES[name], device, torch.bfloat16)
        except torch.OutOfMemoryError:
            prepared = None
            rows.append(skipped(op, name, "all", TOO_LARGE))
        except Exception as problem:
            prepared = None
            problems.append(f"{op}, {name}: {type(problem).__name__}: {str(problem)[-400:]}")
            rows.append(skipped(op, name, "all", type(problem).__name__))
        if prepared is None:
            torch.cuda.empty_cache()
            continue
        of_shape, wrong = run_shape(op, name, prepared, flops, about, partial(why_missing, folder))
        rows += of_shape
        problems += wrong
        del prepared
        torch.cuda.empty_cache()
    print_table(rows, (*COLUMNS, "of_roofline"))
    result = {"schema": 1} | provenance() | {"machine": about, "checks": checks, "rows": rows, "problems": problems}
    args.out.mkdir(parents=True, exist_ok=True)
    path = destination(args.out, about["gpu"], datetime.date.today())
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    for line in problems:
        print(line, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
