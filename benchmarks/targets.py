"""Run the tests of captured states and write docs/targets.md: python -m benchmarks.targets [--only PART ...] [--render]

The tests leave what they found in ``benchmarks/results/targets.json``, each in a part of its own; the page is written
from that file and from the table of stock's readings. ``--only`` runs some of the parts, ``--render`` none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.stamp import stamp
from sglang_eagle3_ext.spec import STOCK_READINGS, StockReading

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "targets.md"
RESULTS = ROOT / "benchmarks" / "results" / "targets.json"


class Part(NamedTuple):
    """A part of the results: the tests it comes from, and the variable that names the file they leave it in."""

    tests: Path
    variable: str


PARTS = {
    "classes": Part(ROOT / "tests" / "test_host" / "capture_targets.py", "CAPTURE_RESULTS"),
    "own": Part(ROOT / "tests" / "test_host" / "own_layers.py", "OWN_RESULTS"),
    "ranks": Part(ROOT / "tests" / "test_host" / "tensor_parallel.py", "RANKS_RESULTS"),
    "load": Part(ROOT / "tests" / "test_host" / "features_under_load.py", "LOAD_RESULTS"),
    "kimi": Part(ROOT / "tests" / "test_e2e" / "test_kimi.py", "KIMI_RESULTS"),
}

INTRODUCTION = """# Targets

<!-- Written by `python -m benchmarks.targets`. -->

The target classes of SGLang {sglang} that EAGLE-3 can be served on, and what a draft may be trained on there. `b` is
any boundary: the residual stream before layer b, from the embedding (0; scaled, images merged in) to the output of the
last layer (n; before the final norm). See [notation](notation.md).

Capture does not go through a class's own ids, defaults and collectors. It takes the stream at SGLang's layer
boundaries, which all of these classes but Gemma-3 are built on; Gemma-3's layers hand the residual on beside their
contribution, and the two are summed. The states leave the stack of layers as its outputs, in ascending order.

Each class was built with {layers} layers and random weights, in float32, on a CPU: SGLang's own stack, decoder layers,
layer boundaries, norms and logits processor, with small functions in the place of attention and MLP (and nothing in
the place of vision towers). Boundaries 0, 1, 3, n - 1, n and the final norm were compared with transformers' hidden
states for the same weights and functions (largest difference in units of the largest value), and with SGLang's
`residual_batch.snapshot` at the entry of each layer (`=`: equal bit for bit).

| target class | serves | stock reads id k as | stock captures boundary n | transformers | snapshot | two ranks |
|---|---|---|---|---|---|---|
"""

NOTES = """
- **Hyper-connections** (GLM-5-Next with `mhc`): between layers the stream is several times as wide as the target.
  Boundaries 1 to n - 1 are refused when the target loads. The ends are served; they were run with two streams.
- **Qwen4-Exp**: its wrapper puts streams of its own in the place of captured states, so nothing can be served; refused.
- **Gemma-3**: stock captures a layer's contribution without its residual; only the embedding comes out right there.
- **Deepstack** (Qwen3-VL and its kin): visual features that are added behind layers 0 to 2 are in boundaries 1 to 3,
  as they are in what the next layer reads. transformers' `hidden_states` leave them out; so do captures under SGLang's
  `rl_on_policy_target`.
- **MindSpore** (`--model-impl mindspore`) was tested by a module of the same shape, without MindSpore.
- **No GPU** has run any of this: neither sums over ranks that are fused with a norm, which the proof at start leaves
  out of its own pass, nor CUDA graphs.
- **Pipeline parallelism**, **two-batch overlap** and **multiplexed prefill** are refused in the launcher: stages,
  micro-batches and split prefills hand no states to the draft. **Attention data parallelism** and **context
  parallelism** are refused there, too, because nothing has shown yet that they do.
- A class without an EAGLE-3 setter of its own is served when it is built on SGLang's layer boundaries and takes
  captured states from its stack; otherwise it is refused when the target loads.
