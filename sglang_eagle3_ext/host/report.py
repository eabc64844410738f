"""What a comparison shows: two tables and a picture out of its result file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_eagle3_ext.host.variants import set_aside

LABELS = {
    "baseline": "no speculation",
    "stock": "EAGLE-3, read by stock's rules",
    "stock_ids": "the same with ids for stock",
    "ours": "EAGLE-3, as it was trained",
    "stock_permuted": "other block order, stock",
    "ours_permuted": "other block order, ours",
}
"""The rows there are, as tables and pictures name them."""

HEADER = (
    "server",
    "tok/s",
    "spread",
    "vs none",
    "accept length",
    "identical",
    "differences that are near-ties",
)
DETAIL_HEADER = ("server", "vs none by round", "accepted at each position", "verify step / decode step")


def cells(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Format the runs of a result file, one tuple of texts each."""
    runs = {run["name"]: run for run in result["runs"]}
    base = runs["baseline"]["tok_s"]
    rows: list[tuple[str, ...]] = []
    for name, run in runs.items():
        length, ties = run["spec_accept_length"], run["near_ties"]
        differing = len({d["question"] for d in result["differences"] if d["name"] == name})
        rows.append(
            (
                LABELS.get(name, name),
                f"{run['tok_s']:.2f}",
                f"{min(run['tok_s_rounds']):.2f} to {max(run['tok_s_rounds']):.2f}",
                f"{run['tok_s'] / base:.2f}x",
                "-" if length is None else f"{length:.2f}",
                f"{100 * run['identical']:.0f} %",
                f"{ties} of {differing} differing" if differing else "-",
            )
        )
    return rows


def detail_header(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the columns of the second table: one for the accept length of every group."""
    return (*DETAIL_HEADER, *(f"accept length, {group}" for group in result["groups"]))


def detail_cells(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Format what the first table has no room for."""
    rows: list[tuple[str, ...]] = []
    for run in result["runs"]:
        name, ratio = run["name"], result["ratios"][run["name"]]
        rate, cost = run["spec_accept_rate_per_position"], run["cycle_cost"]
        lengths = [group["spec_accept_length"][name] for group in result["groups"].values()]
        rows.append(
            (
                LABELS.get(name, name),
                f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})",
                "-" if rate is None else " ".join(f"{share:.2f}" for share in rate),
                "-" if cost is None else f"{cost:.2f}",
                *("-" if length is None else f"{length:.2f}" for length in lengths),
            )
        )
    return rows


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay rows out in columns for a terminal, numbers to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def describe(difference: Mapping[str, Any], dtype: str) -> str:
    """Say in one line where two outputs part and what the target thinks of it."""
    place = f"{difference['name']}, question {difference['question'] + 1}, token {difference['position'] + 1}"
    if difference["gap"] is None:
        why = "nothing may differ in float32" if dtype == "float32" else "the target could not be asked to judge it"
        return f"{place}: NOT a near-tie, {why}"
    return (
        f"{place}: logits {difference['gap']:.3f} apart in float32, {dtype} moves one by up to "
        f"{difference['rounding']:.3f}: " + ("a near-tie" if difference["near_tie"] else "NOT a near-tie")
    )


def picture(result: Mapping[str, Any], path: Path) -> bool:
    """Draw tok/s as bars; say whether it was possible (matplotlib is optional)."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = result["runs"]
    figure, axes = pyplot.subplots(figsize=(7, 0.7 * len(runs) + 1.2))
    speed = [run["tok_s"] for run in runs]
    below = [run["tok_s"] - min(run["tok_s_rounds"]) for run in runs]
    above = [max(run["tok_s_rounds"]) - run["tok_s"] for run in runs]
    bars = axes.barh([LABELS.get(run["name"], run["name"]) for run in runs], speed, xerr=[below, above], capsize=3)
    lengths = [run["spec_accept_length"] for run in runs]
    axes.bar_label(bars, [f"{x:.1f}" for x in speed], padding=8)
    axes.bar_label(bars, [f"accept length {x:.2f}" if x else "" for x in lengths], label_type="center", color="white")
    axes.invert_yaxis()
    axes.set_xlabel(f"tok/s, median of {len(runs[0]['tok_s_rounds'])} rounds (bar: slowest and fastest round)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    set_aside(path)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
