"""The demo's target, SmolLM2-135M-Instruct, as one batched decoder with a static key/value cache.

It answers many prompts at once and hands out, for every position, the hidden states that the draft reads
(boundaries 0, 4 and 16) and the final normed state, from which the target's distribution can be recomputed.
One process with one thread is what it is made for.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

BOUNDARIES: Final[tuple[int, ...]] = (0, 4, 16)
"""Residual stream just before these layers: the embedding, the output of layer 3, the output of layer 15."""

_MASKED: Final = -1e9


class Answer(NamedTuple):
    """Hold one prompt with its answer and the states of every position but the last.

    ``features`` is [L, 3*H] and ``final`` [L, H], both bfloat16, with L = prompt + answer - 1 or one more
    where the batch ran on.
    """

    prompt: list[int]
    completion: list[int]
    features: Tensor
    final: Tensor


class _Packed:
    """Hold a linear layer's weight in oneDNN's blocked layout, faster than the plain one at 128 rows."""

    def __init__(self, weight: Tensor, rows: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), rows)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._weight, None, "none", [], "")
        return y


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: _Packed
    output: _Packed
    post_norm: Tensor
    gate: _Packed
    up: _Packed
    down: _Packed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Target:
    """Run a Llama checkpoint over a batch of sequences that share cache columns."""

    def __init__(self, directory: pathlib.Path, rows: int = 128, dtype: torch.dtype = torch.float32) -> None:
        """Load a checkpoint.

        Args:
            directory: folder with ``config.json`` and ``model.safetensors`` of a Llama model with tied
                embeddings.
            rows: batch size for which the weights are packed; other sizes work too.
            dtype: of linear layers and the cache. bfloat16 takes half the time on CPUs that multiply it; the
                residual stream and the norms are float32 either way.
        """
        self._dtype = dtype
        config = json.loads((directory / "config.json").read_text())
        self.hidden: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or self.hidden // self.heads
        self.eps: float = config["rms_norm_eps"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.eos: frozenset[int] = frozenset({0, config["eos_token_id"]})
        weights = load_file(directory / "model.safetensors")

        def get(name: str) -> Tensor:
            return weights[f"model.{name}"].float()

        self.embedding = get("embed_tokens.weight")
        self.norm = get("norm.weight")
        self._head = _Packed(self.embedding, rows, dtype)
        self._layers = []
        for i in range(config["num_hidden_layers"]):
            at, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            self._layers.append(
                _Layer(
                    get(f"layers.{i}.input_layernorm.weight"),
                    _Packed(torch.cat([get(f"{at}.{x}_proj.weight") for x in "qkv"]), rows, dtype),
                    _Packed(get(f"{at}.o_proj.weight"), rows, dtype),
                    get(f"layers.{i}.post_attention_layernorm.weight"),
                    _Packed(get(f"{mlp}.gate_proj.weight"), rows, dtype),
                    _Packed(get(f"{mlp}.up_proj.weight"), rows, dtype),
                    _Packed(get(f"{mlp}.down_proj.weight"), rows, dtype),
                )
            )
        exponent = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        self._inverse_frequency = 1.0 / theta**exponent

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.hidden,), weight, self.eps)

    def forward(
        self, ids: Tensor, positions: Tensor, column: int, mask: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the columns ``column .. column + T`` of a batch and extend the cache.

        Args:
            ids: [B, T] tokens.
            positions: [B, T] rope positions.
            column: cache column of the first token.
            mask: additive, [B, 1, T, column + T], or [B, 1, 1, column + 1] when T is 1.
            cache: one [2, B, kv_heads, columns, head_dim] tensor per layer.

        Returns:
            Logits of the last column [B, V], features [B, T, 3*H] and final normed states [B, T, H], the
            latter two in bfloat16.
        """
        batch, length = ids.shape
        end, group = column + length, self.heads // self.kv_heads
        angle = positions[..., None].float() * self._inverse_frequency
        angle = torch.cat([angle, angle], -1)[:, None]
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(ids, self.embedding)
        mask = mask.to(self._dtype)
        captured = []
        for i, layer in enumerate(self._layers):
            if i in BOUNDARIES:
                captured.append(x.bfloat16())
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            qkv = qkv.view(batch, length, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
            q = _rotate(qkv[:, : self.heads], cos, sin).to(self._dtype)
            keys, values = cache[i]
            keys[:, :, column:end] = _rotate(qkv[:, self.heads : self.heads + self.kv_heads], cos, sin)
            values[:, :, column:end] = qkv[:, self.heads + self.kv_heads :]
            k, v = keys[:, :, :end], values[:, :, :end]
            if length == 1:
                # The query heads of one key head become rows of one attention call: nothing is repeated.
                q = q.reshape(batch, self.kv_heads, group, self.head_dim)
                grouped = mask.expand(batch, 1, group, end)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=grouped).reshape(batch, 1, -1)
            else:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(batch, length, -1)
            x = x + layer.output(out)
            y = self._norm(x, layer.post_norm)
            x = x + layer.down(F.silu(layer.gate(y)) * layer.up(y))
        final = self._norm(x, self.norm)
        return self._head(final[:, -1]), torch.cat(captured, -1), final.bfloat16()

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], max_new: int, temperature: float = 0.0, seed: int = 0) -> list[Answer]:
        """Answer prompts, all at once.

        Rows that have ended leave the batch as soon as a tenth of it has, so short answers do not cost as
        much as long ones.

        Args:
            prompts: token ids of each prompt.
            max_new: tokens after which an answer is cut.
            temperature: 0 answers greedily, more draws from the target's distribution at that temperature.
            seed: of the draws.

        Returns:
            One answer per prompt, in order.
        """
        # What all prompts begin with (the chat template's system line) is run once.
        shared = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
        batch, width = len(prompts), max(map(len, prompts)) - shared
        begin, columns = shared + width, shared + width + max_new
        shape = (2, batch, self.kv_heads, columns, self.head_dim)
        cache = [torch.zeros(shape, dtype=self._dtype) for _ in self._layers]
        draws = torch.Generator().manual_seed(seed)
        kept_features: list[list[Tensor]] = [[] for _ in prompts]
        kept_final: list[list[Tensor]] = [[] for _ in prompts]
        if shared:
            first = [layer[:, :1, :, :shared].clone() for layer in cache]
            causal = torch.full((shared, shared), _MASKED).triu(1)
            _, features, final = self.forward(
                torch.tensor([prompts[0][:shared]]), torch.arange(shared)[None], 0, causal[None, None], first
            )
            for layer, begun in zip(cache, first, strict=True):
                layer[:, :, :, :shared] = begun
            for row in range(batch):
                kept_features[row].append(features[0])
                kept_final[row].append(final[0])
        ids = torch.zeros(batch, width, dtype=torch.long)
        pad = torch.tensor([shared + width - len(p) for p in prompts])
        for row, prompt in enumerate(prompts):
            ids[row, int(pad[row]) :] = torch.tensor(prompt[shared:])
        column = torch.arange(columns)
        hidden = (column >= shared) & (column < shared + pad[:, None])
        mask = torch.zeros(batch, 1, 1, columns).masked_fill_(hidden[:, None, None], _MASKED)
        positions = shared + (torch.arange(width) - pad[:, None]).clamp(min=0)
        causal = F.pad(torch.full((width, width), _MASKED).triu(1), (shared, 0))
        logits, features, final = self.forward(ids, positions, shared, mask[..., :begin] + causal, cache)
        for row in range(batch):
            kept_features[row].append(features[row, int(pad[row]) :])
            kept_final[row].append(final[row, int(pad[row]) :])
        completions: list[list[int]] = [[] for _ in prompts]
        alive = list(range(batch))
        next_position = positions[:, -1]
        for step in range(max_new):
            if temperature:
                below = (logits.float() / temperature).softmax(-1).cumsum(-1)
                level = torch.rand(len(below), 1, generator=draws) * below[:, -1:]
                token = torch.searchsorted(below, level, right=True)[:, 0].clamp(max=below.shape[1] - 1)
            else:
                token = logits.argmax(-1)
            for row, value in zip(alive, token.tolist(), strict=True):
                if not completions[row] or completions[row][-1] not in self.eos:
                    completions[row].append(value)
            running = torch.tensor([completions[row][-1] not in self.eos for row in alive])
            count = int(running.sum())
            if count == 0 or step == max_new - 1:
                break
            if count <= 0.9 * len(alive):
                keep = running.nonzero()[:, 0]
                cache = [layer.index_select(1, keep) for layer in cache]
                mask, token, next_position = mask[keep], token[keep], next_position[keep]
                alive = [alive[i] for i in keep.tolist()]
            next_position = next_position + 1
            at = begin + step
            logits, features, final = self.forward(
                token[:, None], next_position[:, None], at, mask[..., : at + 1], cache
            )
            for i, row in enumerate(alive):
                if completions[row][-1] not in self.eos:
                    kept_features[row].append(features[i])
                    kept_final[row].append(final[i])
        return [
            Answer(prompts[row], completions[row], torch.cat(kept_features[row]), torch.cat(kept_final[row]))
            for row in range(batch)
        ]
