"""Capture on SGLang's own target classes; run by ``test_runtimes.py``, in a process of its own.

Every case is SGLang's class: its stack, its decoder layers, its layer boundaries, its norms and its logits processor,
shrunk to a few layers with random weights. What stands in is what a layer adds to the stream: attention and MLP are
replaced by the same small functions in SGLang's class and in transformers', because it is the path of the residual
stream that is under test and not the kernels (which do not all run on a CPU).

Oracles: transformers' ``hidden_states`` with the same weights, and SGLang's ``residual_batch.snapshot`` at the entry
of each layer, which shares no code with the capture.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import copy
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import workers
from checkpoints import write_draft, write_target
from torch import nn

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import capture, proof
from sglang_eagle3_ext.spec import (
    STOCK_READINGS,
    AssemblyPlan,
    Boundary,
    DraftSpec,
    TargetFacts,
    parse_source,
)

pytestmark = pytest.mark.host

M, VOCAB, LAYERS, ROWS = 32, 64, 6, 7
"""Width, vocabulary and layers of the targets, and the length of the one request in a pass."""

EVERY: tuple[Boundary, ...] = (0, 1, 3, LAYERS - 1, LAYERS, "final_norm")
ENDS: tuple[Boundary, ...] = (0, LAYERS, "final_norm")
"""What is compared on a class that serves everything, and all that a class with hyper-connections serves."""

CLOSE = 1e-5
"""Two float32 computations of one state lie nearer than this, in units of its largest value."""


# ---- SGLang's runtime ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Bring one process of SGLang up as a scheduler is brought up: plugins, settings, groups, operators."""
    with workers.runtime(write_target(tmp_path_factory.mktemp("served"))):
        yield


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DraftSpec:
    """Read the draft from which those of the cases differ in their sources."""
    return formats.read_draft(str(write_draft(tmp_path_factory.mktemp("draft"))))


def facts(architecture: str, layers: int = LAYERS) -> TargetFacts:
    return TargetFacts("target", architecture, layers, M, VOCAB, STOCK_READINGS[architecture])


def plan_for(
    draft: DraftSpec, wanted: Sequence[Boundary], architecture: str = "LlamaForCausalLM", layers: int = LAYERS
) -> AssemblyPlan:
    """Plan to serve a draft that was trained on these states, in this order."""
    sources = tuple(parse_source("final_norm" if b == "final_norm" else f"boundary{b}") for b in wanted)
    declared = dataclasses.replace(
        draft, sources=sources, order="as_listed", origins={**draft.origins, "sources": "override"}
    )
    return assembly.plan(declared, facts(architecture, layers))


# ---- what stands in for a layer's computations --------------------------------------------------------------------


class StandIn:
    """Mix each row with those before it, as a fixed function of a seed: what attention and MLP are replaced by."""

    def __init__(self, seed: int, result: str = "tensor") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(M, M, generator=generator) / M**0.5
        self.result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs["hidden_states"]] if "hidden_states" in kwargs else args
        x = next(a for a in given if isinstance(a, torch.Tensor) and a.is_floating_point() and a.shape[-1] == M)
        rows = torch.arange(1, x.shape[-2] + 1)[:, None]
        y = torch.tanh(x.cumsum(-2) / rows @ self.weight)
        return {"tensor": y, "pair": (y, None), "triple": (y, None, None)}[self.result]


ATTENTIONS = ("self_attn", "attention", "linear_attn", "self_attention")
FFNS = ("mlp", "block_sparse_moe", "feed_forward", "mlps", "moe", "_forward_mobius_mlp")


def put_stand_ins(layers: Any, attention: str = "tensor", ffn: str = "tensor") -> None:
    """Replace what the layers of a stack compute, equally in SGLang's class and in transformers'."""
    for i, layer in enumerate(layers):
        for kind, (names, result) in enumerate(((ATTENTIONS, attention), (FFNS, ffn))):
            for name in names:
                part = getattr(layer, name, None)
                pieces = [] if part is None else list(part) if isinstance(part, nn.ModuleList) else [part]
                for j, piece in enumerate(pieces):
                    seed = 100 * i + 20 * kind + 10 * (name == "mlps") + j
                    stand_in = StandIn(seed, "tensor" if name == "linear_attn" else result)
                    if isinstance(piece, nn.Module):
                        piece.forward = stand_in  # type: ignore[method-assign]
                    else:  # a method that computes, as in the layers of Qwen3.5 and Mobius
                        layer.__dict__[name] = stand_in


class Blank(nn.Module):
    """Stand in for a vision tower, its configuration, or an attention whose parameters only a GPU can hold."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes: list[int] = []
        self.dtype = torch.float32

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Blank:
        """Stand in for the reading of a tower's configuration."""
        return cls()