- States whose rows are not those of the batch (expert parallelism that leaves each rank a slice) stop the server with
  an error.
"""

OWN = """
## Attention and experts of their own

These were brought up with a draft by SGLang's workers on the CPU platform, on one rank, in float32, with all that their
layers compute. States of whole prompts, of chunks, of requests beside each other and of single tokens were compared
with transformers' for the same weights (four other classes likewise, on one rank and on two: next section):

| target class | largest difference, in units of the largest value |
|---|---|
{rows}
The rest were not, and why; a part of a model is named where that platform has none:

| target classes | why not |
|---|---|
{not_run}"""

RANKS = """
## Tensor parallelism

Each class that serves states was built again on two ranks (gloo), with stand-ins of which each rank computes some of
the columns, so that SGLang's boundaries have to sum over the ranks (Gemma-3's layers sum by themselves; its stand-ins
are whole). `=` under *two ranks*: what reaches the draft is, on both ranks and bit for bit, what one rank hands out,
and what the proof at start compares is equal on each.

With their own attention and experts, these were brought up with a draft by SGLang's workers, on one rank and on two, in
float32. States of whole prompts, of chunks, of requests beside each other and of single tokens were compared with
transformers' for the same weights:

| target class | largest difference, in units of the largest value |
|---|---|
{rows}
There, too, both ranks hand out the same bits, and the draft's `fc`, of which each rank holds half the columns, reads
the states in the order that the draft declares, which was not that of the target's layers. Gemma-3's layers all
attended to everything: the CPU platform has no sliding windows. Experts that ranks share out whole (`--ep-size`) do not
run on that platform and were not tested.
"""

LOAD = """
## Under load

A scheduler of SGLang's on the CPU platform, as one rank and then as two, with a Kimi-K2.5 in miniature ({layers}
layers, latent attention, experts, random weights, float32) and a draft trained on `{sources}`: {requests} requests,
trees of {draft_tokens} tokens, prompts in chunks of {chunk} tokens, {cached} prompt tokens out of the radix cache, up
to {widest} lengths side by side, {retractions} retraction(s), {aborted} requests aborted. Every row that the draft was
fed ({rows} of them, on all three ranks) is the row that transformers computes for that position of that text alone
(largest difference {states:.1e} in units of the largest value), and so is every row of the draft's own cache
({cache_rows} of them, {keys:.1e}). The same test sees rows that are moved within a batch, behind a cached prefix, or in
verification. One at a time on one rank, {alone[answers]} answers took {alone[verify_steps]} verify steps: an accept
length of {alone[accept_length]}, {alone[predicted]} by the reference.
"""

KIMI = """
## Kimi-K2.5 in miniature, served

The wrapper's files with the structure of the public configuration in tiny sizes ({layers} layers, the first one dense,
yarn, a vision tower), loaded by SGLang's server on the CPU platform in float32. The drafts were trained by the test on
the target's own greedy text, on `{sources}`, which arrive as boundaries {boundaries}. Tokens are those of transformers'
greedy text without speculation; the accept length is what the reference predicts on that text.

| draft | speculation | answers | verify steps | accept length | predicted | proof at start |
|---|---|---|---|---|---|---|
"""

KINDS = {"latent": "latent attention (MLA)", "grouped": "Llama-type"}

READS = {
    "output": "output of layer k",
    "boundary": "boundary k",
    "first_is_one": "output of layer k where the first id is 1, else boundary k",
    "max_is_n": "boundary k where the largest id is n, else output of layer k",
}


def read_results() -> dict[str, Any]:
    """Read what the tests found."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    return results


def measured_on(part: dict[str, Any]) -> str:
    """Say where and with what a part was measured."""
    machine, versions = part["machine"], part["versions"]
    with_what = f"SGLang {versions['sglang']}, PyTorch {versions['torch']}, transformers {versions['transformers']}"
    return f"{machine['cpu']}, {machine['cores']} cores, {with_what}, {part['date']}."


