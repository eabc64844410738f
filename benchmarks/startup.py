"""What the plugin adds to the start of SGLang's processes: python -m benchmarks.startup

Every process of SGLang loads its plugins, also those that serve no draft. Measured in fresh processes of each
kind, interleaved, with the plugin and with it filtered out (``SGLANG_PLUGINS`` names no plugin): a process imports
what SGLang has it import before it loads the plugins, loads them, and imports what it goes on to import; the whole
process counts, and its memory. In a launcher with a draft, where the draft is read and checked, the settling of its
flags belongs to it, and there the plugin is compared with ``EAGLE3_EXT=off``. Also the time from
the command to the first answered health check of a server with a draft. Writes benchmarks/results/startup.json;
`make docs` writes docs/install.md's sentence from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.demo.demo import CPU_FLAGS, DRAFT
from benchmarks.demo.target import ROOT, make_target
from benchmarks.stamp import stamp
from sglang_eagle3_ext.host import bench
from sglang_eagle3_ext.host.servers import Server, running

OUT = ROOT / "benchmarks" / "results" / "startup.json"

PROCESS = """
import importlib, json, resource, sys, time
before, after, *words = sys.argv[1:]
importlib.import_module(before)
from sglang.srt.plugins import load_plugins
start = time.perf_counter()
load_plugins()
took = {"load_plugins": time.perf_counter() - start}
if words:
    from sglang.srt.server_args import prepare_server_args
    start = time.perf_counter()
    prepare_server_args(words).resolve_once()
    took["flags"] = time.perf_counter() - start
for module in after.split():
    importlib.import_module(module)
took["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print("took", json.dumps(took))
"""
SCHEDULED = ("sglang.srt.model_executor.model_runner", "sglang.srt.speculative.eagle_worker_v2")
KINDS: dict[str, tuple[str, str]] = {
    "launcher": ("sglang.launch_server", "sglang.srt.entrypoints.http_server"),
    "scheduler": ("sglang.srt.managers.scheduler", " ".join(SCHEDULED)),
    "detokenizer": ("sglang.srt.managers.detokenizer_manager", ""),
}
"""What each kind of process imports before it loads the plugins, and what afterwards."""

WITH, OFF = "with the plugin", "EAGLE3_EXT=off"
PROCESSES: dict[str, Mapping[str, str]] = {WITH: {}, "filtered out": {"SGLANG_PLUGINS": "none"}}
ON_CPU = {"SGLANG_PLATFORM": "eagle3_ext"}
LAUNCHERS: dict[str, Mapping[str, str]] = {WITH: ON_CPU, OFF: {**ON_CPU, "EAGLE3_EXT": "off"}}
WITH_DRAFT = "launcher with a draft"
SERVERS: dict[str, Mapping[str, str]] = {WITH: {}, OFF: {"EAGLE3_EXT": "off"}}


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without switches of ours or of SGLang's, and with ``extra``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    return kept | {"OMP_NUM_THREADS": "1"} | dict(extra)


def flags(target: Path) -> list[str]:
    """Return the flags of a server with the demo's draft."""
    words = ["--model-path", str(target), *CPU_FLAGS, "--skip-server-warmup", "--sleep-on-idle"]
    words += ["--max-total-tokens", "8192"]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT)]
    return words + [
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    ]


def time_process(kind: str, extra: Mapping[str, str], words: Sequence[str] = ()) -> dict[str, float]:
    """Run one process; return its seconds, those of loading the plugins and settling flags, and its memory."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *KINDS[kind], *words],
        env=clean_environment(extra),
        capture_output=True,
        text=True,
        check=True,
    )
    whole = time.perf_counter() - start
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("took "))
    return {"process": whole, **json.loads(line.removeprefix("took "))}


def time_server(name: str, extra: Mapping[str, str], target: Path, folder: Path) -> dict[str, float]:
    """Start one server with the demo's draft; return the seconds until it answers."""
    words = [sys.executable, "-m", "sglang.launch_server", *flags(target)]
    environment = {"SGLANG_PLATFORM": "eagle3_ext", "OMP_NUM_THREADS": "1", **extra}
    start = time.perf_counter()
    with running([Server(name, words, folder / "startup.log", environment)]):
        return {"ready": time.perf_counter() - start}


