"""What the benchmarks of the kernels share: the gate of correctness, the times of a call, the rows of a result.

A benchmark of one kernel prepares, per named shape, the same computation by several providers, and hands it to
``main``, which refuses to time what is wrong. ``--smoke`` runs a tiny shape in Triton's interpreter, without times.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from sglang_eagle3_ext import __version__

ROOT = Path(__file__).parents[1]
COLUMNS = ("op", "shape", "dtype", "provider", "p20_us", "p50_us", "p80_us", "gbps", "of_copy", "max_err", "budget")


TOO_LARGE = "the device's memory is too small for it"

Call = Callable[[], torch.Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """Someone else's kernel on the same computation.

    Attributes:
        prepare: gives the call, or raises where there is none.
        module: what the kernel compiles at its first call, if it does, which takes minutes.
    """

    prepare: Callable[[], Call]
    module: str | None = None


@dataclass(frozen=True)
class Prepared:
    """One computation, ready to run.

    Attributes:
        providers: name -> a call that returns the result; ``torch`` is the plain one whose error sets the budget.
        truth: the result in float64.
        nbytes: what must move at least between memory and the device.
        peers: name -> kernels of others, which not every machine or shape has.
    """

    providers: Mapping[str, Call]
    truth: torch.Tensor
    nbytes: int
    peers: Mapping[str, Peer] = field(default_factory=dict)


Prepare = Callable[[Any, torch.device, torch.dtype], Prepared]


def progress(items: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    """Show a bar while items are gone through; without tqdm, which a GPU machine may lack, show none."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, total=total, desc=what)


def budget_of(prepared: Prepared) -> float:
    """Return the largest error that a provider may have: twice that of plain PyTorch, plus one rounding."""
    plain = prepared.providers["torch"]()
    rounding = torch.finfo(plain.dtype).eps / 2 * float(prepared.truth.abs().max())
    return 2 * float((plain.double() - prepared.truth).abs().max()) + rounding


def times_us(call: Callable[[], object]) -> tuple[float, float, float]:
    """Time a call in a CUDA graph with a cold second-level cache, in microseconds at percentiles 20, 50 and 80."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles outside of the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    p20, p50, p80 = (1000 * t for t in triton.testing.do_bench(graph.replay, quantiles=[0.2, 0.5, 0.8]))
    return p20, p50, p80


def copy_gbps(device: torch.device) -> float:
    """Measure what copying a gibibyte moves per second, read and written, in GB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / times_us(lambda: target.copy_(source))[1] / 1e3


def machine(device: torch.device) -> dict[str, Any]:
    """Describe where the times were taken, without its name."""
    on_gpu = device.type == "cuda"
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "copy_gbps": round(copy_gbps(device), 1) if on_gpu else None,
    }


