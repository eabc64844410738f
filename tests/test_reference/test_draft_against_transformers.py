"""The layers of ``ReferenceDraft`` against transformers' own decoder layers and rotary embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_drafts import latent_attention, make_spec, random_inputs, random_tensors

from sglang_eagle3_ext.reference import ReferenceDraft
from sglang_eagle3_ext.spec import Rope

transformers = pytest.importorskip("transformers", reason="transformers' decoder layers are the oracle")

LENGTH = 40

ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-with-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}


def run_transformers(family: str, spec: Any, tensors: dict[str, torch.Tensor], embeds, hidden) -> torch.Tensor:
    """Build the same layers out of transformers' modules and run one causal pass; return the logits."""
    if family == "llama":
        from transformers.models.llama import modeling_llama as modeling

        prefix, config_class = "Llama", transformers.LlamaConfig
    else:
        from transformers.models.qwen3 import modeling_qwen3 as modeling

        prefix, config_class = "Qwen3", transformers.Qwen3Config
    a = spec.attention
    config = config_class(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        num_hidden_layers=a.num_layers,
        rms_norm_eps=spec.rms_norm_eps,
        hidden_act=spec.hidden_act,
        attention_bias=a.qkv_bias,
        mlp_bias=spec.mlp_bias,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", **(spec.rope.scaling or {}), "rope_theta": spec.rope.theta},
        attn_implementation="eager",
    )
    rms_norm = getattr(modeling, f"{prefix}RMSNorm")
    layers = torch.nn.ModuleList()
    for i in range(a.num_layers):
        layer = getattr(modeling, f"{prefix}DecoderLayer")(config, i)
        if i == 0:  # the first layer reads [embedding | hidden]
            for name, heads in (("q_proj", a.heads), ("k_proj", a.kv_heads), ("v_proj", a.kv_heads)):
                wide = torch.nn.Linear(2 * spec.hidden_size, heads * a.head_dim, bias=a.qkv_bias)
                setattr(layer.self_attn, name, wide)
        layers.append(layer)
    state = {n.removeprefix("layers."): t for n, t in tensors.items() if n.startswith("layers.")}
    hidden_norm_weight = state.pop("0.hidden_norm.weight")
    layers.double().load_state_dict(state)
    hidden_norm, final_norm = (rms_norm(spec.hidden_size, spec.rms_norm_eps).double() for _ in range(2))
    hidden_norm.weight.data, final_norm.weight.data = hidden_norm_weight, tensors["norm.weight"]

    positions = torch.arange(len(embeds))[None]
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    mask = torch.full((len(embeds), len(embeds)), float("-inf"), dtype=torch.float64).triu(1)
    if a.sliding_window is not None:
        mask = mask + torch.full_like(mask, float("-inf")).tril(-a.sliding_window)
    common = {
        "position_embeddings": rotary(hidden[None], positions),
        "attention_mask": mask[None, None],
    }
    with torch.no_grad():
        x = hidden[None]
        for i, layer in enumerate(layers):
            if i > 0:
                x = layer(x, **common)
                continue
            both = torch.cat([layer.input_layernorm(embeds[None]), hidden_norm(x)], dim=-1)
            x = x + layer.self_attn(hidden_states=both, **common)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return (final_norm(x) @ tensors["lm_head.weight"].T)[0]


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention": {"num_layers": 3, "head_dim": 8}}),
        ("llama", {"attention": {"num_layers": 2, "qkv_bias": True, "o_bias": True}, "mlp_bias": True}),
        ("llama", {"attention": {"sliding_window": 5, "heads": 4, "kv_heads": 4}, "hidden_act": "gelu"}),
        ("qwen3", {"attention": {"num_layers": 2, "qk_norm": True, "head_dim": 16}}),
    ],
    ids=["llama", "llama-biases", "llama-window-gelu", "qwen3"],
)
def test_layers_match(family: str, changes: dict, rope: dict | None) -> None:
    spec = make_spec(**changes, rope=Rope(theta=500.0, scaling=rope))
    tensors = random_tensors(spec)
    features, sequence = random_inputs(spec, LENGTH)
    draft = ReferenceDraft(spec, tensors, dtype=torch.float64)
    hidden = draft.project(features)
    step, _ = draft.feature_pass(hidden, sequence)
    expected = run_transformers(family, spec, tensors, tensors["embed_tokens.weight"][sequence[1:]], hidden)
    # transformers takes norms, softmax, cosines and sines in float32.
    torch.testing.assert_close(step.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("rope", ["default", "yarn", "yarn-with-mscale"])
@pytest.mark.parametrize("q_rank", [7, None], ids=["q-rank", "no-q-rank"])
def test_latent_attention_matches(q_rank: int | None, rope: str, interleaved: bool) -> None:
    """One layer around DeepSeek-V3's attention of transformers, with the same weights."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    scaling = ROPES[rope]
    # transformers' norms of the latents have a fixed epsilon.
    spec = make_spec(
        attention=latent_attention(q_rank), rope=Rope(500.0, scaling, interleaved=interleaved), rms_norm_eps=1e-6
    )
    a, size = spec.attention, spec.attention.latent
    assert size is not None
    tensors = random_tensors(spec)
    features, sequence = random_inputs(spec, LENGTH)
    draft = ReferenceDraft(spec, tensors, dtype=torch.float64)
    hidden = draft.project(features)
    step, _ = draft.feature_pass(hidden, sequence)

    config = transformers.DeepseekV3Config(
        # The layer reads twice its width and writes it once; transformers' reads what it writes.
        hidden_size=2 * spec.hidden_size,
        num_attention_heads=a.heads,
        num_key_value_heads=a.heads,
        q_lora_rank=size.q_lora_rank,
        kv_lora_rank=size.kv_lora_rank,
        qk_nope_head_dim=size.qk_nope_head_dim,
        qk_rope_head_dim=size.qk_rope_head_dim,
        v_head_dim=size.v_head_dim,
        rope_interleave=interleaved,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": spec.rope.theta},
        attn_implementation="eager",
    )
    attention = modeling.DeepseekV3Attention(config, 0)
    attention.o_proj = torch.nn.Linear(a.heads * size.v_head_dim, spec.hidden_size, bias=False)
    at = "layers.0.self_attn."
    attention.double().load_state_dict({n.removeprefix(at): t for n, t in tensors.items() if n.startswith(at)})

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], spec.rms_norm_eps)

    embeds = tensors["embed_tokens.weight"][sequence[1:]]
    both = torch.cat([norm("layers.0.input_layernorm", embeds), norm("layers.0.hidden_norm", hidden)], dim=-1)
    mask = torch.full((len(both), len(both)), float("-inf"), dtype=torch.float64).triu(1)
    with torch.no_grad():
        rotation = modeling.DeepseekV3RotaryEmbedding(config)(both[None], torch.arange(len(both))[None])
        x = hidden + attention(both[None], rotation, mask[None, None])[0][0]
        y = norm("layers.0.post_attention_layernorm", x)
        gate, up = (y @ tensors[f"layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ tensors["layers.0.mlp.down_proj.weight"].T
        expected = norm("norm", x) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(step.logits, expected, rtol=1e-4, atol=1e-4)


def test_scaling_of_latent_attention_matters() -> None:
    """Guards the test above: rotation and softmax are both scaled."""
    logits = []
    for factors in ({}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.0}):
        scaling = {**(ROPES["yarn"] or {}), **factors}
        spec = make_spec(attention=latent_attention(), rope=Rope(500.0, scaling, interleaved=True))
        features, sequence = random_inputs(spec, LENGTH)
        draft = ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)
        logits.append(draft.feature_pass(draft.project(features), sequence)[0].logits)
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert (a - b).abs().max() > 1e-2


def test_rotary_embeddings_differ_from_each_other() -> None:
    """Guards the test above: every kind of scaling must matter at these lengths."""
    logits = []
    for rope in ROPES.values():
        spec = make_spec(rope=Rope(theta=500.0, scaling=rope), attention={"head_dim": 8})
        features, sequence = random_inputs(spec, LENGTH)
        draft = ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)
        logits.append(draft.feature_pass(draft.project(features), sequence)[0].logits)
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert (a - b).abs().max() > 1e-2