# ---- targets ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": M,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS: dict[str, Any] = {"head_dim": 8}
EXPERTS = HEADS | {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
LOCAL_EXPERTS = HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid"}
ROUTED_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
DEEPSEEK = LATENT | ROUTED_EXPERTS | {"rope_parameters": YARN}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
HYBRID = {"full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
HYBRID["layer_types"] = HYBRID["layer_types"][:LAYERS]  # type: ignore[index]
GEMMA4 = HEADS | {"global_head_dim": 8, "hidden_size_per_layer_input": 0}
SPECIAL_TOKENS = {f"{kind}_token_id": VOCAB - 1 for kind in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")} | {
    "eoa_token_index": VOCAB - 1
}
LLAMA4 = LOCAL_EXPERTS | {"intermediate_size_mlp": 48}
LONGCAT = LATENT | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2}
MHC = {"hc_mult": 2, "layer_types": ["full_attention"] * LAYERS}
"""Two streams of hyper-connections, and no gated delta networks."""
MINIMAX3 = LOCAL_EXPERTS | {"use_gemma_norm": True}


def config_class(name: str) -> Any:
    """Find a configuration class: one of transformers', or, with its module, one of SGLang's own."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"sglang.srt.configs.{module}") if module else transformers, attribute)


def text(name: str, *parts: Mapping[str, Any], **more: Any) -> Callable[[], Any]:
    """Make the configuration of a text model, afresh each time: SGLang's classes write into theirs."""

    def make() -> Any:
        fields: dict[str, Any] = dict(SIZES)
        for part in parts:
            fields |= part
        return config_class(name)(**copy.deepcopy(fields | more))

    return make


def wrapped(name: str, inner: Callable[[], Any], **more: Any) -> Callable[[], Any]:
    """Make a multimodal configuration around a text configuration, with the fields that SGLang puts on top."""

    def make() -> Any:
        fields = inner().to_dict()
        outer = config_class(name)(text_config=fields, tie_word_embeddings=False, **copy.deepcopy(more))
        for key, value in fields.items():
            if not hasattr(outer, key):
                setattr(outer, key, value)
        outer.encoder_only = outer.language_only = False
        return outer

    return make


class Case(NamedTuple):
    """One target class.

    Attributes:
        architecture: its name in SGLang, and in the table of stock's readings.
        module: SGLang's module.
        config: makes its configuration.
        hf: transformers' class of the text model; ``None`` where it has none that computes the same.
        hf_results: what transformers' attention and MLP return.
        hf_config: makes the text configuration for it, where it is not SGLang's.
        blank: classes of the module (dotted: of another one) that are left out.
        serves: what can be captured and is compared.
    """

    architecture: str
    module: str
    config: Callable[[], Any]
    hf: str | None = None
    hf_results: tuple[str, str] = ("pair", "tensor")
    hf_config: Callable[[], Any] | None = None
    blank: tuple[str, ...] = ()
    serves: tuple[Boundary, ...] = EVERY


def llama(architecture: str, module: str = "llama") -> Case:
    return Case(architecture, module, text("LlamaConfig", HEADS), "LlamaModel")


def deepseek(
    architecture: str, module: str, name: str, hf_results: tuple[str, str] = ("pair", "tensor"), **more: Any
) -> Case:
    return Case(architecture, module, text(f"{name}Config", DEEPSEEK, **more), f"{name}Model", hf_results)


def bailing(architecture: str, module: str = "bailing_moe") -> Case:
    return Case(architecture, module, text("bailing_moe_v2.BailingMoeV2Config", EXPERTS))


def exaone(architecture: str) -> Case:
    sparse = [False, *[True] * (LAYERS - 1)]
    return Case(architecture, "exaone_moe", text("ExaoneMoeConfig", EXPERTS, is_moe_layer=sparse), "ExaoneMoeModel")


def qwen3_5(architecture: str, module: str, name: str, wrapper: str | None = None) -> Case:
    """Make a case of the hybrid Qwen3.5 family, whose configurations SGLang has of its own."""
    config = text(f"qwen3_5.{name}TextConfig", EXPERTS, MROPE, HYBRID)
    return Case(
        architecture,
        module,
        config if wrapper is None else wrapped(f"{wrapper}.{wrapper_class(wrapper, name)}", config),
        f"{name}TextModel",
        hf_config=text(f"{name}TextConfig", EXPERTS, MROPE, HYBRID),
        blank=() if wrapper is None else ("qwen3_vl.Qwen3VLMoeVisionModel",),
    )


def wrapper_class(module: str, name: str) -> str:
    return {"interns2preview": "InternS2PreviewConfig"}.get(module, f"{name}Config")


QWEN3_VL = {"blank": ("qwen3_vl.Qwen3VLMoeVisionModel",)}
QWEN3_VL_TEXT = text("Qwen3VLTextConfig", HEADS, MROPE)
QWEN3_VL_MOE_TEXT = text("Qwen3VLMoeTextConfig", EXPERTS, MROPE)

CASES = [
    llama("LlamaForCausalLM"),
    Case(
        "Phi3ForCausalLM",
        "llama",
        text("LlamaConfig", HEADS),
        "Phi3Model",
        hf_config=text("Phi3Config", HEADS, rms_norm_eps=1e-6),
    ),
    llama("InternLM3ForCausalLM"),
    llama("IQuestCoderForCausalLM"),
    llama("TeleFLMForCausalLM", "teleflm"),
    Case("MistralForCausalLM", "mistral", text("MistralConfig", HEADS), "MistralModel"),
    Case("Ministral3ForCausalLM", "ministral3", text("Ministral3Config", HEADS), "Ministral3Model"),
    Case("Qwen2ForCausalLM", "qwen2", text("Qwen2Config"), "Qwen2Model"),
    Case("Qwen3ForCausalLM", "qwen3", text("Qwen3Config", HEADS), "Qwen3Model"),
    Case("Qwen2MoeForCausalLM", "qwen2_moe", text("Qwen2MoeConfig", EXPERTS), "Qwen2MoeModel"),
    Case("Qwen3MoeForCausalLM", "qwen3_moe", text("Qwen3MoeConfig", EXPERTS), "Qwen3MoeModel"),
    Case("MellumForCausalLM", "mellum", text("MellumConfig", EXPERTS), "MellumModel"),
    Case(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        text("qwen3_next.Qwen3NextConfig", EXPERTS, HYBRID),
        "Qwen3NextModel",
        hf_config=text("Qwen3NextConfig", EXPERTS, HYBRID),
        blank=("Qwen3GatedDeltaNet",),
    ),
    qwen3_5("Qwen3_5ForCausalLM", "qwen3_5_text", "Qwen3_5"),
    qwen3_5("Qwen3_5MoeForCausalLM", "qwen3_5_text", "Qwen3_5Moe"),
    qwen3_5("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5", "qwen3_5"),
    qwen3_5("Qwen3_5MoeForConditionalGeneration", "qwen3_5", "Qwen3_5Moe", "qwen3_5"),
    qwen3_5("InternS2PreviewForConditionalGeneration", "interns2preview", "Qwen3_5Moe", "interns2preview"),
    Case(
        "InternS2MobiusForConditionalGeneration",
        "interns2_mobius",
        wrapped(
            "interns2_mobius.InternS2MobiusConfig",
            text("interns2_mobius.InternS2MobiusTextConfig", EXPERTS, MROPE, HYBRID, num_blocks=2, dtype="float32"),
        ),
        blank=("qwen3_vl.Qwen3VLMoeVisionModel",),
    ),
    Case(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        wrapped("Qwen2_5_VLConfig", text("Qwen2_5_VLTextConfig", MROPE)),
        "Qwen2_5_VLTextModel",
        blank=("Qwen2_5_VisionTransformer",),
    ),
    Case(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        wrapped("Qwen3VLConfig", QWEN3_VL_TEXT),
        "Qwen3VLTextModel",
        **QWEN3_VL,
    ),
    Case(
        "Cosmos3ForConditionalGeneration",
        "cosmos3",
        wrapped("Qwen3VLConfig", QWEN3_VL_TEXT),
        "Qwen3VLTextModel",
        **QWEN3_VL,
    ),
    Case(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        wrapped("Qwen3VLMoeConfig", QWEN3_VL_MOE_TEXT),
        "Qwen3VLMoeTextModel",
        **QWEN3_VL,
    ),
    Case(
        "Qwen4ExpForConditionalGeneration",
        "qwen4_exp",
        wrapped("qwen4_exp.Qwen4ExpConfig", text("qwen4_exp.Qwen4ExpTextConfig", EXPERTS, MROPE, HYBRID)),
        serves=(),
        **QWEN3_VL,
    ),
    deepseek("DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV2"),
    deepseek("DeepseekV3ForCausalLM", "deepseek_v2", "DeepseekV3"),
    deepseek("DeepseekV32ForCausalLM", "deepseek_v2", "DeepseekV32"),
    deepseek("MistralLarge3ForCausalLM", "mistral_large_3", "DeepseekV3"),
    deepseek("GlmMoeDsaForCausalLM", "glm4_moe", "GlmMoeDsa", ("triple", "tensor")),
    deepseek("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "Glm4MoeLite"),
    Case(
        "KimiK25ForConditionalGeneration",
        "kimi_k25",
        wrapped("kimi_k25.KimiK25Config", text("DeepseekV3Config", DEEPSEEK)),
        "DeepseekV3Model",
        blank=("MoonViT3dPretrainedModel", "K2VLMultiModalProjector"),
    ),
    Case("Glm4MoeForCausalLM", "glm4_moe", text("Glm4MoeConfig", HEADS, ROUTED_EXPERTS), "Glm4MoeModel"),
    Case(
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        wrapped(
            "glm5_next.Glm5NextConfig",
            text("glm5_next.Glm5NextTextConfig", DEEPSEEK),
            vision_config={"swiglu_limit": None},
        ),
        blank=("Glm5NextVisionModel", "Glm5NextLinearAttention"),
    ),
    Case("GptOssForCausalLM", "gpt_oss", text("GptOssConfig", LOCAL_EXPERTS), "GptOssModel", ("pair", "pair")),
    Case("MiniMaxM2ForCausalLM", "minimax_m2", text("MiniMaxM2Config", LOCAL_EXPERTS), "MiniMaxM2Model"),
    Case("MiniMaxM3SparseForCausalLM", "minimax_m3", text("MiniMaxM3VLTextConfig", MINIMAX3), "MiniMaxM3VLTextModel"),
    Case(
        "MiniMaxM3SparseForConditionalGeneration",
        "minimax_m3_vl",
        wrapped("MiniMaxM3VLConfig", text("MiniMaxM3VLTextConfig", MINIMAX3)),
        "MiniMaxM3VLTextModel",
        blank=("MiniMaxVLVisionModel", "CLIPVisionConfig"),
    ),
    bailing("BailingMoEForCausalLM"),
    bailing("BailingMoeForCausalLM"),
    bailing("BailingMoeV2ForCausalLM"),
    bailing("SarvamMoEForCausalLM", "sarvam_moe"),
    exaone("ExaoneMoEForCausalLM"),
    exaone("ExaoneMoeForCausalLM"),
    Case("ApertusForCausalLM", "apertus", text("ApertusConfig"), "ApertusModel"),
    Case(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        text(
            "longcat_flash.LongcatFlashConfig",
            LONGCAT,
            rope_scaling=YARN,
            use_ngram_embedding=False,
            disable_quant_module=[],
        ),
        "LongcatFlashModel",
        # Its layers hold two attentions each, which transformers counts.
        hf_config=text("LongcatFlashConfig", LONGCAT, num_layers=LAYERS, num_hidden_layers=2 * LAYERS),
    ),
    Case("Gemma3ForCausalLM", "gemma3_causal", text("Gemma3TextConfig", HEADS), "Gemma3TextModel"),
    Case(
        "Gemma3ForConditionalGeneration",
        "gemma3_mm",
        wrapped("Gemma3Config", text("Gemma3TextConfig", HEADS)),
        "Gemma3TextModel",
        blank=("SiglipVisionModel", "Gemma3MultiModalProjector"),
    ),
    Case("Gemma4ForCausalLM", "gemma4_causal", text("Gemma4TextConfig", GEMMA4), "Gemma4TextModel"),
    Case(
        "Gemma4ForConditionalGeneration",
        "gemma4_mm",
        wrapped("Gemma4Config", text("Gemma4TextConfig", GEMMA4)),
        "Gemma4TextModel",
        blank=("Gemma4VisionEncoder", "Gemma4MultimodalEmbedder", "Gemma4AudioEncoder"),
    ),
    Case(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        wrapped("Gemma4Config", text("Gemma4TextConfig", GEMMA4), **SPECIAL_TOKENS),
        "Gemma4UnifiedTextModel",
        hf_config=text("Gemma4UnifiedTextConfig", GEMMA4),
        blank=("Gemma4UnifiedVisionEmbedder", "Gemma4UnifiedMultimodalEmbedder"),
    ),
    Case("Llama4ForCausalLM", "llama4", text("Llama4TextConfig", LLAMA4), "Llama4TextModel", ("pair", "pair")),
    Case(
        "Llama4ForConditionalGeneration",
        "mllama4",
        wrapped("Llama4Config", text("Llama4TextConfig", LLAMA4)),
        "Llama4TextModel",
        ("pair", "pair"),
        blank=("Llama4VisionModel", "Llama4MultiModalProjector"),
    ),
]
BY_NAME = {case.architecture: case for case in CASES}

SAME_LAYERS = {
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "TeleFLMForCausalLM": "LlamaForCausalLM",
    "MistralLarge3ForCausalLM": "DeepseekV3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}
"""Classes whose layers are built of the same parts as those of another class."""

OTHER_ROTATION = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Cosmos3ForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
"""The same, but for positions along several axes."""
BROKEN = "InternS1ProForConditionalGeneration"
"""A class whose layers SGLang 0.5.23 cannot build: they do not take an argument that the stack gives them."""


def carries_residual(case: Case) -> bool:
    """Say whether the class stands outside SGLang's layer boundaries, where there is nothing to take a snapshot of."""
    return case.module in {"gemma3_causal", "gemma3_mm"}


class Target(NamedTuple):
    """A target as SGLang has it after loading, and its stack of layers."""

    case: Case
    config: Any
    model: Any
    stack: Any


def build(case: Case, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Target:
    """Build SGLang's class with random weights and stand-ins, with some fields of its configuration changed."""
    config = case.config()
    for field, value in changes.items():
        for place in {id(c): c for c in (config, getattr(config, "text_config", config))}.values():
            setattr(place, field, value)
    module = importlib.import_module(f"sglang.srt.models.{case.module}")
    for name in case.blank:
        owner, _, attribute = name.rpartition(".")
        holder = importlib.import_module(f"sglang.srt.models.{owner}") if owner else module
        monkeypatch.setattr(holder, attribute, Blank)
    model = getattr(module, case.architecture)(config).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    found = capture.find_language_model(model)
    assert found is not None
    put_stand_ins(found[1].layers)
    return Target(case, config, model, found[1])


# ---- passes -------------------------------------------------------------------------------------------------------

TOKENS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))


def batch(rows: int = ROWS, mode: str = "EXTEND") -> Any:
    """Make a batch with one prompt, or with none."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    positions = torch.arange(rows)
    made = ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=min(rows, 1),
        input_ids=TOKENS[:rows],
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([rows]),
        out_cache_loc=positions,
        seq_lens_sum=rows,
        positions=positions,
        extend_seq_lens=torch.tensor([rows]),
        extend_seq_lens_cpu=[rows],
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    made.mrope_positions = positions.expand(3, -1)
    return made


def run(target: Target, rows: int = ROWS, mode: str = "EXTEND") -> torch.Tensor:
    """Run one pass; return what the logits processor keeps for the draft: [rows, K*M]."""
    made = batch(rows, mode)
    with torch.no_grad():
        kept: torch.Tensor = target.model.forward(made.input_ids, made.positions.clone(), made).hidden_states
    return kept


def by_boundary(kept: torch.Tensor, wanted: Sequence[Boundary]) -> dict[Boundary, torch.Tensor]:
    """Cut what a pass kept into its states."""
    return dict(zip(wanted, kept.split(M, dim=-1), strict=True))


def watch_stream(target: Target) -> dict[Boundary, torch.Tensor]:
    """Note the residual stream at the entry of each layer and behind the last, by SGLang's own snapshot."""
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    seen: dict[Boundary, torch.Tensor] = {}

    def entering(boundary: int) -> Callable[..., None]:
        def note(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
            forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
            seen[boundary] = residual_batch.snapshot(handle, forward_batch)

        return note

    def leaving(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        handle = output[0] if isinstance(output, tuple) else output
        seen[len(target.stack.layers)] = residual_batch.snapshot(handle, forward_batch)

    for i, layer in enumerate(target.stack.layers):
        layer.register_forward_pre_hook(entering(i), with_kwargs=True)
    target.stack.layers[-1].register_forward_hook(leaving, with_kwargs=True)
    return seen


def hf_stream(target: Target, **inputs: Any) -> dict[Boundary, torch.Tensor]:
    """Run transformers' text model with the same weights and stand-ins; return its stream by boundary."""
    assert target.case.hf is not None
    fresh = (target.case.hf_config or target.case.config)()
    model = getattr(transformers, target.case.hf)(getattr(fresh, "text_config", fresh)).float().eval()
    put_stand_ins(model.layers, *target.case.hf_results)
    mine = dict((*target.stack.named_parameters(), *target.stack.named_buffers()))
    seen: dict[Boundary, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            here = re.sub(r"(attn|ffn)_hc\.", r"hc_\1_", name)
            if here in mine and mine[here].shape == value.shape:
                value.copy_(mine[here])
            elif isinstance(value, nn.Parameter) and name != "embed_tokens.weight":
                # Only what a stand-in replaced may differ.
                assert set(name.split(".")) & {*ATTENTIONS, *FFNS}, name
        model.embed_tokens.weight.copy_(mine["embed_tokens.weight"][:VOCAB])
        model.norm.register_forward_pre_hook(lambda _norm, args: seen.update({LAYERS: args[0][0].clone()}))
        given = inputs or {"input_ids": TOKENS[None, :ROWS]}
        states = model(**given, output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == LAYERS + 1
    # Streams of hyper-connections, [1, T, S, M], start as copies of the embedding.
    stream = {j: state[0] if state.dim() == 3 else state[0, :, 0] for j, state in enumerate(states[:LAYERS])}
    return {**seen, **stream, "final_norm": states[LAYERS][0]}


def distance(some: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference in units of the largest value."""
    assert some.shape == other.shape
    return float((some - other).abs().max() / other.abs().max())


# ---- what each class hands out ------------------------------------------------------------------------------------

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.architecture)
serving_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.serves], ids=lambda case: case.architecture
)


def test_every_class_with_a_setter_of_stocks_is_a_case() -> None:
    assert {*BY_NAME, BROKEN} == set(STOCK_READINGS)
    assert len(BY_NAME) == len(CASES)


def test_interns1_pro_cannot_be_built_by_sglang(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, dict[str, Any]]
) -> None:
    case = Case(BROKEN, "interns1pro", wrapped("Qwen3VLMoeConfig", QWEN3_VL_MOE_TEXT), **QWEN3_VL)
    with pytest.raises(TypeError, match="unexpected keyword argument 'start_layer'"):
        build(case, monkeypatch)
    results[BROKEN] = note(()) | {"why": "SGLang cannot build it"}


@pytest.mark.parametrize(("name", "other"), [*SAME_LAYERS.items(), *OTHER_ROTATION.items()])
def test_layers_of_two_classes_are_made_of_the_same_parts(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(architecture: str) -> list[dict[str, object]]:
        layers = build(BY_NAME[architecture], monkeypatch).stack.layers
        return [
            {path: type(part) for path, part in layer.named_modules()}
            | {f"{path}, its shape": tuple(value.shape) for path, value in layer.named_parameters()}
            for layer in layers
        ]

    for mine, theirs in zip(parts(name), parts(other), strict=True):
        differing = {path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path)}
        assert differing == (set() if name in SAME_LAYERS else {"self_attn.rotary_emb"})


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """Collect what was found out about each class; kept in the file that ``CAPTURE_RESULTS`` names."""
    found: dict[str, dict[str, Any]] = {}
    yield found
    if file := os.environ.get("CAPTURE_RESULTS"):
        Path(file).write_text(json.dumps({"classes": found}, indent=1) + "\n")


def note(serves: Sequence[Boundary], snapshot: bool = False, hf: str | None = None, worst: float | None = None) -> Any:
    """Put down what was found out about a class."""
    found = {"serves": list(serves), "layers": LAYERS, "snapshot": snapshot, "transformers": hf}
    measured = snapshot or hf is not None
    return found | {"measured": measured, "max_difference": None if worst is None else float(f"{worst:.1e}")}


@serving_cases
def test_captures_the_residual_stream(
    case: Case, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch, results: dict[str, dict[str, Any]]
) -> None:
    target = build(case, monkeypatch)
    seen = {} if carries_residual(case) else watch_stream(target)
    capture.install(target.model, plan_for(draft, case.serves))
    captured = by_boundary(run(target), case.serves)
    for boundary in captured.keys() & seen.keys():
        assert torch.equal(captured[boundary], seen[boundary]), boundary
    worst = None
    if case.hf is not None:
        expected = hf_stream(target)
        worst = max(distance(captured[b], expected[b]) for b in case.serves)
        assert worst <= CLOSE
    # No two states are alike, so a state from another boundary would be noticed; and each was compared with something.
    assert min(distance(captured[a], captured[b]) for a, b in pairwise(case.serves)) > 1e-2
    assert case.hf is not None or set(case.serves) - {"final_norm"} <= set(seen)
    assert capture.servable(target.stack) == (*range(LAYERS + 1), "final_norm")  # "every b" in docs/targets.md
    results[case.architecture] = note(case.serves, snapshot=bool(seen), hf=case.hf, worst=worst)


@serving_cases
def test_the_proof_at_start_can_look_at_every_class(
    case: Case, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(case, monkeypatch)
    plan = plan_for(draft, case.serves)
    capture.install(target.model, plan)
    with proof._watching(target.model) as seen:
        handed = run(target)
    assert set(case.serves) <= set(seen)
    assert proof.compare(plan, [proof.Pass(handed, seen)], torch.float32) == []
    swapped = torch.cat([handed[:, M : 2 * M], handed[:, :M], handed[:, 2 * M :]], dim=-1)
    assert len(proof.compare(plan, [proof.Pass(swapped, seen)], torch.float32)) == 2


@serving_cases
def test_a_batch_without_rows_hands_out_states_without_rows(
    case: Case, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(case, monkeypatch)
    capture.install(target.model, plan_for(draft, case.serves))
    made = batch(0, "IDLE")
    with torch.no_grad():
        hidden_states, states = target.stack.forward(
            input_ids=made.input_ids, positions=made.positions, forward_batch=made
        )
    assert [s.shape for s in (hidden_states, *states)] == [(0, M)] * (1 + len(case.serves))


@serving_cases
def test_stock_captures_what_the_table_of_its_readings_says(
    case: Case, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = STOCK_READINGS[case.architecture]
    target = build(case, monkeypatch)
    wanted: list[Boundary] = [0, 3, *([LAYERS] if reading.captures_last else [])]
    ids = [b - 1 for b in wanted if b != "final_norm"]
    if reading.captures_residual:
        found = plan_for(draft, wanted, case.architecture).stock_ids
        assert found is not None
        ids = list(found)
    seen = hf_stream(target) if carries_residual(case) else watch_stream(target)
    target.model.set_eagle3_layers_to_capture(ids)
    for boundary, state in by_boundary(run(target), wanted).items():
        right = reading.captures_residual or boundary == 0
        assert (distance(state, seen[boundary]) <= CLOSE) is right, boundary
    if not reading.captures_last:
        lost = [2, LAYERS - 1] if reading.ids == "output" else [3, LAYERS]
        assert plan_for(draft, (3, LAYERS), case.architecture).stock_ids is None
        try:
            target.model.set_eagle3_layers_to_capture(lost)
            width = run(target).shape[-1]
        except (IndexError, RuntimeError):
            width = 0
        assert width < 2 * M


def test_every_class_lends_its_embedding(draft: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang's class has a method for it SGLang's workers call that; one class has none."""
    modules = {case.architecture: importlib.import_module(f"sglang.srt.models.{case.module}") for case in CASES}
    lacking = [n for n, module in modules.items() if not hasattr(getattr(module, n), "get_embed_and_head")]
    assert lacking == ["Qwen2MoeForCausalLM"]
    case = BY_NAME[lacking[0]]
    target = build(case, monkeypatch)
    served: Any = SimpleNamespace(plan=plan_for(draft, case.serves))
    embed, head = capture.embed_and_head(pytest.fail, target.model, draft_model=served)
    assert embed is target.stack.embed_tokens.weight
    assert head is target.model.lm_head.weight


# ---- multimodal wrappers ------------------------------------------------------------------------------------------


def merge_images(monkeypatch: pytest.MonkeyPatch, merged: torch.Tensor, **more: Any) -> None:
    """Have SGLang's multimodal routine merge text and images into these embeddings."""
    from sglang.srt.managers import mm_utils

    def prepare(_ids: Any, _batch: Any, _model: Any, arguments: dict[str, Any], *_rest: Any, **_more: Any) -> Any:
        arguments.update(more)
        return merged.clone()

    monkeypatch.setattr(mm_utils, "prepare_mm_inputs", prepare)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.serves and case.architecture.endswith("ForConditionalGeneration")],
    ids=lambda case: case.architecture,
)
def test_boundary_0_has_the_images_merged_in(case: Case, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(case, monkeypatch)
    merged = torch.randn(ROWS, M, generator=torch.Generator().manual_seed(3))
    merge_images(monkeypatch, merged)
    capture.install(target.model, plan_for(draft, case.serves))
    captured = by_boundary(run(target), case.serves)
    assert torch.equal(captured[0], merged)
    if case.hf is not None:
        expected = hf_stream(target, inputs_embeds=merged[None])
        assert max(distance(captured[b], expected[b]) for b in case.serves) <= CLOSE


@pytest.mark.parametrize("on_policy", [False, True], ids=["", "rl_on_policy_target"])
@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"])
def test_deepstack_is_in_the_stream_that_enters_a_layer(
    architecture: str, on_policy: bool, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Visual features that are added behind layers 0 to 2 are in boundaries 1 to 3, as in what the layer reads.

    In the order of transformers (``rl_on_policy_target``) they are not, as they are not in its ``hidden_states``.
    """
    target = build(BY_NAME[architecture], monkeypatch)
    target.stack.use_hf_deepstack_order = on_policy
    generator = torch.Generator().manual_seed(3)
    merged = torch.randn(ROWS, M, generator=generator)
    images = torch.tensor([2, 3])
    features = torch.randn(3, len(images), M, generator=generator)
    deepstack = torch.zeros(ROWS, 3 * M)
    deepstack[images] = torch.cat(list(features), dim=-1)
    merge_images(monkeypatch, merged, input_deepstack_embeds=deepstack)
    entering: list[torch.Tensor] = []
    layer_class = importlib.import_module(f"transformers.models.{target.case.module}.modeling_{target.case.module}")
    forward = layer_class.__dict__[f"{architecture.removesuffix('ForConditionalGeneration')}TextDecoderLayer"].forward

    def note(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        entering.append(hidden_states[0].clone())
        return forward(layer, hidden_states, *args, **kwargs)

    wanted = (0, 1, 2, 3, 4)
    capture.install(target.model, plan_for(draft, wanted))
    captured = by_boundary(run(target), wanted)
    monkeypatch.setattr(
        layer_class.__dict__[f"{architecture.removesuffix('ForConditionalGeneration')}TextDecoderLayer"],
        "forward",
        note,
    )
    mask = torch.zeros(1, ROWS, dtype=torch.bool)
    mask[0, images] = True
    leaving = hf_stream(
        target, inputs_embeds=merged[None], visual_pos_masks=mask, deepstack_visual_embeds=list(features)
    )
    expected = [leaving[b] if on_policy else entering[b] for b in wanted]
    assert max(map(distance, [captured[b] for b in wanted], expected)) <= CLOSE
    without = hf_stream(target, inputs_embeds=merged[None])
    assert (distance(captured[1], without[1]) > 1e-2) is not on_policy
    assert distance(captured[2], without[2]) > 1e-2


# ---- Kimi, the target of the story --------------------------------------------------------------------------------


def test_kimi_hands_out_what_the_draft_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, layers = BY_NAME["KimiK25ForConditionalGeneration"], 34
    ext = {"sources": ["embed", "layer3", "layer31"]}
    spec = formats.read_draft(str(write_draft(tmp_path, config_changes={"eagle3_ext": ext})))
    plan = assembly.plan(spec, facts(case.architecture, layers))
    assert plan.boundaries == plan.capture == (0, 4, 32)
    target = build(case, monkeypatch, num_hidden_layers=layers)
    seen = watch_stream(target)
    capture.install(target.model, plan)
    for boundary, state in by_boundary(run(target), (0, 4, 32)).items():
        assert torch.equal(state, seen[boundary])

    stock = build(case, monkeypatch, num_hidden_layers=layers)
    stock.model.set_eagle3_layers_to_capture([-1, 3, 31])
    with pytest.raises(RuntimeError, match="captured 2 of 3"):
        run(stock)
    stock.model.set_eagle3_layers_to_capture([0, 3, 31])
    for boundary, state in by_boundary(run(stock), (0, 3, 31)).items():
        assert torch.equal(state, seen[boundary])


# ---- any order, any number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(3,), (LAYERS, 0, 4), ("final_norm", 2), (7, 3, 1, 0, 8, 2, 6, "final_norm")])
def test_hands_out_any_number_in_capture_order(
    wanted: tuple[Boundary, ...], draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 8 if 8 in wanted else LAYERS
    target = build(BY_NAME["LlamaForCausalLM"], monkeypatch, num_hidden_layers=layers)
    seen = watch_stream(target)
    plan = plan_for(draft, wanted, layers=layers)
    capture.install(target.model, plan)
    captured = by_boundary(run(target), plan.capture)
    assert [plan.capture[i] for i in map(plan.block_of.index, range(len(wanted)))] == list(wanted)
    for boundary, state in captured.items():
        assert boundary == "final_norm" or torch.equal(state, seen[boundary])


# ---- how the states leave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForConditionalGeneration"]
)
def test_states_are_outputs_of_the_stack(architecture: str, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's prefill graphs record ``stack.forward`` by its signature and put recorded outputs in its place."""
    target = build(BY_NAME[architecture], monkeypatch)
    names = list(inspect.signature(target.stack.forward).parameters)
    capture.install(target.model, plan_for(draft, EVERY))
    assert list(inspect.signature(target.stack.forward).parameters) == names
    expected = run(target)
    made = batch()
    with torch.no_grad():
        recorded = target.stack.forward(made.input_ids, made.positions.clone(), made)
    storages = {t.untyped_storage().data_ptr() for t in (recorded[0], *recorded[1])}
    assert len(storages) == len(EVERY)  # the state after the final norm is the stack's own output
    own, target.stack.forward = target.stack.forward, lambda *args, **kwargs: recorded
    replayed = run(target)
    target.stack.forward = own
    if architecture != "Gemma3ForConditionalGeneration":  # which moves positions by one before its stack runs
        assert torch.equal(replayed, expected)
    assert torch.equal(run(target), expected)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForCausalLM"])
def test_states_survive_norms_that_work_in_place(
    architecture: str, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels on GPUs add the contribution to the residual where it lies; what was captured must not change with it."""
    target = build(BY_NAME[architecture], monkeypatch)
    capture.install(target.model, plan_for(draft, EVERY))
    expected = run(target)

    def work_in_place(norm: Any) -> None:
        out_of_place = norm.forward

        def forward(x: torch.Tensor, residual: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            if residual is None:
                return out_of_place(x, None, *args, **kwargs)
            residual.add_(x)
            return out_of_place(residual, None), residual

        norm.forward = forward

    for module in target.stack.modules():
        if type(module).__name__ in {"RMSNorm", "Gemma3RMSNorm"}:
            work_in_place(module)
    assert torch.equal(run(target), expected)


def test_a_path_around_the_boundaries_is_an_error(draft: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["LlamaForCausalLM"], monkeypatch)
    capture.install(target.model, plan_for(draft, (0, 3)))
    del target.stack.layers[3].attn_boundary.prepare  # SGLang's own method shows again
    with pytest.raises(RuntimeError, match=r"got none for layer 2 output.*expected states of \(7, 32\)"):
        run(target)


def test_states_of_other_rows_are_an_error(draft: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where expert parallelism leaves each rank a slice of the batch."""

    def keep_some(self: capture.Point, value: torch.Tensor, *, owned: bool = False) -> None:
        self.states[self.boundary] = value[:-1] if self.boundary == 3 else value.clone()

    monkeypatch.setattr(capture.Point, "capture", keep_some)
    target = build(BY_NAME["LlamaForCausalLM"], monkeypatch)
    capture.install(target.model, plan_for(draft, (0, 3)))
    with pytest.raises(UnsupportedError, match=r"got \(6, 32\) for layer 2 output; expected states of \(7, 32\)"):
        run(target)


def test_a_class_without_a_setter_of_its_own_is_served(draft: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["LlamaForCausalLM"], monkeypatch)
    monkeypatch.delattr(type(target.model), "set_eagle3_layers_to_capture")
    seen = watch_stream(target)
    capture.install(target.model, plan_for(draft, EVERY))
    captured = by_boundary(run(target), EVERY)
    assert all(torch.equal(captured[b], seen[b]) for b in EVERY if b != "final_norm")


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_hyper_connections_serve_the_ends_alone(
    draft: DraftSpec, monkeypatch: pytest.MonkeyPatch, results: dict[str, dict[str, Any]]
) -> None:
    for kernel in ("PRE", "POST"):
        monkeypatch.setenv(f"SGLANG_OPT_USE_TILELANG_MHC_{kernel}", "0")
    whole = text("glm5_next.Glm5NextTextConfig", DEEPSEEK, MHC, mhc=True)
    case = BY_NAME["Glm5NextForConditionalGeneration"]._replace(
        config=wrapped("glm5_next.Glm5NextConfig", whole, vision_config={"swiglu_limit": None}),
        hf="Glm5NextTextModel",
        hf_results=("triple", "tensor"),
        hf_config=text("Glm5NextTextConfig", DEEPSEEK, MHC, qk_rope_head_dim=0),
    )
    target = build(case, monkeypatch)
    assert capture.servable(target.stack) == ENDS
    capture.install(target.model, plan_for(draft, ENDS))
    captured, expected = by_boundary(run(target), ENDS), hf_stream(target)
    worst = max(distance(captured[b], expected[b]) for b in ENDS)
    assert worst <= CLOSE
    assert distance(captured[0], captured[LAYERS]) > 1e-2
    with pytest.raises(UnsupportedError) as caught:
        capture.install(target.model, plan_for(draft, (0, 1, 3)))
    assert case.architecture in str(caught.value)
    assert "cannot serve layer 0 output, layer 2 output; expected sources among embedding" in str(caught.value)
    results[f"{case.architecture} with mhc"] = note(ENDS, hf=case.hf, worst=worst)


def test_qwen4_exp_serves_nothing(
    draft: DraftSpec, monkeypatch: pytest.MonkeyPatch, results: dict[str, dict[str, Any]]
) -> None:
    case = BY_NAME["Qwen4ExpForConditionalGeneration"]
    target = build(case, monkeypatch)
    with pytest.raises(UnsupportedError, match="Qwen4ExpForConditionalGeneration cannot serve .* expected .* none"):
        capture.install(target.model, plan_for(draft, (0, 2)))
    results[case.architecture] = note(()) | {"why": "refused"}


@pytest.mark.parametrize(
    ("model", "layers", "words"),
    [
        pytest.param(
            "LlamaForCausalLM", 8, "got 6 decoder layers of LlamaForCausalLM on this rank; expected all 8", id="layers"
        ),
        pytest.param(None, 6, "got a target of class Linear; expected one whose decoder layers", id="class"),
    ],
)
def test_refuses_other_targets(
    model: str | None, layers: int, words: str, draft: DraftSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = nn.Linear(2, 2) if model is None else build(BY_NAME[model], monkeypatch).model
    plan = plan_for(draft, (0, 2), layers=layers)
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        capture.configure_capture(lambda **_call: None, model=target, eagle_aux_hidden_state_layer_ids=plan)


class ForeignModel(nn.Module):
    """What SGLang's class for MindSpore looks like: a setter of EAGLE-3's, and no module of PyTorch's behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleNamespace(layers=[object()] * LAYERS)

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None = None) -> None:
        """Take stock's ids."""


def test_refuses_a_model_without_modules(draft: DraftSpec, results: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(UnsupportedError, match="got a target of class ForeignModel; expected one whose decoder"):
        capture.install(ForeignModel(), plan_for(draft, (0, 2)))
    results["MindSporeForCausalLM"] = note(()) | {"why": "refused: no PyTorch modules"}


def test_a_plan_of_stocks_stays_stocks() -> None:
    seen: list[Any] = []
    capture.configure_capture(lambda **call: seen.append(call), model=None, eagle_aux_hidden_state_layer_ids=[1, 2])
    assert seen == [{"model": None, "eagle_aux_hidden_state_layer_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("module", "stack", "layer", "gathers"),
    [
        ("qwen3_moe", "Qwen3MoeModel", "Qwen3MoeDecoderLayer", True),
        ("qwen3_vl_moe", "Qwen3MoeLLMModel", "Qwen3MoeDecoderLayer", False),
        ("bailing_moe", "BailingMoEModel", "BailingMoEBlock", False),
        ("llama", "LlamaModel", "LlamaDecoderLayer", False),
        ("deepseek_v2", "DeepseekV2Model", "DeepseekV2DecoderLayer", True),
    ],
)
def test_captures_as_sglangs_own_setter_does(module: str, stack: str, layer: str, gathers: bool) -> None:
    """Which of the two ways SGLang's own stack asks for; one layer class offers both to two stacks."""
    found = importlib.import_module(f"sglang.srt.models.{module}")
    made = [cls.__new__(cls) for cls in (getattr(found, layer), getattr(found, stack))]
    assert capture._gathers(*made) == gathers
