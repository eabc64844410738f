"""Drafts as the trainers' own code makes them: a covering design over their switches, their files, their forward.

Nothing here is ours: configs are built by the trainers' config classes and written by their ``save_pretrained``, and
what comes out is computed by their models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from allpairspy import AllPairs
from reference_drafts import make_spec, random_tensors
from safetensors.torch import save_file

LENGTH, STEPS = 17, 4
"""Rows of a text, and passes over it: the feature pass and three recurrent ones."""

FORCED_EOL = 0
"""The token both trainers read beyond the end of the text."""

VOCAB = 50


class Shape(NamedTuple):
    """Sizes of an attention: width of the draft, heads, kv heads, width of a head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def attention(self) -> dict[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}


SHAPES = (Shape(12, 6, 2, 4), Shape(16, 4, 4, 8), Shape(20, 5, 1, 6))

ROPES: dict[str, dict[str, Any]] = {
    "theta 100": {"rope_type": "default", "rope_theta": 100.0},
    "theta 1e6": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}

SPECULATORS: dict[str, tuple[Any, ...]] = {
    "layer": ("llama", "llama with biases in its MLP", "qwen3"),
    "residual": ("pre_norm", "post_norm"),
    "around_fc": ("none", "per_source", "concatenation"),
    "recurrent": ("pre_norm", "post_norm"),
    "layers": (1, 2, 3),
    "sources": (1, 2, 3, 5),
    "shape": SHAPES,
    "rope": ("theta 100", "theta 1e6", "llama3", "yarn", "linear"),
    "attention_bias": (False, True),
    "draft_vocab": (20, VOCAB),
}
"""What speculators 0.9.0 can vary, except for windows."""

SPECFORGE: dict[str, tuple[Any, ...]] = {
    "fc_norm": (False, True),
    "norm_output": (None, True, False),
    "target_hidden": (None, 24),
    "shape": SHAPES,
    "rope": ("theta 100", "theta 1e6", "llama3", "yarn with mscale", "linear"),
    "draft_vocab": (20, VOCAB),
}
"""What SpecForge 0.2.0 can vary."""


def speculators_design() -> list[dict[str, Any]]:
    """Cover every pair of values of :data:`SPECULATORS` twice; the design is the same on every machine."""
    return _cover(SPECULATORS)


def specforge_design() -> list[dict[str, Any]]:
    """Cover every pair of values of :data:`SPECFORGE` twice."""
    return _cover(SPECFORGE)


def _cover(factors: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Join two designs of all pairs, the second over the values in reverse."""
    designs = (AllPairs([list(v) for v in factors.values()]), AllPairs([list(v)[::-1] for v in factors.values()]))
    return [dict(zip(factors, row, strict=True)) for design in designs for row in design]


def identify(row: Mapping[str, Any]) -> str:
    """Spell a row of a design as the name of a test."""
    return "-".join(
        "x".join(map(str, value)) if isinstance(value, Shape) else str(value).replace(" ", "") for value in row.values()
    )


class Trained(NamedTuple):
    """A draft of a trainer's: its files, and what its own model computes on a text.

    Attributes:
        folder: the checkpoint.
        features: [T, K*M] states of the target, in fc column order.
        inputs: [T] tokens the rows read.
        logits: [T, V] of each pass; row t of pass k has read ``inputs[t + k]``, beyond the end ``FORCED_EOL``.
        states: [T, E] the state that the next pass receives, of each pass.
        embed, head: what the draft borrows from its target.
    """

    folder: Path
    features: torch.Tensor
    inputs: torch.Tensor
    logits: list[torch.Tensor]
    states: list[torch.Tensor]
    embed: torch.Tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep SGLang's plugin loader out of it, and torch.compile, for which a test machine may lack a compiler."""
    plugins = os.environ.get("SGLANG_PLUGINS", "none")
    torch.compiler.set_stance("force_eager")
    try:
        with mock.patch.dict(os.environ, SGLANG_PLUGINS=plugins):
            yield
    finally:
        torch.compiler.set_stance("default")


def _draw(spec: Any, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in random_tensors(spec, seed).items()}
    # Logits of about one, as real drafts have them before they are sure: float32 then rounds far below 1e-5.
    tensors |= {n: t / 2 for n, t in tensors.items() if t.ndim == 2}
    g = torch.Generator().manual_seed(seed + 1)
    features = torch.randn(LENGTH, spec.num_sources * spec.target_hidden_size, generator=g)
    return tensors, features, torch.randint(1, VOCAB, (LENGTH,), generator=g)


def train_speculators(row: Mapping[str, Any], folder: Path, seed: int = 0) -> Trained:
    """Make, write and run one draft of speculators'."""
    reason = "speculators is the oracle: pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0"
    with _quiet():
        core = pytest.importorskip("speculators.models.eagle3.core", reason=reason, exc_type=ImportError)
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig, Qwen3Config

        shape: Shape = row["shape"]
        family = row["layer"].split()[0]
        mlp_bias = {"mlp_bias": True} if "biases" in row["layer"] else {}
        layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](
            hidden_size=shape.hidden,
            intermediate_size=28,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            num_hidden_layers=row["layers"],
            vocab_size=VOCAB,
            rms_norm_eps=1e-5,
            hidden_act="silu",
            max_position_embeddings=64,
            attention_bias=row["attention_bias"],
            rope_parameters=dict(ROPES[row["rope"]]),
            **mlp_bias,
        )
        layer._attn_implementation = "eager"
        proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=row["draft_vocab"],
            eagle_aux_hidden_state_layer_ids=list(range(1, row["sources"] + 1)),
            norm_before_residual=row["residual"] == "post_norm",
            fc_norm=row["around_fc"] == "per_source",
            norm_before_fc=row["around_fc"] == "concatenation",
            norm_output=row["recurrent"] == "post_norm",
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        spec = make_spec(
            hidden_size=shape.hidden,
            target_hidden_size=shape.hidden,
            intermediate_size=28,
            num_sources=row["sources"],
            **mlp_bias,
            norms={"around_fc": row["around_fc"]},
            attention={
                **shape.attention,
                "num_layers": row["layers"],
                "qk_norm": family == "qwen3",
                "qkv_bias": row["attention_bias"],
                "o_bias": row["attention_bias"],
            },
            vocab={"target": VOCAB, "draft": row["draft_vocab"]},
        )
        tensors, features, inputs = _draw(spec, seed)
        model = core.Eagle3DraftModel(config).eval()
        rest = model.load_state_dict(tensors, strict=False)
        assert set(rest.missing_keys) <= {"t2d", "verifier_lm_head.weight", "verifier_norm.weight"}
        assert set(rest.unexpected_keys) <= {"d2t"}  # a full vocabulary needs no map
        chosen = tensors["d2t"] + torch.arange(row["draft_vocab"])
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
        config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors")

        logits: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda m, args, out: logits.append(out[0]))
        # What the next pass receives: the last layer's output, or the norm's where the switch says so.
        last = model.norm if row["recurrent"] == "post_norm" else model.layers[-1]
        last.register_forward_hook(lambda m, args, out: states.append((out[0] if isinstance(out, tuple) else out)[0]))
        with torch.no_grad():
            model(
                hidden_states=features[None],
                input_ids=inputs[None],
                document_ids=torch.zeros(1, LENGTH, dtype=torch.int64),
                ttt_steps=STEPS,
            )
    return Trained(folder, features, inputs, logits, states, tensors["embed_tokens.weight"])


