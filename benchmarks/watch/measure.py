"""Measure what the watch sees of right and wrong assemblies of the demo's draft, verify step by verify step.

    python -m benchmarks.watch.measure answer --out DATA          # the target's greedy answers; minutes
    python -m benchmarks.watch.measure replay --answers DATA --out benchmarks/watch/sequences.json

``answer`` lets the demo's target answer 48 prompts of eight categories (``prompts.json``) and the 40 prompts
of the demo's evaluation. ``replay`` captures every boundary of the target on these texts and replays how chains
of three drafts would have been served, for the right assembly and for wrong ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.stamp import DRAFT, demo_draft, stamp
from sglang_eagle3_ext import reference
from sglang_eagle3_ext.spec import Boundary

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".demo" / "SmolLM2-135M-Instruct"
PROMPTS = Path(__file__).parent / "prompts.json"
EVALUATION = ROOT / "benchmarks" / "demo" / "prompts_eval.json"
STEPS = 3
MAX_NEW = 160
BATCH = 22

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


def answer(out: Path) -> None:
    """Write the target's greedy answers to every prompt: category, prompt ids and answer ids of each."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    asked = [(c, p) for c, prompts in json.loads(PROMPTS.read_text()).items() for p in prompts]
    asked += [(half, e["prompt"]) for half, entries in json.loads(EVALUATION.read_text()).items() for e in entries]
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    texts = []
    for at in tqdm(range(0, len(asked), BATCH), desc="answering", unit="batch"):
        some = asked[at : at + BATCH]
        chats = [[{"role": "user", "content": prompt}] for _, prompt in some]
        rendered = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        batch = tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            rows = model.generate(**batch, max_new_tokens=MAX_NEW, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        width = batch.input_ids.shape[1]
        for (category, _), row, prompt, mask in zip(some, rows, batch.input_ids, batch.attention_mask, strict=True):
            tokens = row[width:].tolist()
            length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
            texts.append({"category": category, "prompt": prompt[mask.bool()].tolist(), "answer": tokens[:length]})
    out.write_text(json.dumps(texts))


def accepted(draft: reference.ReferenceDraft, tokens: torch.Tensor, features: torch.Tensor, prompt: int) -> list[int]:
    """Walk through one answer; drafts beyond its end count as rejected.

    Args:
        draft: the draft.
        tokens: [T] target ids, prompt and answer.
        features: at least [T-1, K*M] states of the target.
        prompt: tokens of the prompt.

    Returns:
        Accepted drafts of each verify step.
    """
    answer = len(tokens) - prompt
    rows = torch.arange(prompt - 1, len(tokens) - 2)
    if not len(rows):
        return []
    padded = torch.nn.functional.pad(tokens, (0, STEPS), value=-1)
    wanted = padded.unfold(0, STEPS, 1)[rows + 2]  # [R, STEPS]
    step, cache = draft.feature_pass(draft.project(features[: len(tokens) - 1]), tokens)
    here = step[rows]
    proposed = draft.to_target(here.best())
    counts = (proposed == wanted[:, 0]).long()
    # Only where the first draft was accepted does it matter how the chain goes on.
    on = counts.nonzero()[:, 0]
    chains, here, proposed, alive = reference.Chains(draft, cache, rows[on]), here[on], proposed[on], counts[on].bool()
    for k in range(1, STEPS if len(on) else 1):
        here = chains.advance(proposed, here.state)
        proposed = draft.to_target(here.best())
        alive &= proposed == wanted[on, k]
        counts[on] += alive
    walked, emitted = [], 1
    while emitted < answer:
        walked.append(int(counts[emitted - 1]))
        emitted += walked[-1] + 1
    return walked


def replay(texts: list[dict[str, Any]], drafts: dict[str, Path]) -> list[dict[str, Any]]:
    """Replay every text with every assembly.

    Args:
        texts: what ``answer`` wrote.
        drafts: further drafts of the same assembly, by the name their row gets.

    Returns:
        For each text its category and, by assembly, the accepted drafts of each verify step as one string of digits.
    """
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    embed, layers = model.get_input_embeddings().weight.detach(), model.config.num_hidden_layers
    every: list[Boundary] = [*range(layers + 1), "final_norm"]
    right = reference.load(DRAFT, embed=embed)
    others = {name: reference.load(DRAFT, override=keys, embed=embed) for name, keys in SWITCHES.items()}
    others |= {name: reference.load(path, embed=embed) for name, path in drafts.items()}
    runs = [("right", right, RIGHT), *((name, right, sources) for name, sources in WRONG.items())]
    runs += [(name, draft, RIGHT) for name, draft in others.items()]
    out = []
    for text in tqdm(texts, desc="replaying", unit="text"):
        tokens = torch.tensor(text["prompt"] + text["answer"])
        states = reference.capture_hf(model, tokens, every).unflatten(1, (len(every), -1))
        counts = {}
        with torch.inference_mode():
            for name, draft, sources in runs:
                features = states[:, [every.index(b) for b in sources]].flatten(1)
                counts[name] = "".join(map(str, accepted(draft, tokens, features, len(text["prompt"]))))
        if counts["right"]:
            out.append({"category": text["category"], "counts": counts})
    return out


def main() -> None:
    """Run one of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("answer")
    second = steps.add_parser("replay")
    second.add_argument("--answers", type=Path, required=True)
    second.add_argument("--weak", type=Path, help="an earlier, weaker draft of the same assembly")
    second.add_argument("--only", default="::", help="a slice of the texts, such as 0::2")
    for step in (first, second):
        step.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.step == "answer":
        answer(arguments.out)
        return
    texts = json.loads(arguments.answers.read_text())
    chosen = texts[slice(*(int(n) if n else None for n in arguments.only.split(":")))]
    stamped = stamp() | {"draft_sha256": demo_draft()}
    replayed = replay(chosen, {} if arguments.weak is None else {"weak": arguments.weak})
    head = json.dumps(stamped)
    # One line for each text, so that changes can be read.
    lines = ",\n".join(map(json.dumps, replayed))
    arguments.out.write_text(f'{head[:-1]}, "texts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