def row(name: str, found: dict[str, Any], reading: StockReading | None, every: int, on_ranks: bool) -> str:
    """Write one class as a line of the table."""
    serves = found["serves"]
    if len(serves) == every:
        words = "every b, `final_norm`"
    else:
        words = ", ".join("n" if b == found["layers"] else f"`{b}`" if b == "final_norm" else str(b) for b in serves)
    stock = ("", "")
    if reading is not None and found["measured"]:
        last = "as contribution" if not reading.captures_residual else "yes" if reading.captures_last else "no"
        stock = READS[reading.ids], last
    difference = found["max_difference"]
    hf = f"`{found['transformers']}` {f'{difference:.0e}' if difference else '='}" if found["transformers"] else ""
    words = words or f"nothing ({found['why']})"
    cells = (f"`{name}`", words, *stock, hf, "=" if found["snapshot"] else "", "=" if on_ranks else "")
    return "| " + " | ".join(cells) + " |\n"


def page(results: dict[str, Any]) -> str:
    """Write docs/targets.md from what the tests found; a part that was never run is left out."""
    classes = results["classes"]["classes"]
    every = max(len(found["serves"]) for found in classes.values())
    layers = max(found["layers"] for found in classes.values())
    own, ranks, load, kimi = (results.get(name) for name in ("own", "ranks", "load", "kimi"))
    alike = set(ranks["classes"]) if ranks is not None else set()
    rows = [
        row(name, found, STOCK_READINGS.get(name.split()[0]), every, name in alike)
        for name, found in sorted(classes.items())
    ]
    text = INTRODUCTION.format(layers=layers, sglang=results["classes"]["versions"]["sglang"]) + "".join(rows)
    text += f"\n{measured_on(results['classes'])}\n{NOTES}"
    if own is not None:
        served = (f"| `{name}` | {worst:.1e} |\n" for name, worst in own["served"].items())
        reasons: dict[str, list[str]] = {}
        for name, why in own["not_run"].items():
            reasons.setdefault(why, []).append(f"`{name}`")
        not_run = (f"| {', '.join(sorted(names))} | {why} |\n" for why, names in sorted(reasons.items()))
        text += f"{OWN.format(rows=''.join(served), not_run=''.join(not_run))}\n{measured_on(own)}\n"
    if ranks is not None:
        served = (f"| `{name}` | {worst:.1e} |\n" for name, worst in ranks["served"].items())
        text += f"{RANKS.format(rows=''.join(served))}\n{measured_on(ranks)}\n"
    if load is not None:
        text += f"{LOAD.format(**load)}\n{measured_on(load)}\n"
    if kimi is not None:
        text += KIMI.format(**{**kimi, "sources": ", ".join(kimi["sources"])})
        for name, found in kimi["served"].items():
            kind, shape = name.split()
            cells = (KINDS[kind], shape, *(found[k] for k in ("answers", "verify_steps", "accept_length", "predicted")))
            text += "| " + " | ".join(map(str, cells)) + f" | {found['proof_s']} s |\n"
        text += f"\n{measured_on(kimi)}\n"
    return text


def run(name: str) -> int:
    """Run the tests of one part and take over what they found; return their exit code."""
    part = PARTS[name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        stamped = stamp()
        command = [sys.executable, "-m", "pytest", "-q", str(part.tests)]
        code = subprocess.run(command, cwd=ROOT, env=environment | {part.variable: str(file)}, check=False).returncode
        if not code:
            results = read_results() if RESULTS.exists() else {}
            results.pop("versions", None)  # once of one part, now of each
            results |= {"schema": 2, name: stamped | json.loads(file.read_text())}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return code


def main() -> int:
    """Run the tests unless told otherwise, and write the page."""
    parser = argparse.ArgumentParser(description="Test what drafts are fed; write docs/targets.md.")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run again")
    parser.add_argument("--render", action="store_true", help="write the page from the committed results alone")
    arguments = parser.parse_args()
    for name in [] if arguments.render else arguments.only:
        if code := run(name):
            return code
    PAGE.write_text(page(read_results()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
