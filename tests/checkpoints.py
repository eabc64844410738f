"""Write tiny checkpoints, drafts in every dialect and targets, with any detail changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

DELETE = object()
"""As a value in ``config_changes``: leave the key out."""

Dialect = Literal[
    "angelslim",
    "automodel",
    "deepseek",
    "eagle",
    "modelopt",
    "modelopt_megatron",
    "specforge",
    "speculators",
    "torchspec",
    "vllm",
]

LATENT: Mapping[str, int | None] = {
    "q_lora_rank": 14,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
"""Sizes of a tiny latent attention, all different."""


def change(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change keys of a config in place; a dotted key reaches into an object."""
    for key, value in changes.items():
        *parents, last = key.split(".")
        inner = config
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if value is DELETE:
            inner.pop(last, None)
        else:
            inner[last] = copy.deepcopy(value)


def draft_tensors(
    *,
    hidden: int,
    target_hidden: int,
    num_sources: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    draft_vocab: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Make random tensors of a classic draft, under canonical names, ``d2t`` as offsets."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)

    tensors = {
        "fc.weight": weight(hidden, num_sources * target_hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": weight(draft_vocab, hidden),
    }
    for i in range(layers):
        prefix, width = f"layers.{i}.", 2 * hidden if i == 0 else hidden
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(hidden),
            f"{prefix}post_attention_layernorm.weight": norm(hidden),
            f"{prefix}self_attn.q_proj.weight": weight(heads * head_dim, width),
            f"{prefix}self_attn.k_proj.weight": weight(kv_heads * head_dim, width),
            f"{prefix}self_attn.v_proj.weight": weight(kv_heads * head_dim, width),
            f"{prefix}self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            f"{prefix}mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": weight(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": weight(hidden, intermediate),
        }
        if i == 0:
            tensors["layers.0.hidden_norm.weight"] = norm(hidden)
    if draft_vocab != vocab:
        targets = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = targets - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, targets, True)
    return tensors


def latent_tensors(
    latent: Mapping[str, int | None], *, hidden: int, layers: int, heads: int, seed: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Make random tensors of a draft's latent attention, under DeepSeek's names."""
    generator = torch.Generator().manual_seed(seed + 2)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)

    rank, kv_rank, nope, rope, value = (latent[key] for key in LATENT)
    assert kv_rank is not None
    assert nope is not None
    assert rope is not None
    assert value is not None
    tensors = {}
    for i in range(layers):
        at, width = f"layers.{i}.self_attn.", 2 * hidden if i == 0 else hidden
        if rank is None:
            tensors[f"{at}q_proj.weight"] = weight(heads * (nope + rope), width)
        else:
            tensors |= {
                f"{at}q_a_proj.weight": weight(rank, width),
                f"{at}q_a_layernorm.weight": norm(rank),
                f"{at}q_b_proj.weight": weight(heads * (nope + rope), rank),
            }
        tensors |= {
            f"{at}kv_a_proj_with_mqa.weight": weight(kv_rank + rope, width),
            f"{at}kv_a_layernorm.weight": norm(kv_rank),
            f"{at}kv_b_proj.weight": weight(heads * (nope + value), kv_rank),
            f"{at}o_proj.weight": weight(hidden, heads * value),
        }
    return tensors


def _spell(
    dialect: Dialect, config: dict[str, Any], tensors: dict[str, torch.Tensor], target_hidden: int, num_sources: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Spell keys and tensors of a flat draft as one of its dialects does."""
    if dialect in ("angelslim", "eagle", "specforge", "torchspec"):
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if dialect == "deepseek":
        return config | {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "rope_theta": 50000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6][:num_sources]},
        }, tensors
    if dialect == "eagle":
        return config | {"architectures": ["LlamaForCausalLM"]}, tensors
    if dialect == "specforge":
        return config | {"rope_theta": 10000.0}, tensors
    if dialect == "torchspec":
        return config | {
            "rope_theta": 1e6,
            "num_aux_hidden_states": num_sources,
            "target_hidden_size": target_hidden,
            "_torchspec_version": "0.1.0",
        }, tensors
    if dialect == "angelslim":
        return config | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "rope_theta": 1000000,
            "rope_scaling": None,
            "max_window_layers": 36,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        }, tensors
    if dialect == "vllm":
        return config | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6}, tensors
    if dialect == "automodel":
        top = ("lm_head.weight", "d2t", "t2d")
        return config | {
            "architectures": ["LlamaEagle3DraftModel"],
            "target_hidden_size": target_hidden,
            "attn_implementation": "eager",
            "parallel_drafting": False,
            "num_hidden_layers": 28,
            "layer_types": ["sliding_attention"] * 28,
            "sliding_window": 64,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        }, {name if name in top else f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors.pop("t2d", None)
    megatron = dialect == "modelopt_megatron"
    deep = megatron and config["num_hidden_layers"] > 1
    scaling: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000}
    if megatron:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return config | {
        "architectures": ["LlamaForCausalLMEagle3Deep" if deep else "LlamaForCausalLMEagle3"],
        "rope_scaling": scaling,
        "rope_theta": 500000.0 if megatron else 10000,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5][:num_sources],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }, tensors


