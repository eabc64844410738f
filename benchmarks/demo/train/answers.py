"""Keep what the target answered as token ids, and make the states that training reads from them again.

    python answers.py --keep DATA --file answers.npz
    python answers.py --model .demo/SmolLM2-135M-Instruct --file answers.npz --out DATA

Ids take a thousandth of the room of the states, and reading an answer takes half the time of writing it: whoever has
the file need not generate. It holds ``ids`` [N] uint16, the chats one after the other, and ``starts`` [R + 1] and
``prompt_lengths`` [R], which cut them apart. States come in files ``kept-<hash of the ids>-00012.safetensors`` as
``generate.py`` stores them; a file appears when it is complete, and one that is there is skipped.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import zlib

import numpy as np
import torch
from generate import read, store
from target import Answer, Target
from tqdm import tqdm

BATCH = 64


def keep(data: pathlib.Path, file: pathlib.Path) -> tuple[int, int]:
    """Gather the ids of all answers of a folder but those of the validation questions.

    Args:
        data: folder written by ``generate.py``.
        file: where the ids go.

    Returns:
        The numbers of chats and of generated tokens.
    """
    paths = sorted(path for path in data.glob("*-*.safetensors") if not path.name.startswith(("validation", "kept")))
    sequences = [s for path in paths for s in read([path])]
    lengths = [len(s.ids) for s in sequences]
    prompts = [s.prompt_length for s in sequences]
    part = file.with_suffix(".unfinished.npz")
    np.savez_compressed(
        part,
        ids=torch.cat([s.ids for s in sequences]).numpy().astype(np.uint16),
        starts=np.cumsum([0, *lengths]).astype(np.int32),
        prompt_lengths=np.array(prompts, dtype=np.uint16),
    )
    os.replace(part, file)
    return len(sequences), sum(lengths) - sum(prompts)


def chats(file: pathlib.Path) -> list[tuple[list[int], list[int]]]:
    """Return every chat of a file: the prompt's ids and the answer's."""
    with np.load(file) as kept:
        ids, starts, prompts = (kept[name].tolist() for name in ("ids", "starts", "prompt_lengths"))
    return [(ids[a : a + n], ids[a + n : b]) for a, b, n in zip(starts, starts[1:], prompts, strict=False)]


def main() -> None:
    """Keep ids, or make states of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path, required=True, help="the ids")
    parser.add_argument("--keep", type=pathlib.Path, help="folder of answers to keep; without it states are made")
    parser.add_argument("--model", type=pathlib.Path, help="folder of the dequantised target")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the states, 4.6 kB per token")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--of", type=int, default=1, help="number of shards, one process each")
    parser.add_argument("--bfloat16", action="store_true", help="run the target in bfloat16, in half the time")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        print("{} chats, {} generated tokens".format(*keep(arguments.keep, arguments.file)))
        return
    if arguments.model is None or arguments.out is None:
        parser.error("--model and --out: got none; expected both where states are made. Give them, or --keep.")
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Of one length within a batch, as far as that goes: padding is computed, too.
    groups = sorted(chats(arguments.file), key=lambda chat: len(chat[0]) + len(chat[1]))
    batches = [groups[i : i + BATCH] for i in range(0, len(groups), BATCH)]
    whole = f"{zlib.crc32(arguments.file.read_bytes()):08x}"
    target = Target(arguments.model, BATCH, torch.bfloat16 if arguments.bfloat16 else torch.float32)
    for index in tqdm(range(arguments.shard, len(batches), arguments.of), desc=f"shard {arguments.shard}"):
        path = arguments.out / f"kept-{whole}-{index:05d}.safetensors"
        if not path.exists():
            read_again = target.answer([prompt + answer for prompt, answer in batches[index]], 1)
            store(
                path,
                [
                    Answer(prompt, answer, again.features, again.final)
                    for (prompt, answer), again in zip(batches[index], read_again, strict=True)
                ],
            )


if __name__ == "__main__":
    main()
