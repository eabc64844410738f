"""The demo's EAGLE-3 draft as a trainable module, and its checkpoint format.

One Llama layer whose attention reads ``[norm(embedding of the next token) | norm(hidden)]``; ``hidden`` is
``fc`` of three target states at first and the layer's own output afterwards. The head covers a part of the
vocabulary; embeddings are the target's and stay frozen.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

SOURCES: Final[tuple[str, ...]] = ("embed", "layer3", "layer15")

Keys = list[tuple[Tensor, Tensor]]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class _Mlp(nn.Module):
    dropout = 0.0

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        y: Tensor = self.down_proj(F.dropout(inner, self.dropout, self.training))
        return y


class _Layer(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = _Attention(hidden, heads, kv_heads, head_dim)
        self.mlp = _Mlp(hidden, intermediate)


class Draft(nn.Module):
    """Compute draft states; parameter names are those of the checkpoint."""

    def __init__(self, target_config: dict[str, Any], target_ids: Sequence[int]) -> None:
        """Build a draft for a target.

        Args:
            target_config: the target's ``config.json``; the draft's layer has the target's shape.
            target_ids: the target's token id of every row of the head, ascending.
        """
        super().__init__()
        self.config = target_config
        self.hidden: int = target_config["hidden_size"]
        self.heads: int = target_config["num_attention_heads"]
        self.kv_heads: int = target_config["num_key_value_heads"]
        self.head_dim: int = target_config["head_dim"]
        self.theta: float = target_config["rope_parameters"]["rope_theta"]
        self.target_ids = torch.tensor(target_ids)
        eps = target_config["rms_norm_eps"]
        self.fc = nn.Linear(len(SOURCES) * self.hidden, self.hidden, bias=False)
        self.midlayer = _Layer(
            self.hidden, target_config["intermediate_size"], self.heads, self.kv_heads, self.head_dim, eps
        )
        self.norm = nn.RMSNorm(self.hidden, eps)
        self.lm_head = nn.Linear(self.hidden, len(target_ids), bias=False)

    def layer(self, embedded: Tensor, hidden: Tensor, past: Keys, start: int) -> Tensor:
        """Apply the layer for one step of training-time test.

        Step 0 is the feature pass over all rows; its queries, and everything later, are computed for rows
        ``start`` and up only. A row of step k attends causally to the keys of step 0 and to the key of its
        own row in each step since, which is what it sees when served.

        Args:
            embedded: [B, T, H] embedding of each row's next token, T rows at step 0 and T - start later.
            hidden: like ``embedded``; ``fc``'s output, or what this returned for the step before.
            past: keys and values of the steps so far; extended in place.
            start: first row whose output is wanted.

        Returns:
            [B, T - start, H] hidden states before the final norm.
        """
        layer, step, batch = self.midlayer, len(past), embedded.shape[0]
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        first = 0 if step == 0 else start
        position = torch.arange(first, first + x.shape[1]) + step
        frequency = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angle = position[:, None].float() * frequency
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos(), angle.sin()

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, -1, heads, self.head_dim).transpose(1, 2)

        past.append(
            (
                _rotate(split(layer.self_attn.k_proj(x), self.kv_heads), cos, sin),
                split(layer.self_attn.v_proj(x), self.kv_heads),
            )
        )
        if step == 0:
            x, hidden, cos, sin = x[:, start:], hidden[:, start:], cos[start:], sin[start:]
        q = _rotate(split(layer.self_attn.q_proj(x), self.heads), cos, sin)
        rows, group = q.shape[2], self.heads // self.kv_heads
        k0, v0 = (y.repeat_interleave(group, 1) for y in past[0])
        causal = torch.full((rows, k0.shape[2]), float("-inf")).triu(1 + start)
        if step == 0:
            mixed = F.scaled_dot_product_attention(q, k0, v0, attn_mask=causal)
        else:
            scale = self.head_dim**-0.5
            scores = [(q @ k0.transpose(-1, -2)) * scale + causal]
            scores += [(q * k.repeat_interleave(group, 1)).sum(-1, keepdim=True) * scale for k, _ in past[1:]]
            weight = torch.cat(scores, -1).softmax(-1)
            mixed = weight[..., : k0.shape[2]] @ v0
            for i, (_, v) in enumerate(past[1:]):
                mixed = mixed + weight[..., k0.shape[2] + i, None] * v.repeat_interleave(group, 1)
        hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        y: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return y

    def load(self, directory: pathlib.Path) -> None:
        """Start from a draft, whose head may cover other tokens; rows it lacks keep their values.

        Args:
            directory: folder with the draft's ``model.safetensors``.
        """
        weights = load_file(directory / "model.safetensors")
        there = (weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist()
        row_of = {token: row for row, token in enumerate(there)}
        mine = [(row, row_of[token]) for row, token in enumerate(self.target_ids.tolist()) if token in row_of]
        head = self.lm_head.weight.detach().clone()
        head[[row for row, _ in mine]] = weights["lm_head.weight"].float()[[row for _, row in mine]]
        state = {name: value.float() for name, value in weights.items() if name not in ("d2t", "t2d")}
        self.load_state_dict({**state, "lm_head.weight": head})

    def save(self, directory: pathlib.Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, in bfloat16, as SGLang reads them.

        Args:
            directory: folder to write into.
        """
        directory.mkdir(parents=True, exist_ok=True)
        vocabulary, rows = self.config["vocab_size"], len(self.target_ids)
        tensors = {name: value.detach().bfloat16().contiguous() for name, value in self.state_dict().items()}
        tensors["d2t"] = self.target_ids - torch.arange(rows)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, self.target_ids, True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.config["intermediate_size"],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": vocabulary,
            "draft_vocab_size": rows,
            "rms_norm_eps": 1e-05,
            "hidden_act": "silu",
            "max_position_embeddings": self.config["max_position_embeddings"],
            "rope_theta": self.theta,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": self.config["bos_token_id"],
            "eos_token_id": self.config["eos_token_id"],
            "eagle3_ext": {"sources": list(SOURCES)},
        }
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
