"""Three servers, the same questions, one table: python -m benchmarks.demo.demo (or: make demo)

A small Llama-type model is served without speculation, with an EAGLE-3 draft as stock SGLang reads it
(``EAGLE3_EXT=off``), and with the same draft as it was trained. All three run at once with the same flags and
take turns at every question, one request at a time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import render
from benchmarks.demo import measure, near_ties
from benchmarks.demo.servers import Server, ServerError, running
from benchmarks.demo.target import ROOT, make_target

OUT = ROOT / ".demo"
DRAFT = ROOT / "benchmarks" / "demo" / "draft"
QUESTIONS = ROOT / "benchmarks" / "demo" / "prompts_eval.json"
STEPS = 3

STOCK_AT_MOST = 1.25
OURS_ABOVE_STOCK = 0.2
"""What the demo claims of the accept lengths. They hardly depend on the machine, so that a run that misses them
has found a fault; speeds do, and a run on a busy machine only says so."""
GOAL = 1.6
"""The accept length that the demo's draft is meant to have; a draft that is trained too little only says so."""

# An idle SGLang spins; three of them on a small machine would measure each other.
CPU_FLAGS = [
    *("--device", "cpu", "--attention-backend", "eagle3_cpu", "--dtype", "bfloat16"),
    *("--max-total-tokens", "8192", "--max-running-requests", "4", "--skip-server-warmup", "--sleep-on-idle"),
]
SPECULATION = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(STEPS)),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(STEPS + 1)),
]


def make_servers(target: Path, draft: Path, threads: int) -> list[Server]:
    """Describe the three servers: no speculation, stock's reading of the draft, ours."""

    def shown(path: Path) -> str:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)

    command = [
        shown(Path(sys.executable)),
        "-m",
        "sglang.launch_server",
        "--model-path",
        shown(target),
        *CPU_FLAGS,
    ]
    speculating = [*command, *SPECULATION, "--speculative-draft-model-path", shown(draft)]
    environment = {"SGLANG_PLATFORM": "eagle3_ext", "OMP_NUM_THREADS": str(threads)}
    return [
        Server("baseline", command, OUT / "baseline.log", environment),
        Server("stock", speculating, OUT / "stock.log", {**environment, "EAGLE3_EXT": "off"}),
        Server("ours", speculating, OUT / "ours.log", environment),
    ]


