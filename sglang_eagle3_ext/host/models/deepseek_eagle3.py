"""The drop-in draft class over SGLang's ``Eagle3DeepseekV2ForCausalLM``, whose attention is MLA.

Beside what all drafts have (``draft``), it serves drafts of several layers and drafts whose queries are not squeezed,
at both of which stock stops. SGLang rotates halves of a head on some devices and neighbours on all: rows of a draft
that was trained with halves are laid out as neighbours once at load, for queries and keys alike; no score changes.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layer_boundary import AttentionInputs, get_attn_tp_context
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear
from sglang.srt.models import kimi_k25_eagle3 as stock
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA, DeepseekV2MLP
from sglang.srt.runtime_context import get_device
from sglang.srt.utils import BumpAllocator, add_prefix
from torch import nn

from sglang_eagle3_ext.host import config as host_config
from sglang_eagle3_ext.host.models import draft
from sglang_eagle3_ext.host.models.operators import Operators
from sglang_eagle3_ext.spec import Attention, DraftSpec, Latent


class LatentDraftLayer(draft.DraftLayer):
    """One decoder layer of an MLA draft: SGLang's latent attention and dense MLP."""

    def __init__(
        self, config: Any, layer_id: int, quant_config: Any, prefix: str, *, spec: DraftSpec, operators: Operators
    ) -> None:
        nn.Module.__init__(self)
        attention, latent, width = spec.attention, latent_of(spec), config.hidden_size
        rope_scaling = _rope_scaling(spec)
        self.self_attn = DeepseekV2AttentionMLA(
            config=config,
            hidden_size=width,
            num_heads=config.num_attention_heads,
            qk_nope_head_dim=latent.qk_nope_head_dim,
            qk_rope_head_dim=latent.qk_rope_head_dim,
            v_head_dim=latent.v_head_dim,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            rope_theta=spec.rope.theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            layer_id=layer_id,
            reduce_results=True,
            prefix=add_prefix("self_attn", prefix),
        )
        if layer_id == 0:
            self._widen(attention, latent, 2 * width, quant_config, add_prefix("self_attn", prefix))
        self.mlp = DeepseekV2MLP(
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=add_prefix("mlp", prefix),
        )
        self.input_layernorm = RMSNorm(width, eps=spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, eps=spec.rms_norm_eps)
        self.prepare(config, layer_id, quant_config, add_prefix("mlp", prefix), spec=spec, operators=operators)

    def _widen(self, attention: Attention, latent: Latent, columns: int, quant_config: Any, prefix: str) -> None:
        """Let the attention read ``[embedding | hidden]``, which is twice as wide as what it writes."""
        rows = latent.kv_lora_rank + latent.qk_rope_head_dim
        if latent.q_lora_rank is None:
            self.self_attn.q_proj = ColumnParallelLinear(
                columns,
                self.self_attn.num_heads * attention.head_dim,
                bias=False,
                quant_config=quant_config,
                prefix=add_prefix("q_proj", prefix),
                parallel_group="attn_tp",
            )
        else:
            rows += latent.q_lora_rank
            # A GEMM made for the width of targets; decided at the first pass, unless it is here.
            self.self_attn._use_min_latency_fused_a_gemm = False
        name = "kv_a_proj_with_mqa" if latent.q_lora_rank is None else "fused_qkv_a_proj_with_mqa"
        projection = ReplicatedLinear(
            columns, rows, bias=False, quant_config=quant_config, prefix=add_prefix(name, prefix)
        )
        setattr(self.self_attn, name, projection)

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
        if self.self_attn.q_lora_rank is not None:
            # Latent attention fetches its first projection from here, where a decoder layer of SGLang's leaves it.
            get_attn_tp_context().set_attn_inputs(AttentionInputs(x, forward_batch, self.self_attn.prepare_qkv_latent))
        attended = self.self_attn(
            positions=positions,
            hidden_states=x,
            forward_batch=forward_batch,
            zero_allocator=BumpAllocator(buffer_size=2, dtype=torch.float32, device=x.device),
        )
        if isinstance(attended, tuple):
            attended = attended[0]
        hidden_states, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(hidden_states), residual

    def absorb(self) -> None:
        """Split the projection of keys and values into the two that act on queries and on results."""
        attention = self.self_attn
        weight = attention.kv_b_proj.weight
        keys, values = weight.unflatten(0, (-1, attention.qk_nope_head_dim + attention.v_head_dim)).split(
            [attention.qk_nope_head_dim, attention.v_head_dim], dim=1
        )
        # Both are read with their last axis strided, as SGLang's own loader leaves them.
        attention.w_kc = keys.transpose(1, 2).contiguous().transpose(1, 2)
        attention.w_vc = values.contiguous().transpose(1, 2)


