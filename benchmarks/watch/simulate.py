"""Simulate servers from measured texts and count how often the watch fires, and when.

    python -m benchmarks.watch.simulate

It leaves ``benchmarks/results/watch.json`` and writes the table of docs/watch.md from it.

Every simulated server answers texts drawn from ``sequences.json`` (see ``measure.py``) one after the other:

- ``mixed``: any text may follow any other;
- ``drift``: one category at a time, six texts of each, the categories in random order, again and again.

What acceptance is compared with is measured on 60 texts that are drawn anew for every server, so that a recorded
value errs as it would in practice. ``floor`` is the same as ``mixed`` with a draft that records nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.render import markdown_table, replace_region
from sglang_eagle3_ext.host import watch

ROOT = Path(__file__).parents[2]
SEQUENCES = Path(__file__).parent / "sequences.json"
RESULT = ROOT / "benchmarks" / "results" / "watch.json"
PAGE = ROOT / "docs" / "watch.md"
STEPS = 3
RECORDED_TEXTS = 60
RUN = 6
MARKS = (625, 1000, 2000, 5000, 10000)

Text = tuple[str, list[int]]


@cache
def texts(sequences: Path, assembly: str) -> list[Text]:
    """Return the category and the accepted drafts per verify step of every text."""
    stored = json.loads(sequences.read_text())
    return [(text["category"], [int(c) for c in text["counts"][assembly]]) for text in stored]


def recorded(sample: Sequence[Text]) -> tuple[float, ...]:
    """Return acceptance per position over some texts."""
    steps = [drafts for _, counts in sample for drafts in counts]
    return tuple(sum(drafts >= i for drafts in steps) / len(steps) for i in range(1, STEPS + 1))


def stream(kind: str, of: Sequence[Text], rng: random.Random) -> Iterator[list[int]]:
    """Yield one answer after another, without end."""
    categories = sorted({category for category, _ in of})
    while True:
        if kind != "drift":
            yield rng.choice(of)[1]
            continue
        for category in rng.sample(categories, len(categories)):
            alike = [counts for c, counts in of if c == category]
            for _ in range(RUN):
                yield rng.choice(alike)


def fires(watching: watch.Watch, answers: Iterator[list[int]]) -> float:
    """Return after how many verify steps a watch fires, infinity when it does not within the last mark."""
    for request, counts in enumerate(answers):
        for drafts in counts:
            if watching.count([request], [drafts]) is not None:
                return watching.verify_steps
        if watching.verify_steps > MARKS[-1]:
            break
    return math.inf


def simulate(sequences: Path, assembly: str, kind: str, servers: int) -> dict[str, float]:
    """Return the share of servers that have fired by each mark."""
    served, right = texts(sequences, assembly), texts(sequences, "right")
    # Evaluation halves are no categories that a server would see one after the other.
    if kind == "drift":
        served = [text for text in served if text[0] not in ("seen", "unseen")]
        right = [text for text in right if text[0] not in ("seen", "unseen")]
    times = []
    for server in range(servers):
        rng = random.Random(server)
        if kind == "floor":
            watching = watch.Watch([watch.FLOOR], recorded=False)
        else:
            watching = watch.Watch(recorded(rng.choices(right, k=RECORDED_TEXTS)), recorded=True)
        times.append(fires(watching, stream(kind, served, rng)))
    return {str(mark): sum(time <= mark for time in times) / servers for mark in MARKS}


def table(result: dict[str, Any]) -> str:
    """Write the Markdown table: per assembly its acceptance, and when how many servers had warned."""
    fired = result["fired"]
    header = ["assembly", "acceptance per position"]
    header += [f"{kind}: {mark}" for kind in fired for mark in ("1000", "5000", "10000")]
    rows = []
    for name, shares in result["accept_per_position"].items():
        cells = [
            f"{100 * fired[kind][name][mark]:.0f} %" if name in fired[kind] else "-"
            for kind in fired
            for mark in ("1000", "5000", "10000")
        ]
        rows.append([f"`{name}`", " / ".join(f"{share:.3f}" for share in shares), *cells])
    settings = result["settings"]
    note = (
        f"{settings['servers']} simulated servers for each cell, {result['texts']} texts of the demo's pair. Data: "
        "[watch.json](../benchmarks/results/watch.json), [sequences.json](../benchmarks/watch/sequences.json)."
    )
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def main() -> None:
    """Simulate every assembly on every kind of traffic."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=200)
    arguments = parser.parse_args()
    stored = json.loads(SEQUENCES.read_text())
    names = list(stored[0]["counts"])
    fired: dict[str, dict[str, dict[str, float]]] = {}
    with tqdm(total=3 * len(names) - 2, desc="simulating", unit="assembly") as bar:
        for kind in ("mixed", "drift", "floor"):
            fired[kind] = {}
            for name in names:
                # What is recorded is recorded for one draft.
                if name == "weak" and kind != "floor":
                    continue
                fired[kind][name] = simulate(SEQUENCES, name, kind, arguments.servers)
                bar.update()
    shares = {name: recorded(texts(SEQUENCES, name)) for name in names}
    result = {
        "schema": 1,
        "settings": {
            "servers": arguments.servers,
            "deviations": watch.DEVIATIONS,
            "far": watch.FAR,
            "far_deviations": watch.FAR_DEVIATIONS,
            "floor": watch.FLOOR,
            "recorded_texts": RECORDED_TEXTS,
        },
        "texts": len(stored),
        "accept_per_position": {name: [round(share, 4) for share in shares[name]] for name in names},
        "fired": fired,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(replace_region(PAGE.read_text(), "watch", table(result)))


if __name__ == "__main__":
    main()
