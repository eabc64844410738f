"""Write the generated tables of docs/kernels.md: python -m benchmarks.kernel_tables

Their figures come from ``benchmarks/results/kernels.json``, a copy of what ``make kernels`` leaves in
``.demo/kernels.json``: one run for each version of Triton. The newest is shown, the others are compared with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.render import markdown_table, replace_region

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "kernels.json"
PAGE = ROOT / "docs" / "kernels.md"
KERNELS = ("fc_proj", "norm_concat", "tree_verify_gqa", "tree_verify_mla", "split_merge")
GATES = {"fc_proj": "fc", "norm_concat": "fc", "tree_verify_gqa": "tree_gqa", "tree_verify_mla": "tree_mla"}
GATES["split_merge"] = GATES["tree_verify_gqa"]
"""Which compile gate holds a kernel."""
PARTS = {"split_merge": ("_plan_kernel", "_pack_mask_kernel", "_merge_kernel")}
"""What a file's kernels are called, where not after the file."""

Run = dict[str, Any]
Row = dict[str, Any]


def kernels_sha256() -> str:
    """Hash the source of the kernels, which every figure on the page is of."""
    sources = sorted((ROOT / "kernels").glob("*.py"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sources)).hexdigest()


def contract_of(kernel: str) -> str:
    """Read what a kernel's module docstring calls the contract of the kernel."""
    source = (ROOT / "kernels" / f"{kernel}.py").read_text()
    match = re.search(r"^Contract: (?:.*?the kernel )?(close|exact)", source, re.MULTILINE)
    if match is None:
        raise SystemExit(f"kernels/{kernel}.py: got no line `Contract:`; expected one in its docstring. Write it.")
    return match[1]


def distinct(rows: Sequence[Row], key: str) -> str:
    """List the values that rows have under a key, in the order in which they come."""
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None)) or "-"


def cell(value: Any) -> str:
    """Write a figure, or that there is none."""
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def proof(run: Run) -> list[str]:
    """Write a row per kernel: what it promises and against what that was checked."""
    lines = []
    for kernel in KERNELS:
        errors = [row for row in run["errors"] if row["kernel"] == kernel]
        oracles = []
        for oracle in dict.fromkeys(row["oracle"] for row in errors):
            same = [row for row in errors if row["oracle"] == oracle]
            barred = [row for row in same if row.get("bar")]
            worst = max(barred, key=lambda row: row["error"] / row["bar"], default=None)
            found = f": {worst['error']:.2f} of {worst['bar']:g}" if worst else ""
            oracles.append(f"{oracle} ({len(same)}){found}")
        names = PARTS.get(kernel, (f"_{kernel}_kernel",))
        compiled = [row for row in run["resources"] if row["gate"] == GATES[kernel] and row["kernel"] in names]
        targets = ", ".join(f"sm_{arch}" for arch in sorted({row["arch"] for row in compiled}))
        dtypes = [distinct(errors, "dtype"), distinct(errors, "stored")]
        lines.append([f"`{kernel}`", contract_of(kernel), *dtypes, targets, "; ".join(oracles)])
    header = ("kernel", "contract", "dtypes", "stored in", "compiled for", "oracle (cases): largest error of its bar")
    return markdown_table(header, lines)


def traffic(run: Run) -> list[str]:
    """Write a row per measured launch."""
    keys = ("kv_per_row_tile", "total", "of_sglang_extend", "busy_programs", "launches")
    lines = [
        [f"`{row['kernel']}`", row["shape"], *(cell(row.get(key)) for key in keys)]
        for row in sorted(run["traffic"], key=lambda row: (row["kernel"], row["shape"]))
    ]
    header = ("kernel", "shape", "KV per tile of rows", "all, of the fewest", "of SGLang's extend", "programs")
    return markdown_table((*header, "launches"), lines)


def results(run: Run) -> dict[tuple[Any, ...], str]:
    """Give the hash of every result of a run by the case it belongs to."""
    keys = ("kernel", "case", "dtype", "stored", "oracle")
    return {tuple(row.get(key) for key in keys): row["result"] for row in run["errors"] if "result" in row}


def bytes_moved(run: Run) -> dict[tuple[str, str], Row]:
    """Give the measured launches of a run by kernel and shape; those against SGLang's need SGLang."""
    return {(row["kernel"], row["shape"]): row for row in run["traffic"] if "total" in row}


def tritons(runs: Sequence[Run]) -> list[str]:
    """Write a row per version of Triton: what passed, and what is the same as with the newest."""
    newest, moved, lines = results(runs[0]), bytes_moved(runs[0]), []
    for run in runs:
        mine, bytes_of_mine, tests = results(run), bytes_moved(run), run["tests"]
        resources = [row for row in run.get("resources", ()) if row["gate"].startswith("tree_")]
        compiled = [row for row in resources if row["matrix_unit"] != "none"]
        spilling = [row for row in compiled if row["context_spills"]]
        cells = [
            f"{tests['passed']} of {tests['passed'] + tests['failed']}",
            f"{sum(mine.get(case) == result for case, result in newest.items())} of {len(newest)}",
            f"{sum(bytes_of_mine.get(shape) == row for shape, row in moved.items())} of {len(moved)}",
            f"{len(spilling)} of {len(compiled)}",
        ]
        lines.append([run["versions"]["triton"], *cells])
    header = (
        "Triton",
        "tests passed",
        "results equal to the bit",
        "launches of equal bytes",
        "spill where the context is read",
    )
    return markdown_table(header, lines)


def resources(rows: Sequence[Row]) -> list[str]:
    """Write the kernels that hold a matrix instruction, the others as the most that any of them needs."""
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
    header = ("call", "kernel", "target", "registers", "spills", "shared KiB", "matrix unit", "16-byte copies per step")
    return markdown_table(header, lines)


def render(page: str, result: dict[str, Any]) -> str:
    """Return docs/kernels.md with every generated table replaced."""
    newest = result["runs"][0]
    machine, versions = newest["machine"], newest["versions"]
    note = (
        f"Triton {versions['triton']}, PyTorch {versions['torch']}, {newest['date']}, {machine['cpu']},"
        f" {machine['cores']} cores, no device: [kernels.json](../benchmarks/results/kernels.json)."
    )
    parts: dict[str, Callable[[], list[str]]] = {
        "proof": lambda: proof(newest),
        "traffic": lambda: traffic(newest),
        "tritons": lambda: tritons(result["runs"]),
    }
    for name, part in parts.items():
        page = replace_region(page, name, "\n".join([*part(), "", note]) + "\n")
    for gate in dict.fromkeys(GATES.values()):
        rows = sorted(
            (row for row in newest["resources"] if row["gate"] == gate), key=lambda row: (row["arch"], row["order"])
        )
        page = replace_region(page, f"resources-{gate}", "\n".join([*resources(rows), "", note]) + "\n")
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), json.loads(RESULT.read_text())))
