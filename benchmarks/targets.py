"""Run the capture tests on every target class and write docs/targets.md: python -m benchmarks.targets [--render]

The tests leave what they found in ``benchmarks/results/targets.json``; the page is written from that file and from the
table of stock's readings. ``--render`` writes the page alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_eagle3_ext.spec import STOCK_READINGS, StockReading

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "targets.md"
RESULTS = ROOT / "benchmarks" / "results" / "targets.json"
TESTS = ROOT / "tests" / "test_host" / "capture_targets.py"

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
`residual_batch.snapshot` at the entry of each layer (`=`: equal bit for bit). transformers {transformers}, PyTorch
{torch}.

| target class | serves | stock reads id k as | stock captures boundary n | transformers | snapshot |
|---|---|---|---|---|---|
"""

NOTES = """
- **Hyper-connections** (GLM-5-Next with `mhc`): between layers the stream is several times as wide as the target.
  Boundaries 1 to n - 1 are refused when the target loads. The ends are served; they were not run on a CPU.
- **Qwen4-Exp**: its wrapper puts streams of its own in the place of captured states, so nothing can be served; refused.
- **Gemma-3**: stock captures a layer's contribution without its residual; only the embedding comes out right there.
- **Deepstack** (Qwen3-VL and its kin): visual features that are added behind layers 0 to 2 are in boundaries 1 to 3,
  as they are in what the next layer reads. transformers' `hidden_states` leave them out; so do captures under SGLang's
  `rl_on_policy_target`.
- **Intern-S1-Pro** (`InternS1ProForConditionalGeneration`): SGLang 0.5.23 cannot build the class; nothing was tested.
- **MindSpore** (`--model-impl mindspore`): not PyTorch modules; refused.
- **Pipeline parallelism** and **two-batch overlap**: refused in the launcher; stages and micro-batches never meet.
- A class without an EAGLE-3 setter of its own is served when it is built on SGLang's layer boundaries and takes
  captured states from its stack; otherwise it is refused when the target loads.
- States whose rows are not those of the batch (expert parallelism that leaves each rank a slice) stop the server with
  an error.
"""

BROKEN = "InternS1ProForConditionalGeneration"

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


def row(name: str, found: dict[str, Any], reading: StockReading, every: int) -> str:
    """Write one class as a line of the table."""
    serves = found["serves"]
    if len(serves) == every:
        words = "every b, `final_norm`"
    else:
        words = ", ".join("n" if b == found["layers"] else f"`{b}`" if b == "final_norm" else str(b) for b in serves)
    last = "as contribution" if not reading.captures_residual else "yes" if reading.captures_last else "no"
    stock = (READS[reading.ids], last) if found["measured"] else ("", "")
    difference = found["max_difference"]
    hf = f"`{found['transformers']}` {f'{difference:.0e}' if difference else '='}" if found["transformers"] else ""
    cells = (f"`{name}`", words or "nothing", *stock, hf, "=" if found["snapshot"] else "")
    return "| " + " | ".join(cells) + " |\n"


def page(results: dict[str, Any]) -> str:
    """Write docs/targets.md from what the tests found."""
    classes = results["classes"]
    every = max(len(found["serves"]) for found in classes.values())
    layers = max(found["layers"] for found in classes.values())
    rows = [row(name, found, STOCK_READINGS[name.split()[0]], every) for name, found in sorted(classes.items())]
    return INTRODUCTION.format(layers=layers, **results["versions"]) + "".join(rows) + NOTES


def main() -> int:
    """Run the tests unless told otherwise, and write the page."""
    parser = argparse.ArgumentParser(description="Test capture on every target class; write docs/targets.md.")
    parser.add_argument("--render", action="store_true", help="write the page from the committed results alone")
    if not parser.parse_args().render:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
        command = [sys.executable, "-m", "pytest", "-q", str(TESTS)]
        done = subprocess.run(command, cwd=ROOT, env=environment | {"CAPTURE_RESULTS": str(RESULTS)}, check=False)
        if done.returncode:
            return done.returncode
    PAGE.write_text(page(read_results()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
