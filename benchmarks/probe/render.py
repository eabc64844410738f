"""Write the measured parts of docs/probe.md from benchmarks/results/probe.json: python -m benchmarks.probe.render."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.render import ROOT, markdown_table, replace_region

PAGE = ROOT / "docs" / "probe.md"
RESULT = ROOT / "benchmarks" / "results" / "probe.json"
NOT_YET = "Not measured yet.\n"
DATA = "Data: [probe.json](../benchmarks/results/probe.json)."


def default(part: dict[str, Any] | None) -> str:
    """Say what the command finds at its default size, and what it takes."""
    if part is None:
        return NOT_YET
    result, machine = part["result"], part["machine"]
    rows = []
    for name in ("declared", "stock", "best"):
        row = result[name]
        if row is None:
            rows.append([name, "not run", "", "", ""])
            continue
        low, high = row["ci95"]
        rows.append(
            [
                name,
                f"[{', '.join(row['sources'])}]",
                f"{row['accept_length']:.3f}",
                f"{low:.3f} .. {high:.3f}",
                " / ".join(f"{share:.3f}" for share in row["accept_per_position"]),
            ]
        )
    header = ["", "sources", "accept length", "95 % interval", "accepted at each position"]
    threads = "one thread" if part["threads"] == 1 else f"{part['threads']} threads"
    what = "" if part["text_included"] else "for the search and the measuring, on states that were kept, "
    note = (
        f"Verdict: `{result['verdict']}`. {result['prompts']} prompts, {result['completion_tokens']:,} answer tokens, "
        f"{result['best']['verify_steps']:,} verify steps; {what}{part['cpu_s']:.0f} s of CPU time on {threads}, "
        f"{part['wall_s']:.0f} s by the clock ({machine['cpu']}, load {machine['load_before']:.1f} before the start), "
        f"{part['max_rss_mb'] / 1024:.1f} GB of memory. {DATA}"
    )
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def memory(part: dict[str, Any] | None) -> str:
    """Say how much memory a search takes beside the file it reads."""
    if part is None:
        return NOT_YET
    return (
        f"On the demo's pair ({part['features_mb']:,} MB of states) a search had at most {part['anonymous_mb']:,} MB "
        f"of memory beside mapped files. {DATA}\n"
    )


def large(part: dict[str, Any] | None) -> str:
    """Say what memory a search on a large target takes."""
    if part is None:
        return NOT_YET
    return (
        f"With {part['layers']} layers of width {part['width']:,} and {part['tokens']:,} tokens "
        f"({part['features_mb']:,} MB of states, random ones, and a draft of Kimi-K2.5's size) it was "
        f"{part['beside_mb']:,} MB beside the mapped file and the draft's {part['draft_mb']:,} MB. {DATA}\n"
    )


def drift(part: dict[str, Any] | None) -> str:
    """Say what the watch said of the right assembly while texts drifted."""
    if part is None:
        return NOT_YET
    lengths = part["accept_length"].values()
    said = f"after {part['watch_rested_on']:,}" if part["watch_rested_on"] else "nothing"
    return (
        f"One server with the right assembly, its value recorded by the probe on other texts, {len(lengths)} "
        f"categories of texts one after another: {part['verify_steps']:,} verify steps, accept lengths from "
        f"{min(lengths):.2f} to {max(lengths):.2f} against {part['expected']['accept_length']:.2f} recorded; the watch "
        f"said {said}. {DATA}\n"
    )


def told(part: dict[str, Any] | None) -> str:
    """Say what is found in copies that say different things of themselves."""
    if part is None:
        return NOT_YET
    rows = []
    for row in part["rows"]:
        found = "nothing"
        if row["verdict"] != "none_explains":
            found = f"[{', '.join(row['sources'])}]"
            found += "".join(f", `{key}={value}`" for key, value in row["switches"].items())
        declared = "cannot be run" if row["declared"] is None else f"{row['declared']:.2f}"
        undecided = "".join(f"; {key} undecided" for key in row["undecided"])
        gain = "-" if row["gain"] is None else "{:+.3f} ({:+.3f} .. {:+.3f})".format(*row["gain"])
        rows.append([row["says"], f"`{row['verdict']}`", found + undecided, declared, f"{row['best']:.2f}", gain])
    header = [
        "the copy says",
        "verdict",
        "found",
        "accept length as declared",
        "of what was found",
        "gain",
    ]
    note = (
        f"{part['prompts']} prompts, half of which the search sees; the gain, with its 95 % interval, is that on the "
        f"other half. {DATA}"
    )
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def served(part: dict[str, Any] | None) -> str:
    """Compare what the probe predicts with what servers counted."""
    if part is None:
        return NOT_YET
    rows = []
    for name, row in part.items():
        predicted, got = row["predicted"], row["served"]
        fired = got["watch_rested_on"]
        rows.append(
            [
                name,
                f"{predicted['accept_length']:.3f}",
                f"{got['accept_length']:.3f}",
                f"{100 * row['error']:+.2f} %",
                f"{got['verify_steps']:,}",
                f"{100 * got['same_text']:.0f} %",
                "no" if fired is None else f"on {fired:,} steps",
            ]
        )
    header = ["served as", "predicted", "served", "error", "verify steps", "same text", "the watch warned"]
    some = next(iter(part.values()))
    note = (
        f"{some['prompts']} built-in prompts, up to {some['max_new_tokens']} tokens each, float32, chains of "
        f"three, 16 requests at once, one server for each row. {DATA}"
    )
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def _switches(pair: dict[str, Any]) -> str:
    """Say which switches are found, and which are not told; the rotary base never is on so short texts."""
    found = [f"{key} {value}" for key, value in pair["switches"]["found"].items()]
    unsure = [
        f"{key} {' or '.join(values)}"
        for key, values in pair["undecided"].items()
        if key in pair["switches"]["trained"]
    ]
    return ", ".join(found + [f"({text}?)" for text in unsure]) or "-"


def pairs(part: dict[str, Any] | None) -> str:
    """Say what is found of drafts that were trained on tiny targets."""
    if part is None:
        return NOT_YET
    rows = []
    for name, pair in part["pairs"].items():
        found = f"[{', '.join(pair['found'])}]" if pair["verdict"] != "none_explains" else "nothing"
        blocks = zip(pair["found"], pair["alike"], strict=True)
        alike = "; ".join(f"{source} or {', '.join(others)}" for source, others in blocks if others)
        if pair["verdict"] == "none_explains":
            alike = ""
        rows.append(
            [
                name.split("-")[0] + (", another target" if "another" in name else ""),
                name.split("-")[1],
                f"[{', '.join(pair['trained'])}]",
                pair["vocabulary"],
                found,
                _switches(pair),
                alike or "-",
                f"{pair['accept_length']:.2f}",
            ]
        )
    header = [
        "target",
        "layers",
        "trained on",
        "vocabulary",
        "found",
        "switches found",
        "not told apart",
        "accept length",
    ]
    note = f"Trained for 900 updates, told nothing, 240 answers of 24 tokens. {DATA}"
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def render(page: str, result: dict[str, Any]) -> str:
    """Return docs/probe.md with its measured parts replaced."""
    for name, write in (
        ("default", default),
        ("memory", memory),
        ("large", large),
        ("drift", drift),
        ("told", told),
        ("served", served),
        ("pairs", pairs),
    ):
        page = replace_region(page, name, write(result.get(name)))
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), json.loads(RESULT.read_text()) if RESULT.is_file() else {}))
