"""Measure the accept length of a draft on the 40 evaluation prompts, without a server.

    python evaluate.py --model .demo/SmolLM2-135M-Instruct --answers DATA/evaluation ../draft

The target answers each prompt greedily in float32, up to 128 tokens, once; a chain of three drafts is then
verified against the answers. Accept length = completion tokens / verify steps over all prompts of a half;
the first token of an answer comes from the prompt's own pass and counts as a completion token, as it does
in SGLang.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import prompts
import torch
from draft import Draft
from generate import read, render, store
from safetensors.torch import load_file
from target import Target
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

DRAFTS = 3


class Chains(NamedTuple):
    """Hold what came of verifying chains; ``histogram[i]`` counts the steps that accepted i drafts."""

    completion_tokens: int
    verify_steps: int
    histogram: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Return completion tokens per verify step."""
        return self.completion_tokens / self.verify_steps

    @property
    def conditional(self) -> list[float]:
        """Return how often each draft was accepted, given that those before it were."""
        reached = [sum(self.histogram[i:]) for i in range(len(self.histogram))]
        return [after / max(1, before) for before, after in zip(reached, reached[1:], strict=False)]


@torch.no_grad()
def acceptable(draft: Draft, embedding: Tensor, ids: Tensor, features: Tensor, prompt_length: int) -> list[int]:
    """Return for every position of an answer how many drafts of a chain that starts there the target accepts.

    The feature pass is causal and sees the true tokens only, so one pass serves the chains from all
    positions; a later step of a chain sees the feature pass's keys and its own, which is a row of
    training-time test with drafted instead of true tokens.

    Args:
        draft: the draft.
        embedding: the target's embedding [V, H].
        ids: [L] prompt and answer.
        features: [L, 3*H] the target's states; that of the last token is not read.
        prompt_length: length of the prompt.

    Returns:
        One count for each of the answer's tokens but the last: drafts accepted by a chain that starts from
        this token.
    """
    start, rows = prompt_length - 1, len(ids) - 1
    hidden = draft.fc(features[None, :rows].float())
    tokens, past, accepted = ids[None, 1:], [], torch.zeros(rows - start, dtype=torch.long)
    alive = torch.ones(rows - start, dtype=torch.bool)
    for k in range(DRAFTS):
        hidden = draft.layer(F.embedding(tokens, embedding), hidden, past, start)
        tokens = draft.target_ids[draft.lm_head(draft.norm(hidden)).argmax(-1)]
        # Row start + i holds answer token i in its embedding; its k-th draft stands for answer token i + 1 + k.
        wanted = torch.full((rows - start,), -1)
        wanted[: max(0, rows - start - 1 - k)] = ids[prompt_length + 1 + k :]
        alive &= tokens[0] == wanted
        accepted += alive
    return accepted[:-1].tolist()


def verify(chains: Iterable[tuple[list[int], int]]) -> Chains:
    """Walk through answers, one verify step after the other.

    Args:
        chains: for each answer what ``acceptable`` returned and the number of its tokens.

    Returns:
        The totals.
    """
    histogram, completion, steps = [0] * (DRAFTS + 1), 0, 0
    for accepted, tokens in chains:
        at = 0
        while at < len(accepted):
            histogram[accepted[at]] += 1
            steps += 1
            at += accepted[at] + 1
        completion += tokens
    return Chains(completion, steps, tuple(histogram))


def open_draft(directory: pathlib.Path, target_config: dict[str, Any]) -> Draft:
    """Load a draft, its bfloat16 weights widened to float32.

    Args:
        directory: folder with ``model.safetensors``.
        target_config: the target's configuration.

    Returns:
        The draft.
    """
    offsets = load_file(directory / "model.safetensors")["d2t"]
    draft = Draft(target_config, (offsets + torch.arange(len(offsets))).tolist())
    draft.load(directory)
    return draft.requires_grad_(False).eval()


def main() -> None:
    """Answer the evaluation prompts and print one row per draft and half."""
    here = pathlib.Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", type=pathlib.Path, nargs="+", help="folders of drafts")
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of the dequantised target")
    parser.add_argument("--answers", type=pathlib.Path, required=True, help="folder of the answers; filled when empty")
    parser.add_argument("--prompts", type=pathlib.Path, default=here.parent / "prompts_eval.json")
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--json", type=pathlib.Path, help="file to write the figures to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = json.loads(arguments.prompts.read_text())
    training = "\n".join(chat.user.lower() for chat in prompts.questions() + prompts.forms() + prompts.validation())
    leaked = [e["topic"] for e in asked["unseen"] if e["topic"].lower() in training]
    leaked += [e["prompt"] for half in asked.values() for e in half if e["prompt"].lower() in training]
    if leaked:
        raise ValueError(
            f"{arguments.prompts}: named in training prompts, got {leaked}; "
            "evaluation prompts must be new. Change them."
        )
    config = json.loads((arguments.model / "config.json").read_text())
    embedding = load_file(arguments.model / "model.safetensors")["model.embed_tokens.weight"].float()
    figures: dict[str, dict[str, Any]] = {str(d): {} for d in arguments.drafts}
    for half, entries in asked.items():
        path = arguments.answers / f"{half}.safetensors"
        if not path.exists():
            tokenizer = AutoTokenizer.from_pretrained(arguments.model)
            chats = [render(tokenizer, prompts.Conversation(None, e["prompt"])) for e in entries]
            arguments.answers.mkdir(parents=True, exist_ok=True)
            store(path, Target(arguments.model, 32).answer(chats, arguments.max_new))
        answers = read([path])
        for directory in arguments.drafts:
            draft = open_draft(directory, config)
            kept = set(draft.target_ids.tolist())
            chains = []
            for a in answers:
                length = a.prompt_length
                chains.append((acceptable(draft, embedding, a.ids, a.features, length), len(a.ids) - length))
            result = verify(chains)
            covered = sum(t in kept for a in answers for t in a.ids[a.prompt_length :].tolist())
            figures[str(directory)][half] = {
                "accept_length": round(result.accept_length, 4),
                "completion_tokens": result.completion_tokens,
                "verify_steps": result.verify_steps,
                "histogram": list(result.histogram),
                "conditional_acceptance": [round(c, 4) for c in result.conditional],
                "vocabulary_coverage": round(covered / result.completion_tokens, 4),
            }
            print(directory, half, json.dumps(figures[str(directory)][half]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