def train_specforge(row: Mapping[str, Any], folder: Path, seed: int = 0) -> Trained:
    """Make, write and run one draft of SpecForge's.

    Its export for SGLang leaves out the embedding, its other export keeps it, and a draft of another width than its
    target needs it.
    """
    reason = "SpecForge is the oracle: pip install --no-deps specforge==0.2.0"
    with _quiet():
        drafts = pytest.importorskip("specforge.modeling.draft.llama3_eagle", reason=reason, exc_type=ImportError)
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from transformers import LlamaConfig

        shape: Shape = row["shape"]
        target_hidden = row["target_hidden"] or shape.hidden
        config = LlamaConfig(
            architectures=["LlamaForCausalLMEagle3"],
            hidden_size=shape.hidden,
            intermediate_size=28,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            num_hidden_layers=1,
            vocab_size=VOCAB,
            rms_norm_eps=1e-5,
            hidden_act="silu",
            max_position_embeddings=64,
            rope_parameters=dict(ROPES[row["rope"]]),
            pad_token_id=0,
        )
        config.draft_vocab_size = row["draft_vocab"]
        for name, value in (
            ("fc_norm", row["fc_norm"] or None),
            ("norm_output", row["norm_output"]),
            ("target_hidden_size", row["target_hidden"]),
        ):
            if value is not None:
                setattr(config, name, value)
        spec = make_spec(
            hidden_size=shape.hidden,
            target_hidden_size=target_hidden,
            intermediate_size=28,
            norms={"around_fc": "per_source" if row["fc_norm"] else "none"},
            attention={**shape.attention, "num_layers": 1},
            vocab={"target": VOCAB, "draft": row["draft_vocab"]},
        )
        tensors, features, inputs = _draw(spec, seed)
        stored = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
        chosen = tensors["d2t"] + torch.arange(row["draft_vocab"])
        stored["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
        model = drafts.LlamaForCausalLMEagle3(config).eval()
        model.load_state_dict(stored)
        config.save_pretrained(folder)
        embed = stored["embed_tokens.weight"]
        if target_hidden == shape.hidden:
            del stored["embed_tokens.weight"]
        save_file(stored, folder / "model.safetensors")

        logits: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda m, args, out: logits.append(out[0]))
        # Its loop hands the layer's output on, before the norm, whatever ``norm_output`` says.
        model.midlayer.register_forward_hook(
            lambda m, args, out: states.append((out[0] if isinstance(out, tuple) else out)[0])
        )
        loop = OnlineEagle3Model(model, length=STEPS, attention_backend="sdpa")
        # The loss is a Triton kernel for GPUs, and no part of the recurrence.
        with (
            torch.no_grad(),
            mock.patch.object(loop, "_acc_and_loss", return_value=(torch.zeros(()),) * 7),
        ):
            loop(
                input_ids=inputs[None],
                attention_mask=torch.ones(1, LENGTH),
                target=torch.zeros(1, LENGTH, VOCAB),
                loss_mask=torch.ones(1, LENGTH, 1),
                hidden_states=features[None],
            )
    return Trained(folder, features, inputs, logits, states, embed)