def stream_answer(server: Server, question: str, max_tokens: int) -> None:
    """Print one answer as it arrives."""
    print(f"\n> {question}\n", flush=True)
    stream = measure.client_of(server).chat.completions.create(
        model=measure.MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print(flush=True)


def curl_command(server: Server, question: str, max_tokens: int) -> str:
    """Write the request that a person would send by hand."""
    body = {
        "model": measure.MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    return (
        f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )


def run_curl(command: str) -> str:
    """Run the printed curl command as it stands and return the text of the answer."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"curl ended with code {done.returncode}: {done.stderr.strip()}\n{command}")
    return str(json.loads(done.stdout)["choices"][0]["message"]["content"])


def find_disagreements(answers: Mapping[str, Sequence[measure.Answer]]) -> list[near_ties.Disagreement]:
    """List where an answer first leaves the baseline's of the same round, each place once."""
    expected = {(answer.round, answer.question): answer for answer in answers["baseline"]}
    found: dict[near_ties.Disagreement, None] = {}
    for name, given in answers.items():
        for answer in given:
            base = expected[answer.round, answer.question]
            at = measure.first_difference(base.token_ids, answer.token_ids)
            if at is None:
                continue
            if at >= min(len(base.token_ids), len(answer.token_ids)):
                raise RuntimeError(f"{name}: question {answer.question}: an answer ends without an end token")
            item = near_ties.Disagreement(
                name=name,
                question=answer.question,
                prefix=base.prompt_ids + base.token_ids[:at],
                position=at,
                expected=base.token_ids[at],
                got=answer.token_ids[at],
            )
            found[item] = None
    return list(found)


def machine_facts() -> dict[str, Any]:
    """Describe the machine, without its name."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Name the versions that the figures depend on."""
    names = ("sglang", "torch", "transformers", "sglang-eagle3-ext")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def verdict(result: Mapping[str, Any]) -> str:
    """Say in one line what came out."""
    runs = {run["name"]: run for run in result["runs"]}
    base = runs["baseline"]["tok_s"]

    def part(name: str) -> str:
        run = runs[name]
        return f"{run['tok_s'] / base:.2f}x the speed ({run['spec_accept_length']:.2f} tokens per verify step)"

    return (
        f"Against no speculation, the draft as it was trained gives {part('ours')}; read by stock's rules, "
        f"{part('stock')}."
    )


def missed_claims(result: Mapping[str, Any]) -> list[str]:
    """List the claims on accept lengths that a run does not bear out, one sentence each."""
    lengths = {run["name"]: run["spec_accept_length"] for run in result["runs"]}
    missed = []
    if not (lengths["ours"] or 0.0) >= (lengths["stock"] or 1.0) + OURS_ABOVE_STOCK:
        missed.append(
            f"ours: got {_spell_length(lengths['ours'])}; expected at least {OURS_ABOVE_STOCK} above stock's, since "
            "this draft is served as it was trained. See the start-up block in ours.log for how it was read."
        )
    if not (lengths["stock"] or STEPS + 1) <= STOCK_AT_MOST:
        missed.append(
            f"stock: got {_spell_length(lengths['stock'])}; expected at most {STOCK_AT_MOST} from this draft by "
            "stock's rules. Check in stock.log that EAGLE3_EXT=off was in force."
        )
    return missed


def _spell_length(length: float | None) -> str:
    return "no drafts at all" if length is None else f"accept length {length:.2f}"


def weak_draft(result: Mapping[str, Any]) -> list[str]:
    """Say when the draft, served as it was trained, stays below the goal."""
    length = next(run["spec_accept_length"] for run in result["runs"] if run["name"] == "ours")
    if (length or 0.0) >= GOAL:
        return []
    return [
        f"BELOW GOAL: {_spell_length(length)} of ours is under {GOAL}: the draft is served as it was trained, and was "
        "trained too little."
    ]


def speed_doubts(result: Mapping[str, Any]) -> list[str]:
    """List where the speeds came out otherwise than hoped for."""
    speeds = {run["name"]: run["tok_s"] for run in result["runs"]}
    doubts = []
    if speeds["ours"] <= speeds["baseline"]:
        doubts.append("NOT FASTER: the draft as it was trained is no faster than no speculation in this run.")
    if speeds["stock"] >= speeds["baseline"]:
        doubts.append("NOT SLOWER: the draft by stock's rules is no slower than no speculation in this run.")
    return doubts


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=10, help="how many questions to ask (default 10)")
    parser.add_argument("--rounds", type=int, default=3, help="how often to ask each (default 3)")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer (default 48)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each server (default 1)")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Run the whole demo; return 0, or 1 when a claim is missed or an output differs and is no near-tie."""
    # Nothing of the caller's environment may tilt the comparison.
    for name in [name for name in os.environ if name.startswith(("EAGLE3_EXT", "SGLANG_"))]:
        print(f"(leaving {name}={os.environ.pop(name)} of the environment out of the comparison)")
    machine = machine_facts()
    if machine["load_before"] > 1.0:
        print(f"This machine is busy (load {machine['load_before']}): expect slow and noisy figures.")
    target = make_target()
    evaluation = json.loads(QUESTIONS.read_text())
    questions = [item["prompt"] for item in evaluation["unseen"][: options.questions]]
    servers = make_servers(target, DRAFT, options.threads)
    ours = servers[-1]

    print(f"Target {os.path.relpath(target)}, draft {os.path.relpath(DRAFT)}, logs {os.path.relpath(OUT)}/*.log")
    with running(servers):
        answers = measure.measure(
            servers, questions, options.rounds, options.tokens, warmup=evaluation["seen"][0]["prompt"]
        )
        print("\nOne answer, streamed from the server that runs the draft as it was trained:")
        stream_answer(ours, evaluation["unseen"][-1]["prompt"], max_tokens=3 * options.tokens)
        curl = curl_command(ours, questions[0], options.tokens)
        curl_answer = run_curl(curl) if shutil.which("curl") else None
        print("\nStopping the servers ...", flush=True)

    rows = [measure.sum_up(name, given, answers["baseline"], STEPS) for name, given in answers.items()]
    differences = near_ties.judge(target, find_disagreements(answers))
    rows = [replace(row, near_ties=count_near_ties(differences, row.name)) for row in rows]
    result = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "versions": versions(),
        "settings": {
            "questions": len(questions),
            "rounds": options.rounds,
            "max_tokens": options.tokens,
            "dtype": "bfloat16",
            "threads": options.threads,
            "speculation": {"steps": STEPS, "topk": 1, "draft_tokens": STEPS + 1},
        },
        "runs": [asdict(row) for row in rows],
        "differences": [{**asdict(item), "near_tie": item.is_near_tie} for item in differences],
    }
    (OUT / "demo.json").write_text(json.dumps(result, indent=1) + "\n")

    print(f"\n{len(questions)} questions on topics absent from the training, {options.rounds} rounds:\n")
    print(render.text_table(render.HEADER, render.cells(result)))
    for item in differences:
        print(
            f"  {item.name}, question {item.question + 1}, token {item.position + 1}: logits {item.gap:.3f} "
            f"apart in float32, bfloat16 moves one by up to {item.rounding:.3f}: "
            + ("a near-tie" if item.is_near_tie else "NOT a near-tie")
        )
    print(f"\n{verdict(result)}")
    for remark in weak_draft(result):
        print(remark)
    for doubt in speed_doubts(result):
        print(f"{doubt} Something else kept this machine busy, or it is too small for three servers; run it again.")
    missed = missed_claims(result)
    print(f"\nServe it yourself:\n\n{ours.shell_command()}\n\nand ask it:\n\n{curl}\n")
    if curl_answer is None:
        print("(curl is not installed here, so this command was not tried.)")
    else:
        print(f"(This very command was answered just now: {curl_answer[:70]!r}...)")
    drawn = render.picture(result, OUT / "demo.png")
    print(f"\nAll figures: {os.path.relpath(OUT / 'demo.json')}" + (" and demo.png beside it" if drawn else ""))
    for claim in missed:
        print(f"FAILED: {claim}", file=sys.stderr)
    return int(bool(missed) or not all(item.is_near_tie for item in differences))


def count_near_ties(differences: Sequence[near_ties.Difference], name: str) -> int | None:
    """Count the questions at which one server differed and only by near-ties; ``None`` for the baseline."""
    if name == "baseline":
        return None
    mine = [item for item in differences if item.name == name]
    return len({d.question for d in mine} - {d.question for d in mine if not d.is_near_tie})


def main() -> int:
    """Run the demo and turn a server's failure into its log."""
    options = parse_arguments()
    try:
        return run(options)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; all servers are stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