def sum_up(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Give every measured second its median and its spread."""
    return [
        {
            "name": name,
            **{
                key: {
                    "median": statistics.median(r[key] for r in taken),
                    "min": min(r[key] for r in taken),
                    "max": max(r[key] for r in taken),
                    "rounds": [r[key] for r in taken],
                }
                for key in taken[0]
            },
        }
        for name, taken in rounds.items()
    ]


def added(result: Mapping[str, Any], figure: str = "process") -> dict[str, float]:
    """Subtract what each kind of process takes without the plugin from what it takes with it.

    Args:
        result: of this benchmark.
        figure: ``process`` (seconds) or ``memory_mib``.

    Returns:
        By kind, the median over the rounds of the difference within a round.
    """
    took: dict[str, dict[str, list[float]]] = {}
    for row in result["processes"]:
        kind, _, environment = row["name"].partition(", ")
        took.setdefault(kind, {})["with" if environment == WITH else "without"] = row[figure]["rounds"]
    return {
        kind: statistics.median(w - without for w, without in zip(r["with"], r["without"], strict=True))
        for kind, r in took.items()
    }


def sentence(result: Mapping[str, Any]) -> str:
    """Say what starting costs."""
    seconds, memory, machine = added(result), added(result, "memory_mib"), result["machine"]
    served = {row["name"]: row["ready"]["median"] for row in result["servers"]}
    lines = [
        "What the plugin adds to each of SGLang's processes:",
        "",
        "| process | time to start | memory |",
        "| --- | ---: | ---: |",
        *(f"| {kind} | {seconds[kind]:+.2f} s | {memory[kind]:+.0f} MiB |" for kind in seconds),
        "",
        f"Medians of the differences within {len(result['processes'][0]['process']['rounds'])} interleaved rounds, "
        f"against the plugin filtered out; with a draft, which is read and checked in the launcher, against `{OFF}`. "
        "From the command to the first answered health check a server with the demo's draft took "
        f"{served[WITH]:.1f} s, with `{OFF}` {served[OFF]:.1f} s. {machine['cpu']}, {machine['cores']} cores, "
        f"{result['date']}. Data: [startup.json](../benchmarks/results/startup.json).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Take the figures, interleaved, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=3, help="rounds of starting servers")
    options = parser.parse_args()
    if min(options.rounds, options.servers) < 1:
        parser.error(f"--rounds, --servers: got {options.rounds}, {options.servers}; expected at least 1 of each.")
    stamped = stamp()
    if warning := bench.busy(stamped["machine"]):
        print(warning)
    target = make_target()
    runs: list[tuple[str, str, Mapping[str, str], list[str]]] = [
        (f"{kind}, {name}", kind, extra, []) for kind in KINDS for name, extra in PROCESSES.items()
    ]
    runs += [(f"{WITH_DRAFT}, {name}", "launcher", extra, flags(target)) for name, extra in LAUNCHERS.items()]
    processes: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in runs}
    servers: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    for kind in KINDS:
        time_process(kind, {})  # fills the file cache
    with tqdm(total=options.rounds * len(runs), desc="processes") as bar:
        for _ in range(options.rounds):
            for name, kind, extra, words in runs:
                processes[name].append(time_process(kind, extra, words))
                bar.update()
    for _ in tqdm(range(options.servers), desc="servers"):
        for name, extra in SERVERS.items():
            servers[name].append(time_server(name, extra, target, ROOT / ".demo"))
    result = {
        **stamped,
        "unit": "seconds; memory_mib: MiB of resident memory at its peak",
        "processes": sum_up(processes),
        "servers": sum_up(servers),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    for kind in ("processes", "servers"):
        for row in result[kind]:
            for key, value in row.items():
                if key != "name":
                    print(f"{row['name']}: {key} {value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})")


if __name__ == "__main__":
    main()
