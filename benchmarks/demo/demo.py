"""Three servers, the same questions, one table: python -m benchmarks.demo.demo (or: make demo)

A small Llama-type model is served without speculation, with an EAGLE-3 draft as stock SGLang reads it
(``EAGLE3_EXT=off``), and with the same draft as it was trained. All three run at once with the same flags and
take turns at every question, one request at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.demo.target import ROOT, make_target
from sglang_eagle3_ext.host import bench, report
from sglang_eagle3_ext.host.measure import MODEL, client_of
from sglang_eagle3_ext.host.servers import Server, ServerError

OUT = ROOT / ".demo"
DRAFT = ROOT / "benchmarks" / "demo" / "draft"
QUESTIONS = ROOT / "benchmarks" / "demo" / "prompts_eval.json"
STEPS = 3

STOCK_AT_MOST, OURS_AT_LEAST = 1.25, 1.6
"""What the demo claims of the accept lengths. They hardly depend on the machine, so that a run that misses them
has found a fault; speeds do, and a run on a busy machine only says so."""

GROUPS = {"unseen": "absent from the training, too", "seen": "of the training"}

# On the CPU also where there is a GPU: the figures are meant for any machine.
CPU_FLAGS = ("--device", "cpu", "--attention-backend", "eagle3_cpu", "--dtype", "bfloat16")


def stream_answer(server: Server, question: str, max_tokens: int) -> None:
    """Print one answer as it arrives."""
    print(f"\n> {question}\n", flush=True)
    stream = client_of(server).chat.completions.create(
        model=MODEL,
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
        "model": MODEL,
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
    if not (lengths["ours"] or 0.0) >= OURS_AT_LEAST:
        missed.append(
            f"ours: got {_spell_length(lengths['ours'])}; expected at least {OURS_AT_LEAST} from this draft as it was "
            "trained. See the start-up block in ours.log for how it was read."
        )
    if not (lengths["stock"] or STEPS + 1) <= STOCK_AT_MOST:
        missed.append(
            f"stock: got {_spell_length(lengths['stock'])}; expected at most {STOCK_AT_MOST} from this draft by "
            "stock's rules. Check in stock.log that EAGLE3_EXT=off was in force."
        )
    return missed


def _spell_length(length: float | None) -> str:
    return "no drafts at all" if length is None else f"accept length {length:.2f}"


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
    parser.add_argument("--questions", type=int, default=20, help="how many questions to ask (default 20)")
    parser.add_argument("--rounds", type=int, default=2, help="how often to ask each (default 2)")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer (default 48)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each server (default 1)")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Run the whole demo; return 0, or 1 when a claim is missed or an output differs and is no near-tie."""
    for line in bench.leave_out_environment(("EAGLE3_EXT", "SGLANG_")):
        print(line)
    machine = bench.machine_facts()
    if warning := bench.busy(machine):
        print(warning)
    target = make_target()
    evaluation = json.loads(QUESTIONS.read_text())
    # Half of them on topics absent from the draft's training; none of the questions themselves is in it.
    half = (options.questions + 1) // 2
    asked = [bench.Prompt(item["prompt"], group) for group in ("unseen", "seen") for item in evaluation[group][:half]]
    prompts = tuple(asked[: options.questions])
    settings = bench.Settings(
        draft=str(DRAFT),
        target=str(target),
        out=OUT,
        rows=("baseline", "stock", "ours"),
        prompts=prompts,
        warmup=evaluation["seen"][-1]["prompt"],
        rounds=options.rounds,
        tokens=options.tokens,
        steps=STEPS,
        draft_tokens=STEPS + 1,
        flags=CPU_FLAGS,
        environment={"OMP_NUM_THREADS": str(options.threads)},
    )
    by_hand: list[str] = []

    def while_up(servers: Sequence[Server]) -> None:
        ours = servers[-1]
        print("\nOne answer, streamed from the server that runs the draft as it was trained:")
        stream_answer(ours, evaluation["unseen"][-1]["prompt"], max_tokens=3 * options.tokens)
        curl = curl_command(ours, prompts[0].text, options.tokens)
        answer = run_curl(curl) if shutil.which("curl") else None
        tried = (
            "(curl is not installed here, so this command was not tried.)"
            if answer is None
            else f"(This very command was answered just now: {answer[:70]!r}...)"
        )
        by_hand.append(f"\nServe it yourself:\n\n{ours.shell_command()}\n\nand ask it:\n\n{curl}\n\n{tried}")
        print("\nStopping the servers ...", flush=True)

    print(f"Target {os.path.relpath(target)}, draft {os.path.relpath(DRAFT)}, logs {os.path.relpath(OUT)}/*.log")
    result = bench.compare(settings, machine, OUT / "demo.json", while_up)

    print(f"\n{len(prompts)} questions absent from the training, {options.rounds} rounds:\n")
    print(report.text_table(report.HEADER, report.cells(result)))
    for group, figures in result["groups"].items():
        length = figures["spec_accept_length"]["ours"]
        print(f"  {figures['prompts']} on topics {GROUPS[group]}: {_spell_length(length)} as it was trained")
    for item in result["differences"]:
        print(f"  {report.describe(item, result['settings']['dtype'])}")
    print(f"\n{verdict(result)}")
    for doubt in speed_doubts(result):
        print(f"{doubt} Something else kept this machine busy, or it is too small for three servers; run it again.")
    missed = missed_claims(result)
    print(*by_hand, sep="\n")
    drawn = report.picture(result, OUT / "demo.png")
    print(f"\nAll figures: {os.path.relpath(OUT / 'demo.json')}" + (" and demo.png beside it" if drawn else ""))
    for claim in missed:
        print(f"FAILED: {claim}", file=sys.stderr)
    return int(bool(missed) or not all(item["near_tie"] for item in result["differences"]))


def main() -> int:
    """Run the demo and turn a server's failure into its log."""
    options = parse_arguments()
    try:
        return run(options)
    except (bench.BenchError, ServerError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; all servers are stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
