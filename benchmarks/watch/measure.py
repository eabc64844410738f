"""Measure what the watch sees of right and wrong assemblies of the demo's draft, verify step by verify step.

    python -m benchmarks.watch.measure [--weak DRAFT]

The demo's target answers 48 prompts of eight categories (``prompts.json``) and the 40 prompts of the demo's
evaluation; every boundary is kept. Then it is replayed how chains of three drafts would have been served, for the
right assembly and for wrong ones. It leaves ``sequences.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.demo.target import ROOT, make_target
from benchmarks.stamp import DRAFT, demo_draft, stamp
from sglang_eagle3_ext import reference
from sglang_eagle3_ext.probe.features import Features, FeatureWriter, capture, encode, load_target, read_prompts
from sglang_eagle3_ext.probe.search import accepted
from sglang_eagle3_ext.spec import Boundary

HERE = Path(__file__).parent
PROMPTS = (HERE / "prompts.json", ROOT / "benchmarks" / "demo" / "prompts_eval.json")
OUT = HERE / "sequences.json"
STEPS = 3
MAX_NEW = 160

RIGHT: tuple[Boundary, ...] = (0, 4, 16)
WRONG: dict[str, tuple[Boundary, ...]] = {
    # what stock SGLang captures by default, and the three layers of docs/story.md
    "stock_default": (2, 15, 27),
    "story": (4, 16, 28),
    # the right states in another order
    "order_021": (0, 16, 4),
    "order_102": (4, 0, 16),
    "order_210": (16, 4, 0),
    # off by one, all of them and one of them
    "down_all": (0, 3, 15),
    "up_all": (1, 5, 17),
    "up_first": (1, 4, 16),
    "down_second": (0, 3, 16),
    "up_second": (0, 5, 16),
    "down_third": (0, 4, 15),
    "up_third": (0, 4, 17),
    # one source far off
    "far_second": (0, 12, 16),
    "last": (0, 4, 30),
}
SWITCHES: dict[str, dict[str, Any]] = {
    "residual": {"residual": "post_norm"},
    "recurrent_state": {"recurrent_state": "post_norm"},
    "rope_theta": {"rope_theta": 10000.0},
}


def write_features(target: Path, file: Path) -> Features:
    """Let the target answer every prompt and keep its states."""
    prompts = [prompt for path in PROMPTS for prompt in read_prompts(path)]
    with (
        FeatureWriter(file, target=target.name, steps=STEPS) as writer,
        tqdm(total=len(prompts) * MAX_NEW, desc="answering", unit="token") as bar,
    ):
        capture(
            load_target(target),
            encode(prompts, target),
            [prompt.group for prompt in prompts],
            writer,
            max_new_tokens=MAX_NEW,
            steps=STEPS,
            progress=bar.update,
        )
    return Features.open(file)


def walk(counts: list[int], completion_tokens: int) -> str:
    """Go through one answer; return the accepted drafts of each verify step, a digit each.

    Args:
        counts: accepted drafts of a chain at every row of the answer.
        completion_tokens: length of the answer, the token from prefill included.
    """
    walked, emitted = "", 1
    while emitted < completion_tokens:
        drafts = counts[emitted - 1]
        walked += str(drafts)
        emitted += drafts + 1
    return walked


def replay(features: Features, target: Path, drafts: dict[str, Path]) -> list[dict[str, Any]]:
    """Replay every answer with every assembly.

    Args:
        features: the answers and their states.
        target: lends its embedding.
        drafts: further drafts of the same assembly, by the name their row gets.

    Returns:
        For each answer its category and, by assembly, the accepted drafts of each verify step.
    """
    right = reference.load(DRAFT, target=target)
    others = {name: reference.load(DRAFT, override=keys, target=target) for name, keys in SWITCHES.items()}
    others |= {name: reference.load(path, target=target) for name, path in drafts.items()}
    runs = [("right", right, RIGHT), *((name, right, sources) for name, sources in WRONG.items())]
    runs += [(name, draft, RIGHT) for name, draft in others.items()]
    out = []
    for answer in tqdm(features.answers, desc="replaying", unit="text"):
        states = answer.states[: len(answer.tokens) - 1].float()
        counts = {}
        with torch.inference_mode():
            for name, draft, sources in runs:
                hidden = draft.project(states[:, list(sources)].flatten(1))
                counts[name] = walk(accepted(draft, hidden, answer, STEPS).tolist(), answer.completion_tokens)
        out.append({"category": answer.group, "counts": counts})
    return out


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weak", type=Path, metavar="DRAFT", help="an earlier, weaker draft of the same assembly")
    arguments = parser.parse_args()
    target = make_target()
    stamped = stamp() | {"draft_sha256": demo_draft()}
    with tempfile.TemporaryDirectory(prefix="sglang-eagle3-") as folder:
        features = write_features(target, Path(folder) / "features")
        replayed = replay(features, target, {} if arguments.weak is None else {"weak": arguments.weak})
    head = json.dumps(stamped)
    # One line for each text, so that changes can be read.
    lines = ",\n".join(map(json.dumps, replayed))
    OUT.write_text(f'{head[:-1]}, "texts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
