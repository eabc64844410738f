"""Simulate servers from measured texts and count how often the watch fires, and when.

    python -m benchmarks.watch.simulate
    python -m benchmarks.watch.simulate --render    # the page alone

It leaves ``benchmarks/results/watch.json`` and writes the measured parts of docs/watch.md from it.

Every simulated server answers texts drawn from ``sequences.json`` (see ``measure.py``) one after the other:

- ``mixed``: any text may follow any other;
- ``drift``: one category at a time, six texts of each, the categories in random order, again and again.

What acceptance is compared with is measured on as many verify steps as the probe has by default, of texts that are
drawn anew for every server, so that a recorded value errs as it would in practice. ``floor`` is the same as ``mixed``
with a draft that records nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

from benchmarks.render import markdown_table, replace_region
from benchmarks.stamp import stamp
from sglang_eagle3_ext.host import watch
from sglang_eagle3_ext.spec import Expected

ROOT = Path(__file__).parents[2]
SEQUENCES = Path(__file__).parent / "sequences.json"
RESULT = ROOT / "benchmarks" / "results" / "watch.json"
PAGE = ROOT / "docs" / "watch.md"
PROBE = ROOT / "benchmarks" / "results" / "probe.json"
STEPS = 3
RECORDED_STEPS: int = json.loads(PROBE.read_text())["default"]["result"]["best"]["verify_steps"]
"""Of the probe at its default size, whose figure is recorded."""
RUN = 6
MARKS = (625, 1000, 2000, 5000, 10000, 30000)
SHOWN = ("1000", "5000", "30000")

Text = tuple[str, list[int]]


@cache
def texts(sequences: Path, assembly: str) -> list[Text]:
    """Return the category and the accepted drafts per verify step of every text."""
    stored = json.loads(sequences.read_text())["texts"]
    return [(text["category"], [int(c) for c in text["counts"][assembly]]) for text in stored]


def recorded(sample: Sequence[Text]) -> tuple[float, ...]:
    """Return acceptance per position over some texts."""
    steps = [drafts for _, counts in sample for drafts in counts]
    return tuple(sum(drafts >= i for drafts in steps) / len(steps) for i in range(1, STEPS + 1))


def draw(of: Sequence[Text], steps: int, rng: random.Random) -> list[Text]:
    """Draw texts until they have enough verify steps."""
    sample: list[Text] = []
    while steps > 0:
        sample.append(rng.choice(of))
        steps -= len(sample[-1][1])
    return sample


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
            watching = watch.Watch([watch.FLOOR], recorded_steps=None)
        else:
            sample = draw(right, RECORDED_STEPS, rng)
            watching = watch.Watch(recorded(sample), recorded_steps=sum(len(counts) for _, counts in sample))
        times.append(fires(watching, stream(kind, served, rng)))
    return {str(mark): sum(time <= mark for time in times) / servers for mark in MARKS}


def table(result: dict[str, Any]) -> str:
    """Write the Markdown table: per assembly its acceptance, and when how many servers had warned."""
    fired = result["fired"]
    header = ["assembly", "acceptance per position"]
    header += [f"{kind}: {mark}" for kind in fired for mark in SHOWN]
    rows = []
    for name, shares in result["accept_per_position"].items():
        cells = [
            f"{100 * fired[kind][name][mark]:.0f} %" if name in fired[kind] else "-" for kind in fired for mark in SHOWN
        ]
        rows.append([f"`{name}`", " / ".join(f"{share:.3f}" for share in shares), *cells])
    settings = result["settings"]
    note = (
        f"{settings['servers']} simulated servers for each cell, {result['texts']} texts of the demo's pair. Data: "
        "[watch.json](../benchmarks/results/watch.json), [sequences.json](../benchmarks/watch/sequences.json)."
    )
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def by_category(assembly: str) -> dict[str, float]:
    """Return the acceptance of the first draft token in each category of texts."""
    found = texts(SEQUENCES, assembly)
    categories = dict.fromkeys(category for category, _ in found)
    return {name: round(recorded([text for text in found if text[0] == name])[0], 4) for name in categories}


def cost(sizes: Sequence[int], steps: int = 2000) -> dict[str, float]:
    """Time what is done at a verify step: the watches, and the counters in files as SGLang's workers have them.

    Args:
        sizes: numbers of requests at a time.
        steps: how many to time.

    Returns:
        Microseconds a verify step, by the number of requests.
    """
    rng, metrics = random.Random(0), None
    expected = Expected(1.8, (0.5, 0.2, 0.1), STEPS, 1, STEPS + 1, 5000)
    spec = SimpleNamespace(path="draft", expected=expected)
    plan: Any = SimpleNamespace(spec=spec, target=SimpleNamespace(path="target"))
    collector = SimpleNamespace(labels={"model_name": "m", "tp_rank": 0}, _counter_cls=None, _gauge_cls=None)
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=True, metrics_collector=collector)
    greedy = SimpleNamespace(top_k=1)
    found = {}
    for size in sizes:
        served = watch.Served(plan, STEPS, 1, STEPS + 1, warns=True)
        served._metrics = metrics
        todo = []
        for step in range(steps):
            # A request ends every eighth step and another one takes its place.
            requests = [
                SimpleNamespace(
                    rid=step // 8 * size + i,
                    is_retracted=False,
                    finished=lambda: False,
                    sampling_params=greedy,
                    grammar=None,
                )
                for i in range(size)
            ]
            drafts = rng.choices((0, 1, 2, 3), (50, 30, 10, 10), k=size)
            result = SimpleNamespace(num_correct_drafts_per_req_cpu=drafts, speculative_num_draft_tokens=STEPS + 1)
            todo.append((result, SimpleNamespace(reqs=requests)))
        processor = SimpleNamespace(metrics_reporter=reporter)
        served.count(processor, *todo.pop())  # the first one makes the counters
        began = time.perf_counter()
        for result, batch in todo:
            served.count(processor, result, batch)
        found[str(size)] = round(1e6 * (time.perf_counter() - began) / len(todo), 1)
        if served._warned:
            raise RuntimeError("cost: the watch warned of what it was told to expect, and counted no further.")
        metrics = served._metrics
    return found


def thresholds() -> dict[str, float]:
    """Name everything that decides when a watch fires."""
    names = ("floor", "first_steps", "fewest_texts", "looks", "far", "far_deviations", "deviations", "text_steps")
    more = ("settled_texts", "recorded_steps", "most_recorded_steps")
    return {name: getattr(watch, name.upper()) for name in (*names, *more)}


def costs(result: dict[str, Any]) -> str:
    """Say what a verify step costs."""
    said = ", ".join(
        f"{us:.0f} microseconds with {n} request{'s' * (n != '1')}" for n, us in result["microseconds_a_step"].items()
    )
    return f"Watch and counters take {said} a verify step on the host ({result['machine']['cpu']}).\n"


def spread(result: dict[str, Any]) -> str:
    """Write how the acceptance of the first draft token differs between categories, as a table."""
    shares = result["first_by_category"]
    rows = [
        [f"`{name}`", f"{result['accept_per_position'][name][0]:.3f}", *(f"{share:.2f}" for share in found.values())]
        for name, found in shares.items()
    ]
    return "\n".join(markdown_table(["draft", "all texts", *shares["right"]], rows)) + "\n"


def render(page: str, result: dict[str, Any]) -> str:
    """Return docs/watch.md with its measured parts replaced."""
    for name, part in (("watch", table), ("categories", spread), ("cost", costs)):
        page = replace_region(page, name, part(result))
    return page


def main() -> None:
    """Simulate every assembly on every kind of traffic."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--render", action="store_true", help="write the page from the committed result alone")
    arguments = parser.parse_args()
    if arguments.render:
        PAGE.write_text(render(PAGE.read_text(), json.loads(RESULT.read_text())))
        return
    stamped = stamp()
    replayed = json.loads(SEQUENCES.read_text())
    names = list(replayed["texts"][0]["counts"])
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
    with tempfile.TemporaryDirectory() as place:
        # Read when the client is imported: counters then live in files, as those of SGLang's workers do.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = place
        took = cost((1, 64))
    result = {
        "schema": 2,
        **stamped,
        "draft_sha256": replayed["draft_sha256"],
        "settings": {
            "servers": arguments.servers,
            "recorded_verify_steps": RECORDED_STEPS,
            **thresholds(),
        },
        "texts": len(replayed["texts"]),
        "first_by_category": {name: by_category(name) for name in ("right", "weak") if name in names},
        "accept_per_position": {name: [round(share, 4) for share in shares[name]] for name in names},
        "fired": fired,
        "microseconds_a_step": took,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(), result))


if __name__ == "__main__":
    main()
