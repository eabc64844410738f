"""The drop-in draft class over SGLang's ``LlamaForCausalLMEagle3``: what is not the same for all drafts (``draft``).

Biases of attention, q/k norms and a sliding window follow the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.models import llama_eagle3 as stock
from sglang.srt.runtime_context import get_spec
from sglang.srt.utils import add_prefix

from sglang_eagle3_ext.host.models import draft
from sglang_eagle3_ext.host.models.operators import Operators
from sglang_eagle3_ext.spec import DraftSpec


class LlamaDraftLayer(draft.DraftLayer, stock.LlamaDecoderLayer):
    """One decoder layer of a Llama-type draft."""

    def __init__(
        self, config: Any, layer_id: int, quant_config: Any, prefix: str, *, spec: DraftSpec, operators: Operators
    ) -> None:
        super().__init__(config, layer_id, quant_config, prefix)
        self.prepare(config, layer_id, quant_config, prefix, spec=spec, operators=operators)
        attention, eps = spec.attention, spec.rms_norm_eps
        if attention.qkv_bias:
            self.self_attn.qkv_proj = QKVParallelLinear(
                config.hidden_size * (2 if layer_id == 0 else 1),
                attention.head_dim,
                self.self_attn.total_num_heads,
                self.self_attn.total_num_kv_heads,
                bias=True,
                quant_config=quant_config,
                prefix=add_prefix("qkv_proj", prefix),
            )
        if attention.qk_norm:
            self.self_attn.q_norm = RMSNorm(attention.head_dim, eps=eps)
            self.self_attn.k_norm = RMSNorm(attention.head_dim, eps=eps)
            self.self_attn.forward_prepare_native = self._qkv_with_head_norms

    def _qkv_with_head_norms(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project to q, k, v with an RMSNorm per head before the rotation (Qwen3's attention)."""
        attention = self.self_attn
        qkv, _ = attention.qkv_proj(hidden_states)
        q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        q = attention.q_norm(q.reshape(-1, attention.head_dim)).view_as(q)
        k = attention.k_norm(k.reshape(-1, attention.head_dim)).view_as(k)
        q, k = attention.rotary_emb(positions, q, k)
        return q, k, v

    def forward(
        self,
        positions: torch.Tensor,
        embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            positions: [T] positions of the rows.
            embeds: [T, E] embeddings, read by the first layer only.
            hidden_states: [T, E] the fc output or the recurrent state (first layer), else the stream.
            forward_batch: SGLang's batch.
            residual: ``None`` for the first layer, else [T, E].

        Returns:
            (contribution, residual), both [T, E]; their sum is the layer's output.
        """
        x, residual = self.enter(embeds, hidden_states, residual)
        attended = self.self_attn(positions=positions, hidden_states=x, forward_batch=forward_batch)
        hidden_states, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(hidden_states), residual


class LlamaForCausalLMEagle3(draft.ServedDraft, stock.LlamaForCausalLMEagle3):
    """Serve a Llama-type EAGLE-3 draft by its plan."""

    layer_class = LlamaDraftLayer
    stacked = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        window = self.plan.spec.attention.sliding_window
        # SGLang counts the tokens before the query; a checkpoint counts the query too.
        self._draft_window_size = get_spec().speculative_draft_window_size or (window - 1 if window else None)
        if self._draft_window_size is not None:
            layers: Any = self.model.layers
            for layer in layers:
                layer.self_attn.attn.sliding_window_size = self._draft_window_size

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the draft's attention window: the server's flag, else the checkpoint's own."""
        return self._draft_window_size


EntryClass = [LlamaForCausalLMEagle3]