class Eagle3DeepseekV2ForCausalLM(draft.ServedDraft, stock.Eagle3DeepseekV2ForCausalLM):
    """Serve an MLA EAGLE-3 draft by its plan."""

    layer_class = LatentDraftLayer
    stacked = {
        "q_a_proj": ("fused_qkv_a_proj_with_mqa", "q"),
        "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", "kv"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        if latent_of(self.plan.spec).q_lora_rank is None:
            self.stacked = {part: whole for part, whole in self.stacked.items() if "_a_proj" not in part}

    def arranged(self, canonical: str, tensor: torch.Tensor) -> torch.Tensor:
        """Bring rows and columns of a tensor of the file into the order in which it is served."""
        tensor = super().arranged(canonical, tensor)
        spec = self.plan.spec
        latent, width = latent_of(spec), spec.attention.head_dim
        if spec.rope.interleaved:
            return tensor
        if canonical.endswith(("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")):
            heads = tensor.unflatten(0, (-1, width))
            return _as_neighbours(heads, latent.qk_nope_head_dim).flatten(0, 1)
        if canonical.endswith("self_attn.kv_a_proj_with_mqa.weight"):
            return _as_neighbours(tensor[None], latent.kv_lora_rank)[0]
        return tensor

    def load_part(self, param: nn.Parameter, tensor: torch.Tensor, shard: Any) -> None:
        """Load a tensor; the projections to the two latents lie one above the other, whole on every rank."""
        if shard not in ("q", "kv"):
            super().load_part(param, tensor, shard)
            return
        rank = latent_of(self.plan.spec).q_lora_rank
        rows = param.data[:rank] if shard == "q" else param.data[rank:]
        rows.copy_(tensor)

    def finish_load(self) -> None:
        """Compute what the passes read in the place of weights."""
        super().finish_load()
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Absorb the projections of keys and values (SGLang's loaders ask for it by this name)."""
        layers: Any = self.model.layers
        for layer in layers:
            layer.absorb()


def _as_neighbours(heads: torch.Tensor, kept: int) -> torch.Tensor:
    """Reorder the rows [heads, rows, columns] after the first ``kept``: row i and row i + half stand side by side."""
    still, rotated = heads[:, :kept], heads[:, kept:]
    pairs = rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([still, pairs], dim=1)


def latent_of(spec: DraftSpec) -> Latent:
    """Return the sizes of a draft's latent attention.

    Raises:
        ValueError: its attention is another one.
    """
    if spec.attention.latent is None:
        raise ValueError(
            f"{spec.path}: got {spec.attention.kind} attention; expected mla. Serve it with the Llama class."
        )
    return spec.attention.latent


def _rope_scaling(spec: DraftSpec) -> dict[str, Any] | None:
    """Spell the scaling of the rotation as SGLang's latent attention takes it, which changes the object."""
    scaling = host_config.rope_parameters(spec)
    if scaling["rope_type"] != "default":
        return scaling
    if get_device().device == "cpu":
        # SGLang has no other rotation here than yarn; a factor of one stretches nothing.
        return {"factor": 1.0, "original_max_position_embeddings": spec.max_position_embeddings}
    return None


EntryClass = [Eagle3DeepseekV2ForCausalLM]
