"""The demo draft rewritten as each dialect writes its drafts, served by the plain command line: the same steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from recorder import TOKENS, Recorder
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import formats

pytestmark = pytest.mark.e2e

PROMPTS = 8
IDS = "eagle_aux_hidden_state_layer_ids"
SOURCES = {"sources": ["embed", "layer3", "layer15"]}

Tensors = dict[str, torch.Tensor]


def _layers(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _automodel(tensors: Tensors) -> Tensors:
    outside = ("lm_head.weight", "d2t", "t2d")
    return {name if name in outside else f"model.{name}": tensor for name, tensor in _layers(tensors).items()}


def _without_t2d(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in _layers(tensors).items() if name != "t2d"}


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Write the draft's config as speculators nests it; its ids are boundaries and need no object of ours."""
    top = ("architectures", "draft_vocab_size", "eagle3_ext", "torch_dtype")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        IDS: [0, 4, 16],
        "norm_before_residual": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {key: value for key, value in config.items() if key not in top},
    }


@dataclass(frozen=True)
class Dialect:
    """How a dialect writes the demo draft.

    Attributes:
        format: the reader that must claim it.
        config: its ``config.json``, from the demo draft's.
        tensors: its tensors, from the demo draft's.
        embed: the name under which it stores the target's embedding; the others leave it out.
    """

    format: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    tensors: Callable[[Tensors], Tensors] = dict
    embed: str | None = None


def _changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {k: v for k, v in (config | changes).items() if v is not None}


DIALECTS = {
    "speculators": Dialect("speculators", _nested, _layers, "embed_tokens.weight"),
    "eagle": Dialect("eagle", _changed(architectures=["LlamaForCausalLM"])),
    "modelopt": Dialect("modelopt", _changed(eagle_config={"use_mtp_layernorm": False}), _without_t2d),
    "modelopt_megatron": Dialect("modelopt", _changed(architectures=["LlamaForCausalLMEagle3Deep"]), _without_t2d),
    # Its ids are outputs as listed; -1 is no layer's output, so that the object of ours says it.
    "torchspec": Dialect("torchspec", _changed(_torchspec_version="0.1"), dict, "embed_tokens.weight"),
    "automodel": Dialect(
        "automodel", _changed(architectures=["LlamaEagle3DraftModel"]), _automodel, "model.embed_tokens.weight"
    ),
    # Its trainer reads no theta; this draft was trained with one.
    "angelslim": Dialect(
        "angelslim",
        _changed(architectures=["Eagle3LlamaForCausalLM"], eagle3_ext={**SOURCES, "rope_theta": 100000.0}),
    ),
    "vllm": Dialect(
        "vllm", _changed(architectures=["Eagle3LlamaForCausalLM"], eagle3_ext=None, **{IDS: [0, 4, 16]}), _layers
    ),
}


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """Collect what was served; kept in the file that ``DIALECTS_RESULTS`` names."""
    found: dict[str, Any] = {}
    yield found
    if file := os.environ.get("DIALECTS_RESULTS"):
        Path(file).write_text(json.dumps(found))


@pytest.mark.parametrize(
    "name", ["speculators", *(pytest.param(name, marks=pytest.mark.soak) for name in DIALECTS if name != "speculators")]
)
def test_a_dialect_gives_the_steps_of_the_original(
    name: str,
    answers: Recorder,
    prompts: list[list[int]],
    draft: Path,
    target: Path,
    results: dict[str, Any],
    tmp_path: Path,
) -> None:
    dialect = DIALECTS[name]
    folder = tmp_path / name
    folder.mkdir()
    config = json.loads((draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dialect.config(config), indent=1))
    tensors = dialect.tensors(load_file(draft / "model.safetensors"))
    if dialect.embed is not None:
        tensors[dialect.embed] = load_file(target / "model.safetensors")["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert formats.read_draft(folder).format == dialect.format

    original = answers("chain")[:PROMPTS]
    words = servers.arguments(target, folder, *servers.CHAIN)
    with servers.serve(tmp_path / f"{name}.log", words) as server:
        got = [servers.complete(server, prompt, TOKENS) for prompt in prompts[:PROMPTS]]
    assert got == original
    tokens, steps = sum(len(a.ids) for a in got), sum(a.verify_steps for a in got)
    results[name] = {
        "format": dialect.format,
        "tokens": tokens,
        "verify_steps": steps,
        "accept_length": round(tokens / steps, 4),
    }