def write_draft(
    folder: Path,
    dialect: Dialect = "specforge",
    *,
    hidden: int = 32,
    target_hidden: int | None = None,
    num_sources: int = 3,
    layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 12,
    intermediate: int = 40,
    vocab: int = 96,
    draft_vocab: int = 37,
    config_changes: Mapping[str, Any] | None = None,
    tensor_changes: Mapping[str, torch.Tensor | None] | None = None,
    latent: Mapping[str, int | None] = LATENT,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a tiny draft.

    Args:
        folder: where to write; made if absent.
        dialect: whose files to imitate; ``eagle`` are the EAGLE repository's, ``specforge`` the plain flat layout.
        hidden: width of the draft; ``target_hidden`` that of one source, the same unless given.
        num_sources, layers, heads, kv_heads, head_dim, intermediate, vocab, draft_vocab: further sizes. By
            default ``heads * head_dim`` differs from ``hidden``, as in real drafts.
        config_changes: keys of ``config.json`` to set or, with :data:`DELETE`, to leave out; a dotted key
            reaches into an object.
        tensor_changes: tensors to set or, with ``None``, to leave out, by their name in the file.
        latent: sizes of the attention of ``deepseek``, in the place of ``kv_heads`` and ``head_dim``.
        seed: seed of the random values.
        dtype: type of the floating tensors.

    Returns:
        The folder.
    """
    target_hidden = target_hidden or hidden
    tensors = draft_tensors(
        hidden=hidden,
        target_hidden=target_hidden,
        num_sources=num_sources,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        draft_vocab=draft_vocab,
        seed=seed,
        dtype=dtype,
    )
    if dialect == "deepseek":
        tensors = {name: tensor for name, tensor in tensors.items() if ".self_attn." not in name}
        tensors |= latent_tensors(latent, hidden=hidden, layers=layers, heads=heads, seed=seed, dtype=dtype)
    layer_config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
    }
    dtype_name = str(dtype).removeprefix("torch.")
    config: dict[str, Any]
    if dialect == "speculators":
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": target_hidden if target_hidden != hidden else None,
            "norm_before_residual": False,
            "tie_word_embeddings": False,
            "torch_dtype": dtype_name,
            "transformer_layer_config": {
                **layer_config,
                "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            },
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/target"},
            },
        }
        tensors["embed_tokens.weight"] = torch.randn(
            vocab, hidden, generator=torch.Generator().manual_seed(seed + 1)
        ).to(dtype)
    else:
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_config,
            "draft_vocab_size": draft_vocab,
            "tie_word_embeddings": False,
            "torch_dtype": dtype_name,
        }
        if dialect == "deepseek":
            del config["head_dim"]
            config |= {"num_key_value_heads": heads, **latent}
        if target_hidden != hidden:
            config["target_hidden_size"] = target_hidden
        if target_hidden != hidden or dialect in ("automodel", "torchspec"):
            tensors["embed_tokens.weight"] = torch.randn(
                vocab, hidden, generator=torch.Generator().manual_seed(seed + 1)
            ).to(dtype)
        config, tensors = _spell(dialect, config, tensors, target_hidden, num_sources)
    change(config, config_changes or {})
    for name, tensor in (tensor_changes or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # Cloned, since one tensor may stand for several of the file, which safetensors refuses to save shared.
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def write_target(
    folder: Path,
    *,
    num_layers: int = 8,
    hidden: int = 32,
    intermediate: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 96,
    config_changes: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a tiny Llama in the layout of Hugging Face, which transformers and SGLang can load.

    Args:
        folder: where to write; made if absent.
        num_layers, hidden, intermediate, heads, kv_heads, vocab: sizes.
        config_changes: keys of ``config.json`` to set or, with :data:`DELETE`, to leave out.
        seed: seed of the random values.
        dtype: type of the tensors.

    Returns:
        The folder.
    """
    generator = torch.Generator().manual_seed(seed)
    head_dim = hidden // heads

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator).to(dtype),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": weight(vocab, hidden),
    }
    for i in range(num_layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
            f"{prefix}self_attn.q_proj.weight": weight(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": weight(hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": weight(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": weight(hidden, intermediate),
        }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    change(config, config_changes or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def shard(folder: Path) -> dict[str, str]:
    """Split a checkpoint's one file into two, with an index; return which tensor lies where."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def pickle(folder: Path, **options: Any) -> None:
    """Put a checkpoint's tensors into a pickle."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink()
