"""The drop-in draft class, built and loaded by SGLang itself, against the reference; run by ``test_runtimes.py``.

Everything is SGLang's own (config, loader, layers, logits processor) but for the attention over the cache, whose
stand-in here is plain causal attention over the queries, keys and values that SGLang's layer hands to it.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import gc
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import trainers
import workers
from checkpoints import pickle, shard, write_draft, write_target
from interpreter import interpret
from safetensors.torch import load_file
from sglang_eagle3_ext.kernels import fc_proj, norm_concat
from sglang_eagle3_ext.kernels.arch import H200
from torch import nn
from trainers import Trained

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.spec import AssemblyPlan, DraftSpec

pytestmark = pytest.mark.host

E, M, VOCAB, LAYERS = 32, 32, 96, 8
"""Width of the draft and of the target, the target's vocabulary and its layers, unless a case says otherwise."""


# ---- SGLang's runtime ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Bring one process of SGLang up as a scheduler is brought up: plugins, settings, groups, operators."""
    with workers.runtime(write_target(tmp_path_factory.mktemp("served"))):
        from sglang.srt.platforms import current_platform

        assert type(current_platform).__name__ == "Eagle3CpuPlatform"
        # SGLang collects garbage when a cache is emptied; what was imported is not worth looking through each time.
        gc.freeze()
        yield


class Target(NamedTuple):
    """What a draft may borrow: the target's config as SGLang reads it, its embedding and its head."""

    config: Any
    embed: nn.Module
    head: nn.Module


@pytest.fixture(scope="session")
def targets(runtime: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Target]:
    """Make targets by their width."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    made: dict[int, Target] = {}

    def target(width: int) -> Target:
        if width not in made:
            folder = write_target(tmp_path_factory.mktemp("target"), hidden=width, num_layers=LAYERS)
            stored = load_file(folder / "model.safetensors")
            embed, head = VocabParallelEmbedding(VOCAB, width), ParallelLMHead(VOCAB, width)
            embed.weight.weight_loader(embed.weight, stored["model.embed_tokens.weight"])
            head.weight.weight_loader(head.weight, stored["lm_head.weight"])
            made[width] = Target(ModelConfig(str(folder)), embed, head)
        return made[width]

    return target


class CausalAttention(nn.Module):
    """Stand in for attention over the cache of one request: each row sees itself and all rows before it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.scale = layer.scaling
        self.heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
        # SGLang counts the tokens before the query.
        self.window = None if layer.sliding_window_size == -1 else layer.sliding_window_size
        self.keys = self.values = torch.empty(0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in zip((q, k, v), self.heads, strict=True))
        self.keys = torch.cat([self.keys, k]) if len(self.keys) else k
        self.values = torch.cat([self.values, v]) if len(self.values) else v
        distance = torch.arange(len(self.keys) - len(q), len(self.keys))[:, None] - torch.arange(len(self.keys))
        visible = distance >= 0
        if self.window is not None:
            visible &= distance <= self.window
        q, keys, values = (x.transpose(0, 1) for x in (q, self.keys, self.values))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=self.scale, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)


@dataclass
class Served:
    """A draft as SGLang has it after loading, and the same draft in the reference."""

    model: Any
    plan: AssemblyPlan
    reference: reference.ReferenceDraft
    target: Target

    @property
    def spec(self) -> DraftSpec:
        return self.plan.spec

    def in_capture_order(self, features: torch.Tensor) -> torch.Tensor:
        """Put features [T, K*M] from fc column order into the order in which the target emits them."""
        if not self.spec.num_sources:
            return features
        blocks = features.unflatten(-1, (self.spec.num_sources, -1))
        order = [self.plan.boundaries.index(boundary) for boundary in self.plan.capture]
        return torch.cat([blocks[:, k] for k in order], dim=-1)

    def features(self, rows: int, seed: int = 3) -> torch.Tensor:
        """Draw features in fc column order, the sources of clearly different size."""
        generator = torch.Generator().manual_seed(seed)
        count = max(self.spec.num_sources, 1)
        size = 0.5 + torch.arange(count)
        return (torch.randn(rows, count, self.spec.target_hidden_size, generator=generator) * size[:, None]).flatten(1)


def put_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attn = CausalAttention(layer.self_attn.attn)


def draft_config(
    folder: Path,
    override: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    context: int | None = None,
    **of_the_target: Any,
) -> Any:
    """Let SGLang read a draft's config, beside a target of this context and with these keys on the command line."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(
        str(folder),
        dtype=dtype,
        context_length=context,
        is_draft_model=True,
        speculative_algorithm="EAGLE3",
        model_override_args=json.dumps(of_the_target | ({} if override is None else {"eagle3_ext": override})),
    )


def resolve(config: Any, target: Target) -> AssemblyPlan:
    """Fit draft and target together as SGLang's start does."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_eagle3_ext.host import config as host_config

    result = SimpleNamespace(draft_model_config=config)
    host_config.resolve_plan(
        result,
        server_args=None,
        model_config=target.config,
        spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE3"),
        is_draft_worker=False,
    )
    plan = host_config.plan_of(getattr(config.hf_config, host_config.DRAFT_KEY))
    assert plan is not None
    assert result.eagle_use_aux_hidden_state is (plan.spec.num_sources > 0)
    return plan


def build(config: Any) -> Any:
    """Let SGLang build the draft and read its weights."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.platforms import current_platform

    model = DefaultModelLoader(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    current_platform.post_load_model(model)
    return model


def share(model: Any, target: Target) -> None:
    """Give the draft what it borrows, with the question that SGLang's worker asks."""
    if model.load_lm_head_from_target:
        model.set_embed_and_head(target.embed.weight, target.head.weight)
    else:
        model.set_embed(target.embed.weight)


def serve(
    folder: Path,
    target: Target,
    override: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    context: int | None = None,
) -> Served:
    """Bring a draft to where SGLang would run its first pass."""
    config = draft_config(folder, override, dtype, context)
    plan = resolve(config, target)
    model = build(config)
    assert type(model).__module__ == "sglang_eagle3_ext.host.models.llama_eagle3"
    share(model, target)
    put_attention(model)
    return Served(model, plan, refer(plan.spec, target), target)


def refer(spec: DraftSpec, target: Target) -> reference.ReferenceDraft:
    embed, head = target.embed.weight.data[:VOCAB], target.head.weight.data[:VOCAB]
    return reference.load(spec, embed=embed, lm_head=head)


