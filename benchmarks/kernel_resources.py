"""Compile what the compile gates compile, and write what the machine code needs into a file and into docs/kernels.md.

    python -m benchmarks.kernel_resources             compiles all of it (minutes), then writes both
    python -m benchmarks.kernel_resources --render    writes the tables of docs/kernels.md from the file

No GPU is needed. The figures stand in ``benchmarks/results/kernel-resources.json``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

from benchmarks.render import markdown_table, replace_region

ROOT = Path(__file__).parents[1]
GATES = ROOT / "tests" / "test_kernels"
RESULT = ROOT / "benchmarks" / "results" / "kernel-resources.json"
PAGE = ROOT / "docs" / "kernels.md"
HEADER = ("call", "kernel", "target", "registers", "spills", "shared KiB", "matrix unit", "16-byte copies per step")


def compile_all(gates: Sequence[str]) -> list[dict[str, Any]]:
    """Compile the calls of every gate for every architecture and list one row per kernel."""
    sys.path[:0] = [str(GATES.parent), str(GATES)]
    gate = importlib.import_module("compile_gate")
    rows = []
    for name, arch in tqdm([(name, arch) for name in gates for arch in gate.ARCHITECTURES], desc="compile"):
        module = importlib.import_module(f"test_compile_{name}")
        calls = module.calls_for(arch) if hasattr(module, "calls_for") else list(module.CALLS)
        for call, kernels in gate.compile_calls(GATES / f"test_compile_{name}.py", arch, only=calls).items():
            rows += [
                {
                    "gate": name,
                    "call": call,
                    "kernel": k.kernel,
                    "arch": arch,
                    "registers": k.registers,
                    "spills": k.spills,
                    "loop_spills": k.loop_spills,
                    "shared_bytes": k.shared,
                    "tensor_memory": k.tensor_memory,
                    "matrix_unit": k.matrix_unit,
                    "async_copies": sum(loop.count("LDGSTS", "128") for loop in k.loops),
                    "warps": k.warps,
                    "stages": k.stages,
                }
                for k in kernels
            ]
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows of the kernels that hold a matrix instruction, the others as the most that any of them needs."""
    lines = []
    for row in rows:
        if row["matrix_unit"] != "none":
            cells = [row["call"], f"`{row['kernel']}`", f"sm_{row['arch']}", row["registers"], row["spills"]]
            cells += [f"{row['shared_bytes'] / 1024:.0f}", row["matrix_unit"], row["async_copies"]]
            lines.append([str(cell) for cell in cells])
    for kernel in sorted({row["kernel"] for row in rows if row["matrix_unit"] == "none"}):
        same = [row for row in rows if row["kernel"] == kernel and row["matrix_unit"] == "none"]
        registers, spills, shared = (max(row[key] for row in same) for key in ("registers", "spills", "shared_bytes"))
        cells = ["any", f"`{kernel}`", "all", registers, spills, f"{shared / 1024:.0f}", "-", "-"]
        lines.append([str(cell) for cell in cells])
    return "\n".join(markdown_table(HEADER, lines)) + "\n"


def render(page: str, result: dict[str, Any]) -> str:
    """Return docs/kernels.md with the table of every gate that has a region there replaced."""
    note = f"\nTriton {result['versions']['triton']}, {result['date']}, no device: [kernel-resources.json]"
    note += "(../benchmarks/results/kernel-resources.json).\n"
    for gate in dict.fromkeys(row["gate"] for row in result["rows"]):
        if f"<!-- resources-{gate}:" in page:
            rows = [row for row in result["rows"] if row["gate"] == gate]
            page = replace_region(page, f"resources-{gate}", table(rows) + note)
    return page


def main() -> None:
    """Compile, unless asked only to render, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--render", action="store_true", help="only write the tables of docs/kernels.md")
    parser.add_argument("--gate", nargs="*", help="compile these gates only (fc) and keep the rows of the others")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {"rows": []}
    if not args.render:
        gates = args.gate or sorted(path.stem.removeprefix("test_compile_") for path in GATES.glob("test_compile_*.py"))
        rows = [row for row in result["rows"] if row["gate"] not in gates] + compile_all(gates)
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        result = {"schema": 1, "date": datetime.date.today().isoformat(), "versions": versions, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(), result))


if __name__ == "__main__":
    main()
