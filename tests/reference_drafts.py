"""Small drafts for the tests of the reference: a spec from keyword changes, random tensors that fit it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_eagle3_ext.spec import Attention, DraftSpec, Latent, Norms, Rope, Verifier, Vocab

BASE = DraftSpec(
    path="draft",
    format="eagle",
    architecture="LlamaForCausalLMEagle3",
    sources=None,
    sources_place="draft/config.json:eagle_config.eagle_aux_hidden_state_layer_ids",
    order="as_listed",
    layer_ids="stock",
    num_sources=3,
    target_hidden_size=12,
    hidden_size=12,
    intermediate_size=20,
    fc_in=36,
    fc_bias=False,
    mlp_bias=False,
    norms=Norms(),
    attention=Attention("gqa", num_layers=1, heads=6, kv_heads=2, head_dim=4),
    rope=Rope(theta=100.0),
    vocab=Vocab(target=50, draft=20, map="offset"),
    embed="own",
    lm_head="own",
    rms_norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=256,
    dtype=None,
    producer=None,
    verifier=Verifier(),
    expected=None,
    strict=False,
    has_eagle3_ext=False,
    weights={},
    tensors={},
    missing=(),
    origins={},
    findings=(),
)


def latent_attention(q_lora_rank: int | None = 7, num_layers: int = 1) -> dict[str, Any]:
    """Give the changes of ``attention`` that make it latent, every size another one."""
    latent = Latent(q_lora_rank, kv_lora_rank=9, qk_nope_head_dim=3, qk_rope_head_dim=8, v_head_dim=5)
    return {
        "kind": "mla", "num_layers": num_layers, "heads": 6, "kv_heads": 6, "head_dim": 11, "latent": latent
    }  # fmt: skip


def make_spec(**changes: Any) -> DraftSpec:
    """Change the base draft; ``norms``, ``attention`` and ``vocab`` may be dicts of their changes."""
    for field in ("norms", "attention", "vocab"):
        if isinstance(changes.get(field), dict):
            changes[field] = replace(getattr(BASE, field), **changes[field])
    spec = replace(BASE, **changes)
    if "fc_in" not in changes:
        fc_in = spec.num_sources * spec.target_hidden_size if spec.num_sources else None
        spec = replace(spec, fc_in=fc_in)
    return spec


def random_tensors(spec: DraftSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw every tensor of a draft, in float64, large enough for every part of it to matter."""
    g = torch.Generator().manual_seed(seed)
    width, target, a = spec.hidden_size, spec.target_hidden_size, spec.attention
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=g, dtype=torch.float64) / columns**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(rows, generator=g, dtype=torch.float64) * 0.5

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.5 * torch.randn(size, generator=g, dtype=torch.float64)

    if spec.num_sources:
        matrix("fc", width, spec.num_sources * target, spec.fc_bias)
    for k in range(spec.num_sources if spec.norms.around_fc == "per_source" else 0):
        norm(f"fc_norm.{k}", target)
    if spec.norms.around_fc == "concatenation":
        norm("input_norm", spec.num_sources * target)
    for i in range(a.num_layers):
        at = f"layers.{i}"
        norm(f"{at}.input_layernorm", width)
        if i == 0:
            norm(f"{at}.hidden_norm", width)
        read = width if i else 2 * width
        queries, size = a.heads * a.head_dim, a.latent
        if size is None:
            matrix(f"{at}.self_attn.q_proj", queries, read, a.qkv_bias)
            matrix(f"{at}.self_attn.k_proj", a.kv_heads * a.head_dim, read, a.qkv_bias)
            matrix(f"{at}.self_attn.v_proj", a.kv_heads * a.head_dim, read, a.qkv_bias)
            matrix(f"{at}.self_attn.o_proj", width, queries, a.o_bias)
        else:
            if size.q_lora_rank is None:
                matrix(f"{at}.self_attn.q_proj", queries, read, False)
            else:
                matrix(f"{at}.self_attn.q_a_proj", size.q_lora_rank, read, False)
                norm(f"{at}.self_attn.q_a_layernorm", size.q_lora_rank)
                matrix(f"{at}.self_attn.q_b_proj", queries, size.q_lora_rank, False)
            matrix(f"{at}.self_attn.kv_a_proj_with_mqa", size.kv_lora_rank + size.qk_rope_head_dim, read, False)
            norm(f"{at}.self_attn.kv_a_layernorm", size.kv_lora_rank)
            per_head = size.qk_nope_head_dim + size.v_head_dim
            matrix(f"{at}.self_attn.kv_b_proj", a.heads * per_head, size.kv_lora_rank, False)
            matrix(f"{at}.self_attn.o_proj", width, a.heads * size.v_head_dim, False)
        if a.qk_norm:
            norm(f"{at}.self_attn.q_norm", a.head_dim)
            norm(f"{at}.self_attn.k_norm", a.head_dim)
        norm(f"{at}.post_attention_layernorm", width)
        matrix(f"{at}.mlp.gate_proj", spec.intermediate_size, width, spec.mlp_bias)
        matrix(f"{at}.mlp.up_proj", spec.intermediate_size, width, spec.mlp_bias)
        matrix(f"{at}.mlp.down_proj", width, spec.intermediate_size, spec.mlp_bias)
    if spec.norms.final_norm:
        norm("norm", width)
    if spec.lm_head == "own":
        matrix("lm_head", spec.vocab.draft, width, False)
    if spec.embed == "own":
        matrix("embed_tokens", spec.vocab.target, width, False)
    if spec.vocab.map != "none":
        ids = torch.randperm(spec.vocab.target, generator=g)[: spec.vocab.draft].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids)) if spec.vocab.map == "offset" else ids
    return tensors


def random_inputs(spec: DraftSpec, length: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw features for all positions but the last, and a sequence of target ids."""
    g = torch.Generator().manual_seed(seed)
    width = spec.num_sources * spec.target_hidden_size if spec.num_sources else spec.hidden_size
    features = torch.randn(length - 1, width, generator=g, dtype=torch.float64) * 3
    return features, torch.randint(spec.vocab.target, (length,), generator=g)