@pytest.fixture(params=["on", "off"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve with the kernels' twins, and with stock's operators."""
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", request.param)
    return str(request.param)


# ---- passes -------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One pass of a draft: its mode, the positions of its rows and the tokens they read."""

    mode: str
    positions: range
    tokens: torch.Tensor


def passes() -> list[Pass]:
    """A prompt in two parts, the rows after a verification, and three recurrent passes."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    cuts = [("EXTEND", 5), ("EXTEND", 1), ("DRAFT_EXTEND_V2", 3), ("DECODE", 1), ("DECODE", 1), ("DECODE", 1)]
    starts = [0, *itertools.accumulate(rows for _, rows in cuts)]
    return [
        Pass(mode, range(start, start + rows), ids[start : start + rows])
        for start, (mode, rows) in zip(starts, cuts, strict=False)
    ]


def batch(mode: str, states: torch.Tensor) -> Any:
    """Make what the draft and SGLang's logits processor look at in a batch of one request."""
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    made: Any = LogitsMetadata(ForwardMode[mode], CaptureHiddenMode.FULL, extend_seq_lens=torch.tensor([len(states)]))
    made.spec_info = SimpleNamespace(hidden_states=states)
    made.contains_mm_inputs = lambda: False
    made.mrope_positions = None
    return made


def run_served(model: Any, steps: list[Pass], states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run passes in SGLang; return the logits (of the last row in a prefill) and the recurring states of each."""
    seen = []
    recurring = states[:0]
    for step in steps:
        rows = list(step.positions)
        given = recurring if step.mode == "DECODE" else states[rows]
        made = batch(step.mode, given)
        # On text the three axes of a multimodal position are one.
        made.mrope_positions = torch.tensor(rows).expand(3, -1)
        out = model(step.tokens, torch.tensor(rows), made)
        seen.append((out.next_token_logits, out.hidden_states))
        recurring = out.hidden_states[-1:]
    return seen


def run_reference(
    draft: reference.ReferenceDraft, steps: list[Pass], features: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the same passes in the reference, from features in fc column order."""
    seen = []
    cache = reference.KVCache(draft.spec, draft.dtype)
    recurring = features[:0]
    for step in steps:
        rows = torch.tensor(list(step.positions))
        given = recurring if step.mode == "DECODE" else draft.project(features[rows])
        out = draft.forward(step.tokens, given, rows, cache)
        seen.append((out.logits[-1:] if step.mode == "EXTEND" else out.logits, out.state))
        recurring = out.state[-1:]
    return seen


def distance(some: list[tuple[torch.Tensor, torch.Tensor]], others: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest difference of any logit or state, in units of the largest value of its kind."""
    worst = 0.0
    for kind in (0, 1):
        size = max(float(step[kind].abs().max()) for step in others)
        for mine, theirs in zip(some, others, strict=True):
            assert mine[kind].shape == theirs[kind].shape
            worst = max(worst, float((mine[kind] - theirs[kind]).abs().max()) / size)
    return worst


CLOSE = 2e-5
"""Two float32 computations of one draft lie nearer than this; another draft lies a hundred times as far."""


# ---- drafts -------------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def norm(width: int, seed: int = 7) -> torch.Tensor:
    return 1 + 0.5 * random(width, seed=seed)


@dataclass(frozen=True)
class Variant:
    """One draft.

    Attributes:
        write: sizes and dialect, for ``write_draft``.
        config: changes of its config.
        tensors: changes of its tensors.
        ext: its ``eagle3_ext`` object.
        says: fields of the spec (dotted) that make this variant, so that each is what its name says.
        unlike: the values of fields with which it would be another draft, for the test to be able to fail.
    """

    write: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    ext: Mapping[str, Any] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    unlike: Mapping[str, Any] = field(default_factory=dict)

    def at(self, folder: Path) -> Path:
        config = dict(self.config) | ({"eagle3_ext": dict(self.ext)} if self.ext else {})
        return write_draft(folder, **self.write, config_changes=config, tensor_changes=self.tensors)


def read_field(spec: DraftSpec, name: str) -> Any:
    value: Any = spec
    for part in name.split("."):
        value = getattr(value, part)
    return value


def change_fields(spec: DraftSpec, changes: Mapping[str, Any]) -> DraftSpec:
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        spec = replace(spec, **{first: replace(getattr(spec, first), **{rest: value}) if rest else value})
    return spec


def biases(where: str, **widths: int) -> dict[str, torch.Tensor | None]:
    return {f"{where}.{name}.bias": random(width, seed=len(name)) for name, width in widths.items()}


PERMUTED = {"sources": ["layer5", "embed", "layer2"]}
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"
QKV_BIAS = biases(ATTENTION, q_proj=48, k_proj=24, v_proj=24)
O_BIAS = biases(ATTENTION, o_proj=E)
MLP_BIAS = biases(MLP, gate_proj=40, up_proj=40, down_proj=E)
FC_BIAS: dict[str, torch.Tensor | None] = {"fc.bias": random(E)}
FC_NORMS: dict[str, torch.Tensor | None] = {f"fc_norm.{i}.weight": norm(M, seed=i) for i in range(3)}
INPUT_NORM: dict[str, torch.Tensor | None] = {"input_norm.weight": norm(3 * M)}
QK_NORMS: dict[str, torch.Tensor | None] = {f"{ATTENTION}.{p}_norm.weight": norm(12, seed=ord(p)) for p in "qk"}
HEAD_DELETED: dict[str, torch.Tensor | None] = {"lm_head.weight": None}
OWN_EMBED: dict[str, torch.Tensor | None] = {"embed_tokens.weight": random(VOCAB, E)}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 16,
}

VARIANTS = {
    "plain": Variant(),
    "eagle_repository": Variant({"dialect": "eagle"}, says={"architecture": "LlamaForCausalLM"}),
    "speculators": Variant(
        {"dialect": "speculators"},
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]},
        says={"format": "speculators", "rope.theta": 500000.0, "embed": "own"},
    ),
    "speculators_residual": Variant(
        {"dialect": "speculators"},
        {"norm_before_residual": True},
        says={"norms.residual": "post_norm"},
        unlike={"norms.residual": "pre_norm"},
    ),
    # -- sources
    "permuted": Variant(ext=PERMUTED),
    "one_source": Variant({"num_sources": 1}, ext={"sources": ["layer3"]}, says={"fc_in": E}),
    "one_source_by_id": Variant(
        {"num_sources": 1},
        {"eagle_config.eagle_aux_hidden_state_layer_ids": [3], "num_aux_hidden_states": 1},
        says={"num_sources": 1},
    ),
    "two_sources": Variant({"num_sources": 2}, ext={"sources": ["last", "layer1"]}, says={"num_sources": 2}),
    "five_sources": Variant(
        {"num_sources": 5},
        ext={"sources": ["final_norm", "layer6", "embed", "boundary4", "layer0"]},
        says={"num_sources": 5},
    ),
    "eight_sources": Variant(
        {"num_sources": 8},
        ext={"sources": ["layer6", "embed", "last", "layer0", "final_norm", "layer3", "boundary2", "layer4"]},
        says={"num_sources": 8},
    ),
    "no_fc": Variant(
        config={"eagle_config.use_aux_hidden_state": False},
        tensors={"fc.weight": None},
        says={"num_sources": 0, "fc_in": None},
    ),
    # -- norms
    "norms_per_source": Variant(
        config={"fc_norm": True},
        tensors=FC_NORMS,
        says={"norms.around_fc": "per_source"},
        unlike={"norms.around_fc": "none"},
    ),
    "norms_per_source_permuted": Variant(
        config={"fc_norm": True}, tensors=FC_NORMS, ext=PERMUTED, says={"norms.around_fc": "per_source"}
    ),
    "norm_over_all": Variant(
        config={"norm_before_fc": True},
        tensors=INPUT_NORM,
        says={"norms.around_fc": "concatenation"},
        unlike={"norms.around_fc": "none"},
    ),
    "norm_over_all_permuted": Variant(
        config={"norm_before_fc": True}, tensors=INPUT_NORM, ext=PERMUTED, says={"norms.around_fc": "concatenation"}
    ),
    "residual_after_norm": Variant(
        ext={"residual": "post_norm"},
        says={"norms.residual": "post_norm"},
        unlike={"norms.residual": "pre_norm"},
    ),
    "state_after_norm": Variant(
        config={"norm_output": True},
        says={"norms.recurrent_state": "post_norm"},
        unlike={"norms.recurrent_state": "pre_norm"},
    ),
    "both_after_norm_permuted": Variant(
        ext={"residual": "post_norm", "recurrent_state": "post_norm", **PERMUTED},
        says={"norms.residual": "post_norm", "norms.recurrent_state": "post_norm"},
    ),
    "no_final_norm": Variant(
        config={"use_last_layernorm": False},
        tensors={"norm.weight": None},
        says={"norms.final_norm": False},
    ),
    "final_norm_switched_off_by_producer": Variant(
        config={"norm_output": False}, ext={"producer": "specforge"}, says={"norms.final_norm": False}
    ),
    # -- biases
    "qkv_bias": Variant(
        config={"attention_bias": True},
        tensors=QKV_BIAS,
        says={"attention.qkv_bias": True, "attention.o_bias": False},
        unlike={"attention.qkv_bias": False},
    ),
    "qkv_bias_unflagged": Variant(tensors=QKV_BIAS, says={"attention.qkv_bias": True}),
    "o_bias": Variant(
        config={"attention_bias": True},
        tensors=O_BIAS,
        says={"attention.o_bias": True, "attention.qkv_bias": False},
        unlike={"attention.o_bias": False},
    ),
    "fc_bias": Variant(
        config={"bias": True},
        tensors=FC_BIAS,
        says={"fc_bias": True, "attention.o_bias": False},
        unlike={"fc_bias": False},
    ),
    "mlp_bias": Variant(
        config={"mlp_bias": True}, tensors=MLP_BIAS, says={"mlp_bias": True}, unlike={"mlp_bias": False}
    ),
    "every_bias": Variant(
        config={"bias": True, "attention_bias": True, "mlp_bias": True},
        tensors=QKV_BIAS | O_BIAS | FC_BIAS | MLP_BIAS,
        says={"fc_bias": True, "mlp_bias": True, "attention.qkv_bias": True, "attention.o_bias": True},
    ),
    "no_bias_behind_the_flags": Variant(
        config={"bias": True, "attention_bias": True, "mlp_bias": True},
        says={"fc_bias": False, "mlp_bias": False, "attention.qkv_bias": False, "attention.o_bias": False},
    ),
    # -- attention and layers
    "qk_norms": Variant(
        config={"model_type": "qwen3"},
        tensors=QK_NORMS,
        says={"attention.qk_norm": True},
        unlike={"attention.qk_norm": False},
    ),
    "speculators_qk_norms": Variant(
        {"dialect": "speculators", "layers": 2},
        {"transformer_layer_config.model_type": "qwen3"},
        {f"layers.{i}.self_attn.{p}_norm.weight": norm(12, seed=i + ord(p)) for i in (0, 1) for p in "qk"},
        says={"attention.qk_norm": True, "attention.num_layers": 2},
        unlike={"attention.qk_norm": False},
    ),
    "two_layers": Variant({"layers": 2}, says={"attention.num_layers": 2}),
    "two_layers_post_norm_biases": Variant(
        {"layers": 2},
        {"attention_bias": True},
        QKV_BIAS | O_BIAS | biases("layers.1.self_attn", q_proj=48, k_proj=24, v_proj=24, o_proj=E),
        {"residual": "post_norm"},
        says={"attention.num_layers": 2, "attention.o_bias": True},
        unlike={"norms.residual": "pre_norm"},
    ),
    "second_layer_as_stock_spells_it": Variant(
        {"layers": 2},
        tensors={"layers.1.input_layernorm.weight": None, "layers.1.hidden_norm.weight": norm(E)},
        says={"attention.num_layers": 2},
    ),
    "layer_count_of_the_target": Variant(config={"num_hidden_layers": LAYERS}, says={"attention.num_layers": 1}),
    "window": Variant(
        config={"sliding_window": 3, "use_sliding_window": True},
        says={"attention.sliding_window": 3},
        unlike={"attention.sliding_window": 4},
    ),
    "as_many_kv_heads_as_heads": Variant({"kv_heads": 4}, says={"attention.kv_heads": 4}),
    # -- rope
    "rope_theta_overridden": Variant(
        ext={"rope_theta": 31.0}, says={"rope.theta": 31.0}, unlike={"rope.theta": 10000.0}
    ),
    "rope_linear": Variant(
        config={"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, unlike={"rope.scaling": None}
    ),
    "rope_linear_without_a_fraction": Variant(
        config={"rope_scaling": {"type": "linear", "factor": 3}}, unlike={"rope.scaling": None}
    ),
    "rope_llama3": Variant(config={"rope_scaling": LLAMA3}, unlike={"rope.scaling": None}),
    "rope_yarn": Variant(config={"rope_scaling": YARN}, unlike={"rope.scaling": None}),
    "rope_yarn_attention_factor": Variant(
        config={"rope_scaling": YARN | {"attention_factor": 1.5, "truncate": False}},
        unlike={"rope.scaling": YARN | {"truncate": False}},
    ),
    "rope_yarn_mscale": Variant(
        config={"rope_scaling": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5, "attention_factor": 1.25}},
        unlike={"rope.scaling": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}},
    ),
    "rope_yarn_length_beside_it": Variant(
        config={"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
        unlike={"rope.scaling": YARN | {"original_max_position_embeddings": 512}},
    ),
    "rope_dynamic": Variant(
        # SGLang would stretch the base by this power everywhere; transformers does nowhere within the draft's length.
        config={"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        says={"rope.scaling": None, "rope.theta": 10000.0},
        unlike={"rope.theta": 10000.0 * 3.0 ** (12 / 10)},
    ),
    "rope_dynamic_of_specforge": Variant(
        # Its table is 20 positions longer than 512, so that the base is stretched at all of them.
        config={"rope_scaling": {"type": "dynamic", "factor": 8.0}},
        ext={"producer": "specforge"},
        says={"rope.scaling": None, "rope.theta": 10000.0 * (1 + 8 * 20 / 512) ** (12 / 10)},
        unlike={"rope.theta": 10000.0},
    ),
    "rope_dynamic_alpha": Variant(
        config={"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
        says={"rope.scaling": None},
        unlike={"rope.theta": 10000.0 * 1000.0 ** (12 / 10)},
    ),
    "rope_mrope": Variant(
        config={"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 3]}},
        says={"rope.scaling": {"rope_type": "default", "mrope_section": [2, 1, 3]}},
        unlike={"rope.theta": 500.0},
    ),
    "rope_mrope_interleaved": Variant(
        config={"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}},
        unlike={"rope.theta": 500.0},
    ),
    "rope_mrope_yarn": Variant(
        config={"rope_scaling": YARN | {"mrope_section": [2, 2, 2]}}, unlike={"rope.scaling": None}
    ),
    "rope_llama3_overridden": Variant(ext={"rope_scaling": LLAMA3}, unlike={"rope.scaling": None}),
    "rope_scaling_in_two_places": Variant(
        config={
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"rope_type": "linear", "type": "default", "factor": 4.0},
        },
        says={"rope.scaling": {"rope_type": "linear", "factor": 4.0}},
        unlike={"rope.scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "rope_theta_in_two_places": Variant(
        config={"rope_theta": 500.0, "rope_scaling": {"rope_type": "default", "rope_theta": 31.0}},
        says={"rope.theta": 31.0},
        unlike={"rope.theta": 500.0},
    ),
    "rope_partial": Variant(
        config={"partial_rotary_factor": 0.5},
        says={"rope.partial_rotary_factor": 0.5},
        unlike={"rope.partial_rotary_factor": 1.0},
    ),
    # -- embedding, head, vocabulary
    "own_embedding": Variant(tensors=OWN_EMBED, says={"embed": "own"}, unlike={"embed": "target"}),
    "embedding_left_out": Variant(tensors=OWN_EMBED, ext={"embed": "target"}, says={"embed": "target"}),
    "tied_to_own_embedding": Variant(
        {"draft_vocab": VOCAB},
        {"tie_word_embeddings": True},
        HEAD_DELETED | OWN_EMBED,
        says={"lm_head": "tied", "embed": "own"},
        unlike={"embed": "target"},
    ),
    "tied_to_the_targets_embedding": Variant(
        {"draft_vocab": VOCAB},
        {"tie_word_embeddings": True},
        HEAD_DELETED,
        says={"lm_head": "tied", "embed": "target"},
        unlike={"lm_head": "target"},
    ),
    "tied_flag_beside_a_head": Variant(config={"tie_word_embeddings": True}, says={"lm_head": "own"}),
    "head_of_the_target": Variant(
        {"draft_vocab": VOCAB},
        {"draft_vocab_size": None},
        HEAD_DELETED,
        says={"lm_head": "target"},
        unlike={"lm_head": "tied"},
    ),
    "head_of_the_target_own_embedding": Variant(
        {"draft_vocab": VOCAB},
        {"draft_vocab_size": None},
        HEAD_DELETED | OWN_EMBED,
        says={"lm_head": "target", "embed": "own"},
        unlike={"embed": "target"},
    ),
    "head_left_out": Variant(
        {"draft_vocab": VOCAB}, ext={"lm_head": "target"}, says={"lm_head": "target", "vocab.map": "none"}
    ),
    "wider_target": Variant({"target_hidden": 48}, says={"target_hidden_size": 48, "embed": "own"}),
    "wider_target_permuted": Variant(
        {"target_hidden": 48}, {"fc_norm": True}, {f"fc_norm.{i}.weight": norm(48, i) for i in range(3)}, PERMUTED
    ),
    "narrower_target_as_wide_as_its_draft_together": Variant(
        {"target_hidden": 16, "num_sources": 2}, ext={"sources": ["layer6", "layer1"]}, says={"fc_in": E}
    ),
    "absolute_map": Variant(
        tensors={"d2t": torch.arange(37) * 2 + 5, "t2d": None},
        ext={"vocab_map": "absolute"},
        says={"vocab.map": "absolute"},
    ),
    "no_map": Variant({"draft_vocab": VOCAB}, says={"vocab.map": "none", "lm_head": "own"}),
    "own_head_without_a_size": Variant(
        {"draft_vocab": VOCAB}, {"draft_vocab_size": None}, says={"lm_head": "own"}, unlike={"lm_head": "target"}
    ),
    "no_head_with_a_size": Variant({"draft_vocab": VOCAB}, {}, HEAD_DELETED, says={"lm_head": "target"}),
    "quantisation_of_the_target": Variant(
        config={"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    ),
    "map_over_the_whole_vocabulary": Variant(
        {"draft_vocab": VOCAB}, tensors={"d2t": torch.zeros(VOCAB, dtype=torch.int64)}, says={"vocab.map": "none"}
    ),
    "widths_that_divide_nothing": Variant(
        {
            "hidden": 30,
            "target_hidden": 40,
            "heads": 3,
            "kv_heads": 1,
            "head_dim": 14,
            "intermediate": 22,
            "draft_vocab": 65,
        },
        ext=PERMUTED,
        says={"hidden_size": 30},
    ),
}

every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_passes_equal_the_reference(
    variant: Variant, kernels: str, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    target = targets(variant.write.get("target_hidden", M))
    served = serve(variant.at(tmp_path), target)
    spec, model = served.spec, served.model
    assert {name: read_field(spec, name) for name in variant.says} == variant.says
    assert model.model.fused is (kernels == "on")

    features = served.features(9)
    states = served.in_capture_order(features)
    projected = served.reference.project(features)
    torch.testing.assert_close(
        model.model.project(states), projected, rtol=1e-5, atol=CLOSE * float(projected.abs().max())
    )
    if not served.plan.is_identity:
        assert not torch.allclose(model.model.project(features), projected, atol=1e-2)

    wanted = run_reference(served.reference, passes(), features)
    assert distance(run_served(model, passes(), states), wanted) < CLOSE
    if variant.unlike:
        other = refer(change_fields(spec, variant.unlike), target)
        assert distance(run_reference(other, passes(), features), wanted) > 100 * CLOSE

    ids = torch.arange(spec.vocab.draft)
    if spec.vocab.map == "none":
        assert model.hot_token_id is None
    else:
        assert torch.equal(model.hot_token_id, served.reference.to_target(ids))


@every_variant
def test_what_equals_stock_has_stocks_own_bits(
    variant: Variant, targets: Callable[[int], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plan says that stock computes the same draft, stock does, bit for bit, without our kernels."""
    from sglang.srt.models import llama_eagle3 as stock
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils.hf_transformers import config as parsing

    target = targets(variant.write.get("target_hidden", M))
    folder = variant.at(tmp_path)
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "off")
    served = serve(folder, target)
    if not served.plan.equals_stock:
        assert served.plan.differences
        return
    theirs = stock.LlamaForCausalLMEagle3(parsing.get_config(str(folder), trust_remote_code=False))
    theirs.load_weights(load_file(folder / "model.safetensors").items())
    current_platform.post_load_model(theirs)
    share(theirs, target)
    put_attention(theirs)
    states = served.in_capture_order(served.features(9))
    for mine, his in zip(
        run_served(served.model, passes(), states), run_served(theirs.eval(), passes(), states), strict=True
    ):
        assert torch.equal(mine[0], his[0])
        assert torch.equal(mine[1], his[1])


def test_some_variants_equal_stock(targets: Callable[[int], Target], tmp_path: Path) -> None:
    """The test before means something only where there are such plans."""
    same_width = {name: variant for name, variant in VARIANTS.items() if "target_hidden" not in variant.write}
    plans = {name: resolve(draft_config(v.at(tmp_path / name)), targets(M)) for name, v in same_width.items()}
    equal = {name for name, plan in plans.items() if plan.equals_stock}
    assert {"plain", "norms_per_source", "norm_over_all", "state_after_norm", "head_of_the_target"} <= equal
    # What is said of stock's choice among several is shown by its bits.
    assert {"rope_yarn", "rope_mrope", "rope_scaling_in_two_places", "rope_theta_in_two_places"} <= equal
    assert not equal & {"rope_dynamic", "rope_dynamic_of_specforge", "rope_mrope_yarn", "rope_yarn_attention_factor"}
    assert not equal & {"permuted", "residual_after_norm", "qk_norms", "no_final_norm", "absolute_map"}


# ---- rotary embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        LLAMA3,
        {"type": "yarn", "factor": 4.0},
        {"type": "mrope", "mrope_section": [2, 2, 2]},
    ],
    ids=lambda s: s and s.get("type", "llama3"),
)
def test_positions_go_on_beyond_the_draft_s_own(
    scaling: dict[str, Any] | None, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    """A draft of four positions beside a target of many: nothing but the rotation as it began (atlas A11)."""
    folder = Variant(config={"max_position_embeddings": 4, "rope_scaling": scaling}).at(tmp_path)
    served = serve(folder, targets(M), context=64)
    assert served.spec.max_position_embeddings == 4 < passes()[-1].positions[0]
    features = served.features(9)
    got = run_served(served.model, passes(), served.in_capture_order(features))
    wanted = run_reference(served.reference, passes(), features)
    assert distance(got, wanted) < CLOSE


@pytest.mark.parametrize("changes", [{}, {"factor": 3.0}, {"attention_factor": 1.75}], ids=str)
def test_longrope_is_transformers_own(
    changes: dict[str, Any], targets: Callable[[int], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its factors are those of the draft's length, not of the target's, to which the table is made longer."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The reference refuses longrope, which is another beyond its trained length; within, it computes it.
    monkeypatch.setattr(reference, "_TEXT_ROPES", (*reference._TEXT_ROPES, "longrope"))
    scaling = LONGROPE | changes
    folder = Variant(config={"max_position_embeddings": 64, "rope_scaling": scaling}).at(tmp_path)
    served = serve(folder, targets(M), context=256)
    features = served.features(9)
    got = run_served(served.model, passes(), served.in_capture_order(features))
    wanted = run_reference(served.reference, passes(), features)
    assert distance(got, wanted) < CLOSE
    # With the lists exchanged, and with the factors that the target's length would give.
    exchanged = {"short_factor": LONGROPE["long_factor"], "long_factor": LONGROPE["short_factor"]}
    for unlike in (exchanged, {"factor": 16.0, "attention_factor": None}):
        other = refer(change_fields(served.spec, {"rope.scaling": scaling | unlike}), targets(M))
        assert distance(run_reference(other, passes(), features), wanted) > 100 * CLOSE

    config = LlamaConfig(
        head_dim=12, max_position_embeddings=64, rope_parameters={"rope_theta": served.spec.rope.theta, **scaling}
    )
    angles, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=200)
    positions = torch.tensor([0, 17, 199])
    query = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    turned, _ = served.model.model.layers[0].self_attn.rotary_emb(positions, query, query.clone())
    angle = positions[:, None] * angles
    first, second = query.chunk(2, dim=-1)
    expected = torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
    )
    torch.testing.assert_close(turned, expected * factor, rtol=0, atol=1e-4)


def test_a_multimodal_rope_serves_text_without_multimodal_positions(
    targets: Callable[[int], Target], tmp_path: Path
) -> None:
    served = serve(VARIANTS["rope_mrope"].at(tmp_path), targets(M))
    states, ids = served.in_capture_order(served.features(4)), torch.arange(4)
    out = served.model(ids, torch.arange(4), batch("EXTEND", states))
    made = batch("EXTEND", states)
    made.mrope_positions = torch.arange(4).expand(3, -1)
    put_back(served.model)
    again = served.model(ids, torch.arange(4), made)
    torch.testing.assert_close(out.hidden_states, again.hidden_states, rtol=0, atol=1e-6)
    made.mrope_positions = torch.arange(4) * torch.tensor([[1], [2], [5]])
    put_back(served.model)
    assert not torch.allclose(served.model(ids, torch.arange(4), made).hidden_states, again.hidden_states, atol=1e-3)


def test_a_rope_on_the_command_line_is_the_targets_alone(targets: Callable[[int], Target], tmp_path: Path) -> None:
    target, folder = targets(M), VARIANTS["plain"].at(tmp_path)
    config = draft_config(folder, rope_theta=7.0, rope_scaling={"rope_type": "linear", "factor": 4.0})
    plan, model = resolve(config, target), build(config)
    share(model, target)
    put_attention(model)
    served = Served(model, plan, refer(plan.spec, target), target)
    features = served.features(9)
    wanted = run_reference(served.reference, passes(), features)
    assert distance(run_served(model, passes(), served.in_capture_order(features)), wanted) < CLOSE
    other = refer(change_fields(plan.spec, {"rope.theta": 7.0}), target)
    assert distance(run_reference(other, passes(), features), wanted) > 100 * CLOSE


@pytest.mark.parametrize("put", [shard, pickle], ids=["two shards", "a pickle"])
def test_files_of_every_form_are_loaded_alike(
    put: Callable[[Path], Any], targets: Callable[[int], Target], tmp_path: Path
) -> None:
    folders = [VARIANTS["permuted"].at(tmp_path / name) for name in ("whole", "other")]
    put(folders[1])
    assert not (folders[1] / "model.safetensors").exists()
    whole, other = (dict(serve(folder, targets(M)).model.named_parameters()) for folder in folders)
    assert whole.keys() == other.keys()
    assert all(torch.equal(parameter, other[name]) for name, parameter in whole.items())


# ---- what is borrowed ---------------------------------------------------------------------------------------------


def test_an_embedding_equal_to_the_targets_is_shared(targets: Callable[[int], Target], tmp_path: Path) -> None:
    target = targets(M)
    own = target.embed.weight.data[:VOCAB].clone()
    served = serve(Variant(tensors={"embed_tokens.weight": own}).at(tmp_path / "equal"), target)
    assert served.model.model.embed_tokens.weight is target.embed.weight
    assert served.model.embed_origin == "the target's (its own is equal)"
    own[17, 3] += 0.25
    served = serve(Variant(tensors={"embed_tokens.weight": own}).at(tmp_path / "different"), target)
    assert served.model.embed_origin == "its own"
    assert torch.equal(served.model.model.embed_tokens.weight[:VOCAB], own)


def test_what_is_borrowed_is_the_targets_own_tensor(targets: Callable[[int], Target], tmp_path: Path) -> None:
    target = targets(M)
    served = serve(VARIANTS["head_of_the_target"].at(tmp_path / "head"), target)
    assert served.model.lm_head.weight is target.head.weight
    assert served.model.model.embed_tokens.weight is target.embed.weight
    served = serve(VARIANTS["tied_to_the_targets_embedding"].at(tmp_path / "tied"), target)
    assert served.model.lm_head.weight is target.embed.weight
    served = serve(VARIANTS["wider_target"].at(tmp_path / "wider"), targets(48))
    assert served.model.model.embed_tokens.weight.shape[1] == E


def test_what_is_borrowed_is_not_held_twice(targets: Callable[[int], Target], tmp_path: Path) -> None:
    target = targets(M)
    folder = VARIANTS["head_of_the_target"].at(tmp_path)
    config = draft_config(folder)
    plan = resolve(config, target)
    model = build(config)

    def held() -> int:
        """Count the bytes that the draft has beside the target's."""
        theirs = {target.embed.weight.data_ptr(), target.head.weight.data_ptr()}
        own = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if p.data_ptr() not in theirs}
        return sum(own.values())

    placeholders = sum(p.numel() * p.element_size() for p in (model.model.embed_tokens.weight, model.lm_head.weight))
    before = held()
    share(model, target)
    stored = [info for name, info in plan.spec.tensors.items() if plan.spec.weights[name] not in ("d2t", "t2d")]
    assert held() == before - placeholders == 4 * sum(math.prod(info.shape) for info in stored)


# ---- what SGLang is told ------------------------------------------------------------------------------------------


@every_variant
def test_sglang_sizes_its_buffers_from_the_draft(
    variant: Variant, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    config = draft_config(variant.at(tmp_path))
    spec = resolve(config, targets(variant.write.get("target_hidden", M))).spec
    assert config.hf_config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.hidden_size == spec.hidden_size
    assert config.num_hidden_layers == config.num_attention_layers == spec.attention.num_layers
    assert config.num_attention_heads == spec.attention.heads
    assert config.get_num_kv_heads(1) == spec.attention.kv_heads
    assert config.head_dim == spec.attention.head_dim
    assert config.vocab_size == VOCAB


def test_the_command_line_wins(targets: Callable[[int], Target], tmp_path: Path) -> None:
    folder = Variant(ext=PERMUTED).at(tmp_path)
    served = serve(folder, targets(M), {"sources": ["layer2", "layer5", "embed"]})
    assert served.plan.boundaries == (3, 6, 0)
    features = served.features(4)
    torch.testing.assert_close(
        served.model.model.project(served.in_capture_order(features)), served.reference.project(features)
    )


# ---- the kernels themselves --------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Serve with the Triton kernels, in the corrected interpreter, and count what reaches them."""
    import triton

    counts: Counter[str] = Counter()

    def counted(name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return wrapper(*args, **kwargs)

        return call

    interpret(fc_proj, norm_concat)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    for module, name in ((fc_proj, "fc_proj"), (norm_concat, "norm_concat")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
        monkeypatch.setattr(module, f"{name}_torch", counted(f"{name}_torch", getattr(module, f"{name}_torch")))
    return counts


ON_KERNELS = (
    "plain",
    "permuted",
    "one_source",
    "two_sources",
    "five_sources",
    "eight_sources",
    "no_fc",
    "norms_per_source_permuted",
    "norm_over_all_permuted",
    "both_after_norm_permuted",
    "every_bias",
    "two_layers_post_norm_biases",
    "wider_target_permuted",
    "widths_that_divide_nothing",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels_serve_as_their_twins_do(
    name: str,
    dtype: str,
    launches: Counter[str],
    targets: Callable[[int], Target],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    variant = VARIANTS[name]
    target, folder = targets(variant.write.get("target_hidden", M)), variant.at(tmp_path)
    served = serve(folder, target, dtype=dtype)
    assert served.model.model.computed_by == "fc_proj and norm_concat in Triton"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    twin = serve(folder, target, dtype=dtype)
    assert twin.model.model.computed_by == "fc_proj and norm_concat, PyTorch twins in float32"

    features = served.features(9)
    states = served.in_capture_order(features).to(getattr(torch, dtype))
    got = run_served(served.model, passes(), states)
    projected = served.spec.fc_in is not None
    assert launches == {"norm_concat": len(passes()), **({"fc_proj": 3} if projected else {})}
    wanted = run_served(twin.model, passes(), states)
    assert launches["norm_concat_torch"] == len(passes())
    assert distance(got, wanted) < (CLOSE if dtype == "float32" else 3e-2)
    if dtype == "float32":
        assert distance(got, run_reference(served.reference, passes(), features)) < CLOSE


def test_kernels_read_what_an_update_wrote(
    launches: Counter[str], targets: Callable[[int], Target], tmp_path: Path
) -> None:
    """A CUDA graph goes on reading the memory it was captured with, so an update may not leave it for another."""
    served = serve(VARIANTS["norms_per_source_permuted"].at(tmp_path), targets(M))
    model, states = served.model.model, served.in_capture_order(served.features(5))
    memory = [model._norm_weight.data_ptr(), model.fc.weight.data_ptr()]
    changed = {f"fc_norm.{i}.weight": norm(M, seed=40 + i) for i in range(3)} | {"fc.weight": random(E, 3 * M) / 9}
    update(served.model, changed)
    assert [model._norm_weight.data_ptr(), model.fc.weight.data_ptr()] == memory
    tensors = dict(reference.read_tensors(served.spec)) | changed
    whole = reference.ReferenceDraft(served.spec, tensors, embed=served.target.embed.weight.data[:VOCAB])
    torch.testing.assert_close(model.project(states), whole.project(served.features(5)), rtol=1e-5, atol=1e-5)
    assert launches["fc_proj"] == 1


def test_a_projection_in_fp8_follows_updates(
    launches: Counter[str], targets: Callable[[int], Target], tmp_path: Path
) -> None:
    served = serve(VARIANTS["norm_over_all_permuted"].at(tmp_path), targets(M))
    model, states = served.model.model, served.in_capture_order(served.features(5))
    exact = model.project(states)
    assert model.operators.fp8_weight is False
    model.operators = replace(model.operators, fp8_weight=True)
    served.model.finish_load()
    memory = model._fc_weight.data_ptr()

    def expected() -> torch.Tensor:
        weight, scale = fc_proj.quantise_fc_weight(model.fc.weight)
        normed = F.rms_norm(states, (3 * M,), model.input_norm.weight, served.spec.rms_norm_eps)
        return F.linear(normed, weight.float() * scale[:, None])

    torch.testing.assert_close(model.project(states), expected(), rtol=1e-5, atol=1e-5)
    assert 1e-4 < float((model.project(states) - exact).abs().max() / exact.abs().max()) < 0.1
    update(served.model, {"fc.weight": random(E, 3 * M) / 9})
    torch.testing.assert_close(model.project(states), expected(), rtol=1e-5, atol=1e-5)
    assert model._fc_weight.data_ptr() == memory


def test_the_projection_follows_the_drafts_own_quantisation(
    targets: Callable[[int], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``--speculative-draft-model-quantization`` names reaches the choice of operators."""
    from sglang_eagle3_ext.host.models import draft

    asked = []

    choose = draft.choose_operators
    monkeypatch.setattr(draft, "choose_operators", lambda *facts: asked.append(facts[3]) or choose(*facts))
    folder, target = VARIANTS["norm_over_all_permuted"].at(tmp_path), targets(M)
    config = draft_config(folder, None, "float32", None)
    plan = resolve(config, target)
    for method in (None, SimpleNamespace(get_name=lambda: "fp8")):
        made = partial(draft.DraftModel, config.hf_config, method, "", plan=plan)
        with pytest.raises(TypeError, match="NoneType"):  # a stub of a method builds no layer; the choice comes before
            made(layer_class=None)
    assert asked == [None, "fp8"]


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "width", "kernel", "quantisation", "serves"),
    [
        pytest.param(GPU, torch.bfloat16, 4096, "triton", None, "fc_proj and norm_concat in Triton", id="kernels"),
        pytest.param(
            GPU,
            torch.float16,
            7168,
            "triton",
            "fp8",
            "fc_proj on FP8 weights with a scale per column and norm_concat in Triton",
            id="fp8",
        ),
        pytest.param(GPU, torch.bfloat16, 4096, "triton", "awq", "fc_proj and norm_concat in Triton", id="quantised"),
        pytest.param(
            GPU,
            torch.bfloat16,
            16385,
            "triton",
            None,
            "fc_proj in Triton; stock's norms, which take widths above 16384",
            id="too wide",
        ),
        pytest.param(
            GPU,
            torch.float64,
            64,
            "triton",
            None,
            "stock's operators compute the draft (no kernel computes in torch.float64)",
            id="float64",
        ),
        pytest.param(
            GPU,
            torch.bfloat16,
            64,
            "torch",
            None,
            "stock's operators compute the draft (no kernel serves on this cuda device)",
            id="old gpu",
        ),
        pytest.param(
            CPU, torch.float32, 64, "torch", "fp8", "fc_proj and norm_concat, PyTorch twins in float32", id="twins"
        ),
        pytest.param(
            CPU, torch.float64, 64, "triton", None, "fc_proj and norm_concat, PyTorch twins in float32", id="as well"
        ),
    ],
)
def test_what_serves_is_decided_once(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    kernel: str,
    quantisation: str | None,
    serves: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_eagle3_ext.host.models import operators

    monkeypatch.setattr(operators, "implementation_for", lambda _device: kernel)
    monkeypatch.setattr(operators, "arch_of", lambda _device: H200)
    chosen = operators.choose_operators(device, dtype, width, quantisation)
    assert chosen.text == serves
    assert (chosen.fc_proj is fc_proj.fc_proj) is (chosen.fc_proj is not None and "Triton" in serves)
    assert (chosen.norm_concat is norm_concat.norm_concat) is ("norm_concat in Triton" in serves)
    assert chosen.float32_weight is ("twins" in serves)
    assert chosen.fp8_weight is ("FP8" in serves)
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "off")
    off = operators.choose_operators(device, dtype, width, quantisation)
    assert (off.fc_proj, off.norm_concat, off.fp8_weight) == (None, None, False)


def test_fp8_needs_a_gpu_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_eagle3_ext.host.models import operators

    monkeypatch.setattr(operators, "implementation_for", lambda _device: "triton")
    monkeypatch.setattr(operators, "arch_of", lambda _device: replace(H200, capability=86))
    assert operators.choose_operators(GPU, torch.bfloat16, 64, "fp8").fp8_weight is False


# ---- weights ------------------------------------------------------------------------------------------------------


class Loading(NamedTuple):
    """A draft that SGLang has built and not yet loaded, and the tensors of its file."""

    model: Any
    tensors: dict[str, torch.Tensor]


@pytest.fixture
def loading(targets: Callable[[int], Target], tmp_path: Path) -> Loading:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _initialize_model

    folder = Variant(config={"fc_norm": True}, tensors=FC_NORMS, ext=PERMUTED).at(tmp_path)
    config = draft_config(folder)
    resolve(config, targets(M))
    return Loading(_initialize_model(config, LoadConfig()), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("stranger", ["midlayer.self_attn.gate.weight", "model.layers.4.mlp.up_proj.weight"])
def test_a_tensor_without_a_home_is_refused(loading: Loading, stranger: str) -> None:
    with pytest.raises(CheckpointError, match=stranger.replace(".", r"\.")):
        loading.model.load_weights([*loading.tensors.items(), (stranger, torch.zeros(3, 3))])


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("fc.weight", ["model.fc.weight"]),
        ("norm.weight", ["model.norm.weight"]),
        ("lm_head.weight", ["lm_head.weight"]),
        ("midlayer.hidden_norm.weight", ["model.layers.0.hidden_norm.weight"]),
        ("midlayer.self_attn.k_proj.weight", ["model.layers.0.self_attn.qkv_proj.weight", "shard k"]),
        ("midlayer.mlp.up_proj.weight", ["model.layers.0.mlp.gate_up_proj.weight", "shard 1"]),
        ("fc_norm.1.weight", ["fc_norm.1.weight"]),
        ("d2t", ["d2t"]),
    ],
)
def test_a_parameter_without_a_tensor_is_named(loading: Loading, absent: str, names: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        loading.model.load_weights((n, t) for n, t in loading.tensors.items() if n != absent)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "fc_norm.2.weight", "midlayer.self_attn.q_proj.weight"])
def test_values_that_are_no_numbers_are_refused(loading: Loading, name: str, value: float) -> None:
    loading.tensors[name].view(-1)[5] = value
    with pytest.raises(CheckpointError, match=rf"{name}.*not finite".replace(".weight", r"\.weight")):
        loading.model.load_weights(loading.tensors.items())


def test_all_problems_are_told_at_once(loading: Loading) -> None:
    tensors = dict(loading.tensors)
    tensors["midlayer.mlp.down_proj.weight"][0, 0] = float("nan")
    del tensors["norm.weight"]
    tensors["stranger"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        loading.model.load_weights(tensors.items())
    assert all(name in str(caught.value) for name in ("midlayer.mlp.down_proj.weight", "model.norm.weight", "stranger"))


def test_a_broken_file_is_refused_before_weights_are_read(targets: Callable[[int], Target], tmp_path: Path) -> None:
    folder = Variant(tensors={"midlayer.self_attn.gate.weight": torch.zeros(3), "norm.weight": None}).at(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve(draft_config(folder), targets(M))
    assert "self_attn.gate.weight" in str(caught.value)
    assert "norm.weight" in str(caught.value)


def test_a_draft_whose_target_is_unknown_is_refused(runtime: None, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="before its target was known"):
        build(draft_config(Variant().at(tmp_path)))


def update(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Update weights at run time, as SGLang's weight updater does."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.load_weights_and_postprocess(model, iter(tensors.items()), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("norms", ["per_source", "concatenation"])
def test_an_update_of_fc_alone_is_permuted_again(
    norms: str, dtype: torch.dtype, kernels: str, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    flag, tensors = ("fc_norm", FC_NORMS) if norms == "per_source" else ("norm_before_fc", INPUT_NORM)
    stored = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
    served = serve(
        Variant({"dtype": dtype}, {flag: True}, stored, PERMUTED).at(tmp_path),
        targets(M),
        dtype=str(dtype).removeprefix("torch."),
    )
    features = served.features(5).to(dtype)
    before = served.model.model.project(served.in_capture_order(features))
    assert before.dtype == dtype
    changed = {"fc.weight": (random(E, 3 * M) / 9).to(dtype)}
    if norms == "concatenation":
        changed["input_norm.weight"] = norm(3 * M, seed=40).to(dtype)
    else:
        changed |= {f"fc_norm.{i}.weight": norm(M, seed=40 + i).to(dtype) for i in range(3)}
    wanted = {name: tensor.float() for name, tensor in changed.items()}
    for part in (["fc.weight"], [n for n in changed if n != "fc.weight"]):
        update(served.model, {name: changed[name] for name in part})
    whole = reference.ReferenceDraft(
        served.spec,
        dict(reference.read_tensors(served.spec)) | wanted,
        embed=served.target.embed.weight.data[:VOCAB],
    ).project(features.float())
    after = served.model.model.project(served.in_capture_order(features)).float()
    size = float(whole.abs().max())
    tolerance = CLOSE if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(after, whole, rtol=0, atol=tolerance * size)
    assert float((before.float() - whole).abs().max()) > 10 * tolerance * size


def test_part_of_the_norms_is_refused_in_an_update(targets: Callable[[int], Target], tmp_path: Path) -> None:
    served = serve(VARIANTS["norms_per_source_permuted"].at(tmp_path), targets(M))
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight, fc_norm\.2\.weight"):
        update(served.model, {"fc_norm.1.weight": norm(M)})


def test_an_update_leaves_the_targets_tensors_to_the_target(
    kernels: str, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    """An update may carry the target's tensors as well; what the draft borrows changes with the target only."""
    target = targets(M)
    served = serve(VARIANTS["head_of_the_target"].at(tmp_path), target)
    borrowed = [target.embed.weight.clone(), target.head.weight.clone()]
    features = served.features(9)
    states = served.in_capture_order(features)
    before = run_served(served.model, passes(), states)
    update(
        served.model,
        {
            "model.layers.3.self_attn.q_proj.weight": torch.full((E, E), float("nan")),
            "model.embed_tokens.weight": torch.zeros(VOCAB, E),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(E),
        },
    )
    assert torch.equal(target.embed.weight, borrowed[0])
    assert torch.equal(target.head.weight, borrowed[1])
    put_back(served.model)
    after = run_served(served.model, passes(), states)
    assert distance(after, before) == 0.0


def put_back(model: Any) -> None:
    """Forget the rows that the stand-ins for attention have seen."""
    for layer in model.model.layers:
        layer.self_attn.attn.keys = layer.self_attn.attn.values = torch.empty(0)


# ---- passes are known by their mode ------------------------------------------------------------------------------


@pytest.fixture
def permuted(targets: Callable[[int], Target], tmp_path: Path) -> Served:
    return serve(VARIANTS["permuted"].at(tmp_path), targets(M))


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "SPLIT_PREFILL", "DRAFT_EXTEND_V2"])
@pytest.mark.parametrize("width", [M, 2 * M, 3 * M + 1])
def test_a_feature_pass_of_another_width_is_refused(permuted: Served, mode: str, width: int) -> None:
    tokens = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=rf"width {width} in a {mode} pass; expected {3 * M} "):
        permuted.model.model(tokens, torch.arange(2), batch(mode, torch.zeros(2, width)))


@pytest.mark.parametrize("width", [3 * M, M - 1])
def test_a_recurrent_pass_of_another_width_is_refused(permuted: Served, width: int) -> None:
    with pytest.raises(ValueError, match=rf"recurrent state of width {width}; expected {E}\."):
        permuted.model.model(torch.tensor([1]), torch.arange(1), batch("DECODE", torch.zeros(1, width)))


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "PREBUILT", "DLLM_EXTEND"])
def test_a_pass_that_a_draft_does_not_have_is_refused(permuted: Served, mode: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has no {mode} pass"):
        permuted.model.model(torch.tensor([1]), torch.arange(1), batch(mode, torch.zeros(1, 3 * M)))


@pytest.mark.parametrize(("mode", "width"), [("IDLE", E), ("IDLE", 3 * M), ("EXTEND", 3 * M), ("DECODE", E)])
def test_an_empty_batch_gives_empty_states(permuted: Served, mode: str, width: int) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    to_head, recurring = permuted.model.model(empty, empty, batch(mode, torch.empty(0, width)))
    assert to_head.shape == (0, E)
    assert [state.shape for state in recurring] == [(0, E)]


def test_the_mode_decides_where_both_widths_agree(targets: Callable[[int], Target], tmp_path: Path) -> None:
    """With one source as wide as the draft, a width cannot tell whether ``fc`` has run."""
    served = serve(VARIANTS["one_source"].at(tmp_path), targets(M))
    states = served.features(1)
    model = served.model.model
    assert torch.equal(model._incoming(batch("DECODE", states)), states)
    torch.testing.assert_close(model._incoming(batch("EXTEND", states)), served.reference.project(states))


def test_embeddings_that_are_given_are_read(permuted: Served) -> None:
    tokens, positions = torch.tensor([4, 9]), torch.arange(2)
    states = permuted.in_capture_order(permuted.features(2))
    looked_up = permuted.model(tokens, positions, batch("DRAFT_EXTEND_V2", states))
    put_back(permuted.model)
    embeds = permuted.target.embed.weight.data[tokens]
    given = permuted.model(torch.zeros(2, dtype=torch.int64), positions, batch("DRAFT_EXTEND_V2", states), embeds)
    assert torch.equal(given.next_token_logits, looked_up.next_token_logits)


# ---- the trainers' own models --------------------------------------------------------------------------------------


def trained_target(theirs: Trained, width: int) -> Target:
    """Make a target that lends the embedding with which the trainer trained."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    folder = write_target(theirs.folder.with_name("target"), hidden=width, heads=2, vocab=trainers.VOCAB)
    embed = VocabParallelEmbedding(*theirs.embed.shape)
    embed.weight.weight_loader(embed.weight, theirs.embed)
    return Target(ModelConfig(str(folder)), embed, ParallelLMHead(trainers.VOCAB, width))


@pytest.mark.parametrize(
    ("train", "row"),
    [
        *(
            pytest.param(trainers.train_speculators, row, id=f"speculators-{trainers.identify(row)}")
            for row in trainers.speculators_design()
        ),
        *(
            pytest.param(trainers.train_specforge, row, id=f"specforge-{trainers.identify(row)}")
            for row in trainers.specforge_design()
        ),
    ],
)
def test_served_as_the_trainers_own_model_computes(
    train: Callable[..., Trained], row: Mapping[str, Any], runtime: None, kernels: str, tmp_path: Path
) -> None:
    theirs = train(row, tmp_path / "draft")
    width = theirs.features.shape[1] // row.get("sources", 3)
    override: dict[str, Any] | None = None
    if train is trainers.train_specforge:
        override = {"producer": "specforge", "sources": ["embed", "layer3", "layer5"]}
    served = serve(theirs.folder, trained_target(theirs, width), override)

    # One request: its text in one feature pass, then the chain of its newest row. The trainer counts positions from 1
    # where its first row is.
    last = trainers.LENGTH - 1
    states = served.in_capture_order(theirs.features)
    positions = torch.arange(1, trainers.LENGTH + 1)
    out = served.model(theirs.inputs, positions, batch("DRAFT_EXTEND_V2", states))
    torch.testing.assert_close(out.next_token_logits, theirs.logits[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(out.hidden_states, theirs.states[0], rtol=0, atol=1e-5)
    recurring = out.hidden_states[last:]
    for k in range(1, trainers.STEPS):
        token = torch.tensor([trainers.FORCED_EOL])
        out = served.model(token, positions[last:] + k, batch("DECODE", recurring))
        torch.testing.assert_close(out.next_token_logits[0], theirs.logits[k][last], rtol=0, atol=1e-5)
        torch.testing.assert_close(out.hidden_states[0], theirs.states[k][last], rtol=0, atol=1e-5)
        recurring = out.hidden_states