def provenance() -> dict[str, Any]:
    """Say what was measured, when, and with which versions of everything that has a part in it."""
    sha, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    versions: dict[str, str | None] = {"triton": triton.__version__, "torch": torch.__version__}
    versions |= {"cuda": torch.version.cuda, "python": platform.python_version()}
    for distribution in ("numpy", "sglang", "sglang-kernel", "flashinfer-python"):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = None
    return {
        "git_sha": sha.stdout.strip() or None,
        "dirty": bool(changed.stdout.strip()),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def skipped(op: str, shape: str, provider: str, reason: str) -> Row:
    """Make the row of something that was not measured."""
    empty = ("dtype", "p20_us", "p50_us", "p80_us", "gbps", "of_copy", "max_err", "budget", "of_roofline")
    return {"op": op, "shape": shape, "provider": provider, "skipped": reason} | dict.fromkeys(empty)


def measure(
    op: str, name: str, prepared: Prepared, provider: str, copy: float | None, *, call: Call | None = None
) -> Row:
    """Check a provider against the truth, then time it where there is a GPU.

    Args:
        op: name of the kernel.
        name: of the shape.
        prepared: the computation.
        provider: who computes it.
        copy: what copying reaches in GB/s, where there is a GPU.
        call: of a peer; that of ``prepared.providers`` otherwise.

    Raises:
        RuntimeError: the provider's error exceeds the budget.
    """
    budget, call = budget_of(prepared), call or prepared.providers[provider]
    y = call()
    error = float((y.double() - prepared.truth).abs().max())
    if not error <= budget:
        raise RuntimeError(
            f"{op}, {name}, {provider}: got an error of {error:.3e}; expected at most {budget:.3e}. No time was taken "
            "of it; report it with this machine's versions."
        )
    row: Row = {"op": op, "shape": name, "dtype": str(y.dtype).removeprefix("torch."), "provider": provider}
    row |= {"p20_us": None, "p50_us": None, "p80_us": None, "gbps": None, "of_copy": None}
    if copy is not None:
        p20, p50, p80 = times_us(call)
        gbps = prepared.nbytes / p50 / 1e3
        row |= {"p20_us": round(p20, 2), "p50_us": round(p50, 2), "p80_us": round(p80, 2)}
        row |= {"gbps": round(gbps, 1), "of_copy": round(gbps / copy, 3)}
    return row | {"max_err": error, "budget": budget}


def measure_peer(op: str, name: str, prepared: Prepared, peer: str, copy: float | None) -> Row:
    """Measure someone else's kernel; where that fails, whatever the reason, the row says it and nothing else fails."""
    if copy is None:
        return skipped(op, name, peer, "no CUDA device")
    try:
        return measure(op, name, prepared, peer, copy, call=prepared.peers[peer].prepare())
    except Exception as problem:
        return skipped(op, name, peer, f"{type(problem).__name__}: {str(problem)[-300:]}")


def print_table(rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> None:
    """Print one aligned line per row."""
    cells = [tuple(columns), *(tuple(_cell(row.get(column)) for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) and abs(value) < 1 else str(value)


def main(op: str, description: str, shapes: Mapping[str, Any], smoke: Any, prepare: Prepare) -> None:
    """Run the benchmark of one kernel from the command line.

    Args:
        op: name of the kernel.
        description: shown by ``--help``.
        shapes: name -> shape, in bf16, with the model it comes from in its name.
        smoke: the tiny shape of ``--smoke``, in fp16 (Triton's own interpreter is wrong on bf16).
        prepare: makes the computation of a shape on a device.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", nargs="*", choices=list(shapes), default=list(shapes), help="which shapes (all)")
    parser.add_argument("--provider", nargs="*", help="which providers (all)")
    parser.add_argument("--out", type=Path, help="where to leave the JSON")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape in Triton's interpreter, without times")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.exit(1, f"{op}: got no CUDA device; expected one to take times on. Pass --smoke to check the program.\n")
    device = torch.device("cpu" if args.smoke else "cuda")
    dtype = torch.float16 if args.smoke else torch.bfloat16
    todo = {"smoke": smoke} if args.smoke else {name: shapes[name] for name in args.shape}
    about, rows = machine(device), list[Row]()
    for name, shape in todo.items() if args.smoke else progress(todo.items(), len(todo), op):
        prepared = None  # the one before makes room
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            prepared = prepare(shape, device, dtype)
            budget_of(prepared)
        except torch.OutOfMemoryError:
            rows.append(skipped(op, name, "all", TOO_LARGE))
            continue
        names = [*prepared.providers, *prepared.peers]
        if unknown := sorted(set(args.provider or ()) - set(names)):
            expected = f"expected some of {', '.join(names)}. Name one of them."
            parser.exit(1, f"--provider: got {', '.join(unknown)}; {expected}\n")
        for provider in args.provider or names:
            by = measure_peer if provider in prepared.peers else measure
            rows.append(by(op, name, prepared, provider, about["copy_gbps"]))
    print_table(rows)
    if args.out is not None:
        result = {"schema": 1} | provenance() | {"machine": about, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.out}")
