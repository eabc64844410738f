"""What the plugin adds to the start of SGLang's processes: python -m benchmarks.startup

Every process of SGLang loads its plugins, also those that serve no draft. Measured in fresh processes that
have imported what a launcher imports, interleaved, with the plugin and with it filtered out
(``SGLANG_PLUGINS`` names no plugin): the call that loads the plugins, and the whole process; in a launcher
with a draft also the settling of its flags, where the draft is read and checked, with the plugin and with
``EAGLE3_EXT=off``. With ``--servers`` also the time from the command to the first answered health check of a server
with a draft. Writes benchmarks/results/startup.json; `make docs` writes docs/install.md's sentence from it.
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
import json, sys, time
from sglang.launch_server import load_plugins, prepare_server_args
start = time.perf_counter()
load_plugins()
took = {"load_plugins": time.perf_counter() - start}
if sys.argv[1:]:
    start = time.perf_counter()
    prepare_server_args(sys.argv[1:]).resolve_once()
    took["flags"] = time.perf_counter() - start
print("took", json.dumps(took))
"""
PROCESSES: dict[str, Mapping[str, str]] = {
    "with the plugin": {},
    "filtered out": {"SGLANG_PLUGINS": "none"},
    "with the plugin, CPU platform": {"SGLANG_PLATFORM": "eagle3_ext"},
}
LAUNCHERS: dict[str, Mapping[str, str]] = {
    "launcher, with the plugin": {"SGLANG_PLATFORM": "eagle3_ext"},
    "launcher, EAGLE3_EXT=off": {"SGLANG_PLATFORM": "eagle3_ext", "EAGLE3_EXT": "off"},
}
SERVERS: dict[str, Mapping[str, str]] = {"with the plugin": {}, "EAGLE3_EXT=off": {"EAGLE3_EXT": "off"}}


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


def time_process(extra: Mapping[str, str], words: Sequence[str] = ()) -> dict[str, float]:
    """Run one process; return the seconds of the whole, of loading the plugins and of settling flags, if any."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *words],
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


def added(result: Mapping[str, Any]) -> dict[str, float]:
    """Subtract what a process takes without the plugin from what it takes with it: medians, in seconds."""
    took = {row["name"]: row["process"]["median"] for row in result["processes"]}
    return {
        "process": took["with the plugin"] - took["filtered out"],
        "launcher": took["launcher, with the plugin"] - took["launcher, EAGLE3_EXT=off"],
    }


def sentence(result: Mapping[str, Any]) -> str:
    """Say what starting costs."""
    costs, machine = added(result), result["machine"]
    return (
        f"With the plugin a process of SGLang's takes {costs['process']:+.2f} s longer to start, a launcher with the "
        f"demo's draft, which is read and checked there, {costs['launcher']:+.2f} s (medians of "
        f"{len(result['processes'][0]['process']['rounds'])} interleaved rounds, {machine['cpu']}, {machine['cores']} "
        f"cores, {result['date']}). Data: [startup.json](../benchmarks/results/startup.json).\n"
    )


def main() -> None:
    """Take the figures, interleaved, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=3, help="rounds of starting servers (0: none)")
    options = parser.parse_args()
    stamped = stamp()
    if warning := bench.busy(stamped["machine"]):
        print(warning)
    target = make_target()
    processes: dict[str, list[dict[str, float]]] = {name: [] for name in (*PROCESSES, *LAUNCHERS)}
    servers: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    time_process({})  # fills the file cache
    for _ in tqdm(range(options.rounds), desc="processes"):
        for name, extra in PROCESSES.items():
            processes[name].append(time_process(extra))
        for name, extra in LAUNCHERS.items():
            processes[name].append(time_process(extra, flags(target)))
    for _ in tqdm(range(options.servers), desc="servers"):
        for name, extra in SERVERS.items():
            servers[name].append(time_server(name, extra, target, ROOT / ".demo"))
    result = {
        **stamped,
        "unit": "seconds",
        "processes": sum_up(processes),
        "servers": sum_up(servers) if options.servers else [],
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    for kind in ("processes", "servers"):
        for row in result[kind]:
            for key, value in row.items():
                if key != "name":
                    print(f"{row['name']}: {key} {value['median']:.2f} s ({value['min']:.2f} to {value['max']:.2f})")


if __name__ == "__main__":
    main()
