"""Measure the memory of a search on a target of 61 layers of width 7,168: python -m benchmarks.probe.large

The weights and the states are random, for nobody has such a target on a small machine; memory depends on sizes alone.
Every place is projected through every block of ``fc``, as a search does, and some assemblies are scored and measured.
The files take 9 GB in ``TMPDIR`` while it runs, some minutes. Keeps its part of ``benchmarks/results/probe.json``.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.probe.measure import anonymous_mb, keep
from benchmarks.stamp import stamp
from sglang_eagle3_ext.host.servers import progress
from sglang_eagle3_ext.probe.features import Answer, Features, FeatureWriter
from sglang_eagle3_ext.probe.search import PROJECTION_BYTES, Candidates, Scorer
from sglang_eagle3_ext.probe.verdict import measure

LAYERS, WIDTH, VOCAB, DRAFT_VOCAB = 61, 7168, 163840, 32000
INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 18432, 64, 8, 128
ANSWERS, PROMPT, COMPLETION, STEPS = 64, 24, 40, 3
"""4,096 tokens in all."""
SCORED = ((2, 30, 58), (3, 31, 59))


def matrix(rows: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Draw a matrix that keeps the size of what it is multiplied with."""
    return (torch.randn(rows, columns, generator=g) / columns**0.5).bfloat16()


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a draft of the size of Kimi-K2.5's and what it borrows of its target."""
    g = torch.Generator().manual_seed(0)
    draft, target = folder / "draft", folder / "target"
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": (INTERMEDIATE, WIDTH),
        "midlayer.mlp.up_proj.weight": (INTERMEDIATE, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, INTERMEDIATE),
        "lm_head.weight": (DRAFT_VOCAB, WIDTH),
    }
    tensors = {name: matrix(*shape, g) for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "model_type": "llama",
    }
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    of_target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    for place, config, content in (
        (draft, sizes | own, tensors),
        (target, sizes | of_target, {"model.embed_tokens.weight": torch.ones(VOCAB, WIDTH, dtype=torch.bfloat16)}),
    ):
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        save_file(content, place / "model.safetensors")
    return draft, target


def write_features(file: Path) -> None:
    """Write states of no text."""
    g = torch.Generator().manual_seed(1)
    rows = PROMPT + COMPLETION
    with FeatureWriter(file, target="target", steps=STEPS) as writer, progress(ANSWERS, "states") as bar:
        for _ in range(ANSWERS):
            states = torch.randn(rows, LAYERS + 2, WIDTH, generator=g).bfloat16()
            tokens = torch.randint(DRAFT_VOCAB, (rows,), generator=g)
            writer.append(Answer(tokens, states, PROMPT, COMPLETION - STEPS, None))
            bar.update()


def most_memory(draft: Path, target: Path, features: Path) -> dict[str, int]:
    """Do what a search does, and watch the memory of this process that is no page of a file.

    Returns:
        In MB: ``features_mb``; ``draft_mb``, the draft in float32; ``beside_mb``, the most there was beside both, less
        what the process had before.
    """
    before, most, over = anonymous_mb(os.getpid()), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, anonymous_mb(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        candidates = Candidates(draft, target)
        answers = Features.open(features).answers
        with progress(LAYERS + 2, "places") as bar, torch.inference_mode():
            for place in range(LAYERS + 2):
                for answer in answers[:4]:
                    candidates.hidden(answer, (place,) * 3, ())
                bar.update()
        scorer = Scorer(candidates, answers[:4])
        for places in SCORED:
            scorer.per_answer(places, ())
            measure(candidates, answers[:4], places, (), steps=STEPS)
        held = sum(tensor.nbytes for tensor in candidates.tensors.values())
    finally:
        over.set()
        watcher.join()
    return {
        "features_mb": features.stat().st_size >> 20,
        "draft_mb": held >> 20,
        "projections_mb": PROJECTION_BYTES >> 20,
        "beside_mb": most - before - (held >> 20),
    }


def main() -> None:
    """Measure, and keep the figures."""
    stamped = stamp()
    with tempfile.TemporaryDirectory(prefix="sglang-eagle3-") as place:
        draft, target = write_pair(Path(place))
        write_features(Path(place) / "features")
        measured = most_memory(draft, target, Path(place) / "features")
    keep("large", {**stamped, "layers": LAYERS, "width": WIDTH, "tokens": ANSWERS * (PROMPT + COMPLETION)} | measured)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
