"""Let the target answer the training prompts and store what the draft trains on.

    python generate.py --model .demo/SmolLM2-135M-Instruct --out DATA --shard 0 --of 2 &
    python generate.py --model .demo/SmolLM2-135M-Instruct --out DATA --shard 1 --of 2

Every batch of prompts becomes one file ``DATA/questions-00012.safetensors`` (with ``--forms``
``forms-00012.safetensors``, with ``--temperature 0.7`` ``sampled-questions-0.7-0-00012.safetensors``, which ends in the
seed and the batch) with the tensors

- ``ids`` [N] int32: the sequences (prompt, then answer), one after the other; ``starts`` [R + 1] and
  ``prompt_lengths`` [R] cut them apart;
- ``features`` [N, 1728] bfloat16: boundaries 0, 4 and 16 of the target at every position (zeros at an
  answer's last token);
- ``final`` [N, 576] bfloat16: the final normed state.

A file appears when it is complete, and a batch that has its file is skipped: stop and start at will, with
any number of shards. After every fourth batch of a shard its short answers are carried one turn further
(``*-follow-*``). ``validation-*`` is answered first, by shard 0.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import prompts
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from target import Answer, Target
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

FOLLOWED_BATCHES = 4
FOLLOW_UP_ROWS = 48
FOLLOW_UP_MAX_ANSWER = 100
SHORTEST = 5


def render(tokenizer: Any, conversation: prompts.Conversation) -> list[int]:
    """Return the token ids of a chat up to where the assistant begins, by the target's own template.

    Args:
        tokenizer: the target's tokenizer.
        conversation: what to render.

    Returns:
        Token ids.
    """
    system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    chat = [*system, {"role": "user", "content": conversation.user}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def store(path: pathlib.Path, answers: list[Answer]) -> int:
    """Write the answers of one batch to ``path``, complete or not at all.

    Args:
        path: file to write.
        answers: what the target answered.

    Returns:
        The number of generated tokens.
    """
    ids, features, final, starts, lengths = [], [], [], [0], []
    for answer in answers:
        sequence = answer.prompt + answer.completion
        ids += sequence
        starts.append(len(ids))
        lengths.append(len(answer.prompt))
        for parts, states in ((features, answer.features), (final, answer.final)):
            padded = torch.zeros(len(sequence), states.shape[1], dtype=torch.bfloat16)
            padded[: len(states)] = states[: len(sequence)]
            parts.append(padded)
    tensors = {
        "ids": torch.tensor(ids, dtype=torch.int32),
        "starts": torch.tensor(starts, dtype=torch.int32),
        "prompt_lengths": torch.tensor(lengths, dtype=torch.int32),
        "features": torch.cat(features),
        "final": torch.cat(final),
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)
    return sum(len(a.completion) for a in answers)


class Sequence(NamedTuple):
    """Hold one stored chat; the tensors are views of memory-mapped files."""

    ids: Tensor
    features: Tensor
    final: Tensor
    prompt_length: int


def read(paths: list[pathlib.Path]) -> list[Sequence]:
    """Return the sequences of data files without reading their states into memory.

    Args:
        paths: files written by ``generate.py``.

    Returns:
        The sequences whose answer has more than a few tokens.
    """
    sequences = []
    for path in paths:
        with safe_open(path, "pt") as file:
            ids, features, final = (file.get_tensor(name) for name in ("ids", "features", "final"))
            starts, lengths = file.get_tensor("starts").tolist(), file.get_tensor("prompt_lengths").tolist()
        for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
            if end - begin - length >= SHORTEST:
                sequences.append(Sequence(ids[begin:end].long(), features[begin:end], final[begin:end], length))
    return sequences


def follow_ups(paths: list[pathlib.Path], tokenizer: Any, eos: frozenset[int], seed: int) -> list[list[int]]:
    """Return prompts that carry short, complete answers of earlier batches one turn further.

    Args:
        paths: files of the earlier batches.
        tokenizer: the target's tokenizer.
        eos: tokens that end an answer.
        seed: seed of the choice.

    Returns:
        At most ``FOLLOW_UP_ROWS`` prompts.
    """
    rng = random.Random(seed)
    candidates = []
    for path in paths:
        with safe_open(path, "pt") as file:
            ids = file.get_tensor("ids").tolist()
            starts = file.get_tensor("starts").tolist()
            lengths = file.get_tensor("prompt_lengths").tolist()
        for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
            if ids[end - 1] in eos and end - begin - length <= FOLLOW_UP_MAX_ANSWER:
                candidates.append(ids[begin:end])
    made = []
    for history in rng.sample(candidates, min(FOLLOW_UP_ROWS, len(candidates))):
        turn = f"\n<|im_start|>user\n{rng.choice(prompts.FOLLOW_UPS)}<|im_end|>\n<|im_start|>assistant\n"
        made.append(history + tokenizer(turn, add_special_tokens=False)["input_ids"])
    return made


def jobs(
    arguments: argparse.Namespace, tokenizer: Any, eos: frozenset[int]
) -> Iterator[tuple[pathlib.Path, list[list[int]]]]:
    """Yield the shard's files with their prompts, in order; files that exist are left out.

    Args:
        arguments: the command line.
        tokenizer: the target's tokenizer.
        eos: tokens that end an answer.

    Yields:
        A path and the prompts whose answers belong there.
    """
    batch, out = arguments.batch, arguments.out
    if arguments.shard == 0:
        chats = [render(tokenizer, c) for c in prompts.validation()]
        path = out / "validation-00000.safetensors"
        if not path.exists():
            yield path, chats
    conversations = prompts.forms(arguments.seed) if arguments.forms else prompts.questions()
    name = "forms" if arguments.forms else "questions"
    if arguments.temperature:
        name = f"sampled-{name}-{arguments.temperature:g}-{arguments.seed}"
    chats = [render(tokenizer, c) for c in conversations]
    groups = [chats[i : i + batch] for i in range(0, len(chats), batch)]
    mine = range(arguments.first + arguments.shard, len(groups), arguments.of)
    done: list[pathlib.Path] = []
    for index in mine:
        path = out / f"{name}-{index:05d}.safetensors"
        if not path.exists():
            yield path, groups[index]
        done.append(path)
        if len(done) == FOLLOWED_BATCHES:
            follow = out / f"{name}-follow-{index:05d}.safetensors"
            if not follow.exists():
                made = follow_ups(done, tokenizer, eos, arguments.seed + index)
                if made:
                    yield follow, made
            done = []


def main() -> None:
    """Run one shard of the generation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of the dequantised target")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the data, 4.6 kB per token")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--of", type=int, default=1, help="number of shards, one process each")
    parser.add_argument("--forms", action="store_true", help="answer the filled forms instead of the questions")
    parser.add_argument("--first", type=int, default=0, help="batch to begin with, where a draft knows the others")
    parser.add_argument("--temperature", type=float, default=0.0, help="draw the answers instead of greedy ones")
    parser.add_argument("--bfloat16", action="store_true", help="run the target in bfloat16, in half the time")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    target = Target(arguments.model, arguments.batch, torch.bfloat16 if arguments.bfloat16 else torch.float32)
    with tqdm(unit="tok", desc=f"shard {arguments.shard}", mininterval=5) as bar:
        for path, chats in jobs(arguments, tokenizer, target.eos):
            bar.set_postfix_str(path.name)
            # A path names what is drawn, so that a batch is drawn alike whichever shard takes it.
            temperature = 0.0 if path.name.startswith("validation") else arguments.temperature
            seed = zlib.crc32(f"{arguments.seed} {path.name}".encode())
            bar.update(store(path, target.answer(chats, arguments.max_new, temperature, seed)))


if __name__ == "__main__":
    main()
