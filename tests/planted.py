"""Texts that a draft wrote itself, over states whose assembly is therefore known; and tiny targets of many families.

The states are random walks over the depth, as residual streams are. Each text goes on as the draft proposes from the
planted assembly, in chains of two, except that now and then another token takes the place; what wrote the text is
``reference``, whose passes are tested against oracles of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from sglang_eagle3_ext.probe.features import Answer, Features
from sglang_eagle3_ext.reference import KVCache, ReferenceDraft

SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
}


def make_target(family: str, seed: int = 0, **changes: Any) -> Any:
    """Make a tiny model whose answers vary, because it is initialised widely."""
    torch.manual_seed(seed)
    config = FAMILIES[family](**(SIZES | changes))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def walk(length: int, layers: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw states [T, n + 2, M]; the last place is the state before it, normed."""
    steps = torch.randn(length, layers + 1, width, generator=generator)
    stream = steps.cumsum(1)
    last = stream[:, -1:]
    return torch.cat([stream, last * last.pow(2).mean(-1, keepdim=True).rsqrt()], dim=1)


@torch.inference_mode()
def write(
    draft: ReferenceDraft, states: Tensor, places: tuple[int, ...], prompt: int, agree: float, g: torch.Generator
) -> Tensor:
    """Write tokens for all rows of the states, two at a time: a feature pass, then a recurrent one."""
    vocab, length = draft.spec.vocab.target, len(states)
    hidden = draft.project(states[:, list(places)].flatten(1))
    tokens = torch.randint(vocab, (prompt + 1,), generator=g).tolist()
    cache = KVCache(draft.spec, draft.dtype)

    def put(proposed: Tensor) -> None:
        other = int(torch.randint(vocab, (1,), generator=g))
        tokens.append(int(proposed) if float(torch.rand(1, generator=g)) < agree else other)

    while len(tokens) < length:
        seen = len(cache)
        rows = torch.arange(seen, len(tokens) - 1)
        step = draft.forward(torch.tensor(tokens)[rows + 1], hidden[rows], rows, cache)[-1:]
        committed = len(cache)
        put(draft.to_target(step.best()))
        step = draft.forward(torch.tensor(tokens[-1:]), step.state, torch.tensor([committed]), cache)
        put(draft.to_target(step.best()))
        cache.crop(committed)
    return torch.tensor(tokens[:length])


def features(
    draft: ReferenceDraft,
    places: tuple[int, ...],
    *,
    layers: int = 8,
    answers: int = 24,
    length: int = 30,
    agree: float = 0.85,
    seed: int = 0,
) -> Features:
    """Plant an assembly: a feature set whose texts were written by the draft itself."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(answers):
        states = walk(length, layers, draft.spec.target_hidden_size, g)
        tokens = write(draft, states, places, 4, agree, g)
        made.append(Answer(tokens, states, 4, length - 7, "ab"[i % 2]))
    return Features(tuple(made), layers, 3, "planted")


def load(folder: Path, target: Path, **override: object) -> ReferenceDraft:
    """Load a draft as it really is: what its folder says, and what it leaves out or has wrong."""
    from sglang_eagle3_ext import reference

    return reference.load(folder, target=target, override=override)
