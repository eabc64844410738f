"""Write the generated parts of README.md and docs/compatibility.md: python -m benchmarks.render

The figures come from ``benchmarks/results/demo.json``, a copy of what ``make demo`` leaves in
``.demo/demo.json``; the example of ``sglang-eagle3 inspect`` is what it prints for the demo's draft; the
table of SGLang's symbols is the contract that is checked at start.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_eagle3_ext.host import contract

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
RESULT = ROOT / "benchmarks" / "results" / "demo.json"
NO_FIGURES = "No figures are committed yet. `make demo` takes them on your machine.\n"

LABELS = {
    "baseline": "no speculation",
    "stock": "EAGLE-3, read by stock's rules",
    "ours": "EAGLE-3, as it was trained",
}
HEADER = (
    "server",
    "tok/s",
    "spread",
    "vs none",
    "accept length",
    "identical",
    "differences that are near-ties",
)


def cells(result: dict[str, Any]) -> list[tuple[str, ...]]:
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


def figures(result: dict[str, Any]) -> str:
    """Write the README's table with what it was measured on."""
    machine, versions, settings = result["machine"], result["versions"], result["settings"]
    table = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *cells(result)]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    note = (
        f"`make demo` on {machine['cpu']}, {machine['cores']} cores, {settings['dtype']}, one request "
        f"at a time: {settings['questions']} questions on topics absent from the draft's training, "
        f"{settings['max_tokens']} tokens each, median of {settings['rounds']} interleaved rounds. SGLang "
        f"{versions['sglang']}, PyTorch {versions['torch']}, {result['date']}. "
        "Data: [demo.json](benchmarks/results/demo.json)."
    )
    return "\n".join([*lines, "", note]) + "\n"


def picture(result: dict[str, Any], path: Path) -> bool:
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
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def inspect_example() -> str:
    """Run ``sglang-eagle3 inspect`` on the demo's pair and return what it prints, as a block."""
    draft, target = "benchmarks/demo/draft", ".demo/SmolLM2-135M-Instruct"
    command = [sys.executable, "-m", "sglang_eagle3_ext.cli", "inspect", draft, "--target", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"```text\n{done.stdout.strip()}\n```\n"


def replace_region(text: str, name: str, body: str) -> str:
    """Replace what stands between ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``."""
    region = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not region.search(text):
        raise SystemExit(f"README.md: the region between the two `{name}` comments is gone; put it back.")
    return region.sub(lambda match: match[1] + body + match[2], text, count=1)


def render(readme: str, result: dict[str, Any] | None) -> str:
    """Return README.md with its measured parts replaced; without a result it says that there is none."""
    readme = replace_region(readme, "figures", NO_FIGURES if result is None else figures(result))
    return replace_region(readme, "inspect", inspect_example())


def contract_table() -> str:
    """Write the symbols of SGLang that are touched as a Markdown table."""
    lines = ["| symbol | how | parameters | why | superfluous when |", "|---|---|---|---|---|"]
    for row in contract.ROWS:
        parameters = ", ".join(row.parameters)
        lines.append(f"| `{row.target}` | {row.kind} | {parameters} | {row.why} | {row.delete_when} |")
    return "\n".join(lines) + "\n"


def render_compatibility(text: str) -> str:
    """Return docs/compatibility.md with its table of symbols replaced."""
    return replace_region(text, "contract", contract_table())


def committed_result() -> dict[str, Any] | None:
    """Read the committed result, if there is one."""
    if not RESULT.is_file():
        return None
    result: dict[str, Any] = json.loads(RESULT.read_text())
    return result


if __name__ == "__main__":
    README.write_text(render(README.read_text(), committed_result()))
    COMPATIBILITY.write_text(render_compatibility(COMPATIBILITY.read_text()))
