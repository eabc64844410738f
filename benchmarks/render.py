"""Write the generated parts of README.md and of docs/: python -m benchmarks.render

The README's figures come from ``benchmarks/results/demo.json``, a copy of what ``make demo`` leaves in
``.demo/demo.json``, those of docs/story.md and its picture from ``pair.json``, a copy of what
``sglang-eagle3 bench`` leaves for the demo's pair, the sentence of docs/install.md on starting from
``startup.json``; the example of ``sglang-eagle3 inspect`` is what it prints
for the demo's draft; the table of SGLang's symbols is the contract that is checked at start.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import startup
from sglang_eagle3_ext.host import contract, report

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
INSTALL = ROOT / "docs" / "install.md"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
STORY = ROOT / "docs" / "story.md"
PICTURE = ROOT / "docs" / "story.png"
RESULT = ROOT / "benchmarks" / "results" / "demo.json"
PAIR = ROOT / "benchmarks" / "results" / "pair.json"
NO_FIGURES = "No figures are committed yet. `make demo` takes them on your machine.\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table, one line each, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def figures(result: dict[str, Any]) -> str:
    """Write the README's table with what it was measured on."""
    machine, versions, settings = result["machine"], result["versions"], result["settings"]
    lines = markdown_table(report.HEADER, report.cells(result))
    note = (
        f"`make demo` on {machine['cpu']}, {machine['cores']} cores, {settings['dtype']}, one request "
        f"at a time: {settings['questions']} questions absent from the draft's training, half of them on topics "
        f"absent from it, too, {settings['max_tokens']} tokens each, median of {settings['rounds']} interleaved "
        f"rounds. SGLang {versions['sglang']}, PyTorch {versions['torch']}, {result['date']}. "
        "Data: [demo.json](benchmarks/results/demo.json)."
    )
    return "\n".join([*lines, "", note]) + "\n"


def story(result: dict[str, Any]) -> str:
    """Write the story's two tables with what they were measured on."""
    machine, versions, settings = result["machine"], result["versions"], result["settings"]
    note = (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before, {settings['threads']} "
        f"threads per server, {settings['dtype']}, one request at a time: {settings['questions']} prompts, "
        f"{settings['max_tokens']} tokens each, median of {settings['rounds']} interleaved rounds. "
        f"SGLang {versions['sglang']}, PyTorch {versions['torch']}, {result['date']}. "
        "Data: [pair.json](../benchmarks/results/pair.json)."
    )
    tables = [
        *markdown_table(report.HEADER, report.cells(result)),
        "",
        *markdown_table(report.detail_header(result), report.detail_cells(result)),
    ]
    return "\n".join([*tables, "", "![tok/s of every row](story.png)", "", note]) + "\n"


def render_story(text: str, result: dict[str, Any] | None) -> str:
    """Return docs/story.md with its measured part replaced."""
    return replace_region(text, "story", "No figures are committed yet.\n" if result is None else story(result))


def render_install(text: str, result: dict[str, Any] | None) -> str:
    """Return docs/install.md with its measured sentence replaced."""
    return replace_region(text, "startup", "Not measured yet.\n" if result is None else startup.sentence(result))


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


def committed(file: Path) -> dict[str, Any] | None:
    """Read a committed result, if there is one."""
    if not file.is_file():
        return None
    result: dict[str, Any] = json.loads(file.read_text())
    return result


if __name__ == "__main__":
    README.write_text(render(README.read_text(), committed(RESULT)))
    pair = committed(PAIR)
    STORY.write_text(render_story(STORY.read_text(), pair))
    if pair is not None:
        PICTURE.unlink(missing_ok=True)
        report.picture(pair, PICTURE)
    INSTALL.write_text(render_install(INSTALL.read_text(), committed(startup.OUT)))
    COMPATIBILITY.write_text(render_compatibility(COMPATIBILITY.read_text()))
