"""What the draft classes share: fc and its norms, the two passes, weights and their ledger.

What differs from stock, each of it read from the plan and from nothing else:

- whether ``fc`` runs is known from the forward mode (feature pass or recurrent pass), never from a width;
- fc columns (and the norms tied to them) are permuted once at load to the order the target emits;
- ``norm_before_residual``, ``norm_output``, per-source norms and one norm over the concatenation, biases, layers behind
  the first, own embeddings, tied and borrowed heads follow the checkpoint;
- a ledger proves that every tensor of the file went somewhere and every parameter came from somewhere.

Where the plan is stock's own reading and ``EAGLE3_EXT_KERNELS=off``, the same operators run on the same
values as in stock.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.host import config as host_config
from sglang_eagle3_ext.host.models.operators import Operators, choose_operators
from sglang_eagle3_ext.kernels.fc_proj import quantise_fc_weight
from sglang_eagle3_ext.spec import AssemblyPlan, DraftSpec

logger = logging.getLogger(__name__)

_FEATURE_PASSES = frozenset(
    {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DRAFT_EXTEND_V2}
)
_RECURRENT_PASSES = frozenset({ForwardMode.DECODE})


class DraftLayer(nn.Module):
    """What a decoder layer does before its attention; the first reads ``[embedding | hidden]``, the others the stream.

    Comes before SGLang's layer in a class's bases, or alone; ``prepare`` is to be called once the layer is built.
    """

    # SGLang's layers, whose types are not looked into.
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    hidden_norm: Any
    post_attention_layernorm: Any

    def prepare(
        self, config: Any, layer_id: int, quant_config: Any, prefix: str, *, spec: DraftSpec, operators: Operators
    ) -> None:
        """Make of SGLang's layer the one that the spec describes."""
        self.is_input_layer = layer_id == 0
        self._norm_concat = operators.norm_concat
        self._post_norm_residual = spec.norms.residual == "post_norm"
        if layer_id > 0:
            # Only the first layer reads an embedding; stock's second norm would stay at ones here.
            del self.hidden_norm
        if spec.mlp_bias:
            self.mlp.gate_up_proj = MergedColumnParallelLinear(
                config.hidden_size,
                [config.intermediate_size] * 2,
                bias=True,
                quant_config=quant_config,
                prefix=add_prefix("gate_up_proj", prefix),
            )
            self.mlp.down_proj = RowParallelLinear(
                config.intermediate_size,
                config.hidden_size,
                bias=True,
                quant_config=quant_config,
                prefix=add_prefix("down_proj", prefix),
            )

    def enter(
        self, embeds: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm what the attention reads.

        Args:
            embeds: [T, E] embeddings, read by the first layer only.
            hidden_states: [T, E] the fc output or the recurrent state (first layer), else the stream.
            residual: ``None`` for the first layer, else [T, E].

        Returns:
            (what the attention reads, [T, 2E] or [T, E]; what its result is added to, [T, E]).
        """
        if not self.is_input_layer:
            normed, residual = self.input_layernorm(hidden_states, residual)
            return normed, residual
        if self._norm_concat is not None:
            return self._norm_concat(
                hidden_states,
                embeds,
                embed_norm_weight=self.input_layernorm.weight,
                hidden_norm_weight=self.hidden_norm.weight,
                eps=self.hidden_norm.variance_epsilon,
                residual="post_norm" if self._post_norm_residual else "pre_norm",
            )
        normed = self.hidden_norm(hidden_states)
        residual = normed if self._post_norm_residual else hidden_states
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), residual


def built_rope(spec: DraftSpec) -> dict[str, Any]:
    """Spell the draft's rope as SGLang's rotary embeddings read it, with the factors on cosine and sine in it.

    Left to itself SGLang would compute them from the length of its tables, which follows the target's context, and
    it looks for ``attention_factor`` under other names.
    """
    rope = host_config.rope_parameters(spec)
    factor = rope.pop("attention_factor", None)
    if rope["rope_type"] == "yarn" and factor is not None:
        weights = (rope["mscale"], rope["mscale_all_dim"]) if "mscale" in rope else (1.0, 0.0)
        over, under = (0.1 * weight * math.log(rope["factor"]) + 1.0 for weight in weights)
        rope["attn_factor"] = factor * under / over
    elif rope["rope_type"] == "longrope":
        length = rope["original_max_position_embeddings"]
        stretch = max(rope.pop("factor", spec.max_position_embeddings / length), 1.0)
        if factor is None:
            factor = math.sqrt(1 + math.log(stretch) / math.log(length))
        rope["short_mscale"] = rope["long_mscale"] = factor
    return rope


class DraftModel(nn.Module):
    """Embedding, fc and decoder layers of the draft."""

    def __init__(
        self, config: Any, quant_config: Any, prefix: str, *, plan: AssemblyPlan, layer_class: type[DraftLayer]
    ) -> None:
        super().__init__()
        spec = plan.spec
        self.config = config
        self.plan = plan
        self.vocab_size = config.vocab_size
        self.is_mrope_enabled = "mrope_section" in (spec.rope.scaling or {})
        config.rope_parameters = built_rope(spec)
        # A length beside the object would replace the one in it.
        config.original_max_position_embeddings = config.rope_parameters.get("original_max_position_embeddings")
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=add_prefix("embed_tokens", prefix)
        )
        self.num_aux_hidden_states = spec.num_sources
        embeds = self.embed_tokens.weight
        method = None if quant_config is None else quant_config.get_name()
        self.operators = choose_operators(embeds.device, embeds.dtype, config.hidden_size, method)
        self.fc: Any = None
        self.fc_norm: Any = None
        self.input_norm: Any = None
        self.fc_is_sharded = False
        self._norm_weight: torch.Tensor | None = None
        if spec.fc_in is not None:
            self._make_projection(spec, spec.fc_in, add_prefix("fc", prefix))
        with layer_stack():
            self.layers = nn.ModuleList(
                layer_class(config, i, quant_config, prefix, spec=spec, operators=self.operators)
                for i in range(spec.attention.num_layers)
            )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if spec.norms.final_norm else None
        self.norm_output = spec.norms.recurrent_state == "post_norm"
        self._fc_weight: torch.Tensor | None = None
        self._fc_scale: torch.Tensor | None = None

    @property
    def fused(self) -> bool:
        """Whether ``fc_proj``, kernel or twin, computes the projection."""
        return self.operators.fc_proj is not None

    @property
    def computed_by(self) -> str:
        """Which operators compute the draft, and how the projection lies over the ranks, for the log."""
        ranks, width = get_parallel().tp_size, self.config.hidden_size
        if ranks == 1 or self.fc is None:
            return self.operators.text
        if self.fc_is_sharded:
            return f"{self.operators.text}; fc: {width // ranks} of {width} columns on each of {ranks} ranks"
        why = f", which do not divide {width} columns" if self.fused else ""
        return f"{self.operators.text}; fc: whole on each of {ranks} ranks{why}"

    def _make_projection(self, spec: DraftSpec, fc_in: int, prefix: str) -> None:
        """Make fc and the norms before it; under tensor parallelism each rank keeps its share of fc's columns."""
        width, ranks, eps = self.config.hidden_size, get_parallel().tp_size, self.config.rms_norm_eps
        self.fc_is_sharded = self.fused and ranks > 1 and width % ranks == 0
        if self.fc_is_sharded:
            self.fc = ColumnParallelLinear(fc_in, width, bias=spec.fc_bias, gather_output=True, prefix=prefix)
        else:
            self.fc = nn.Linear(fc_in, width, bias=spec.fc_bias)
        if spec.norms.around_fc == "concatenation":
            self.input_norm = RMSNorm(fc_in, eps=eps)
            self._norm_weight = self.input_norm.weight.data
        elif spec.norms.around_fc == "per_source":
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target_hidden_size, eps=eps) for _ in range(spec.num_sources))
            if self.fused:
                # The norms hold the rows of one tensor, which fc_proj reads as it is after any update of weights.
                self._norm_weight = torch.stack([norm.weight.data for norm in self.fc_norm])
                for norm, row in zip(self.fc_norm, self._norm_weight, strict=True):
                    norm.weight.data = row

    def prepare_projection(self) -> None:
        """Copy the fc weight into the dtype that the projection reads; call after every weight update."""
        if self.fc is None or not (self.operators.float32_weight or self.operators.fp8_weight):
            return
        if self.operators.float32_weight:
            self._fc_weight = self.fc.weight.detach().float()
            return
        weight, scale = quantise_fc_weight(self.fc.weight.detach())
        if self._fc_weight is None or self._fc_scale is None:
            self._fc_weight, self._fc_scale = weight, scale
        else:  # CUDA graphs remember the memory
            self._fc_weight.copy_(weight)
            self._fc_scale.copy_(scale)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Map captured states [T, K*M], in capture order, to the draft's width [T, E]."""
        if self.fc is None:
            return states
        if self.operators.fc_proj is not None:
            projected = self.operators.fc_proj(
                states.to(self.fc.weight.dtype),
                self.fc.weight if self._fc_weight is None else self._fc_weight,
                norm=self.plan.spec.norms.around_fc,
                norm_weight=self._norm_weight,
                eps=self.config.rms_norm_eps,
                bias=self.fc.bias,
                weight_scale=self._fc_scale,
                num_sources=self.num_aux_hidden_states,
            )
            return self.fc.tp_group.all_gather(projected) if self.fc_is_sharded else projected
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            blocks = states.chunk(self.num_aux_hidden_states, dim=-1)
            states = torch.cat([n(block) for n, block in zip(self.fc_norm, blocks, strict=True)], dim=-1)
        return self.fc(states)

    def _embed(self, input_ids: torch.Tensor, forward_batch: Any, input_embeds: torch.Tensor | None) -> torch.Tensor:
        if input_embeds is not None:
            return input_embeds
        mode = forward_batch.forward_mode
        embeds = forward_batch.mm_input_embeds
        if mode.is_extend() and forward_batch.contains_mm_inputs() and not mode.is_draft_extend_v2():
            if embeds is None:
                raise RuntimeError(
                    f"{self.plan.spec.path}: got a multimodal prefill without embeddings; expected those of the "
                    "target. This is a fault of the serving path; please report it."
                )
            # The rows are shifted by one token: only each request's newest row has no embedding yet.
            newest = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).long()
            embeds[newest] = self.embed_tokens(input_ids[newest])
        return self.embed_tokens(input_ids) if embeds is None else embeds

    def _incoming(self, forward_batch: Any) -> torch.Tensor:
        """Return the draft's hidden input [T, E], projected in a feature pass, as it is in a recurrent one.

        Raises:
            ValueError: its width is not the one this pass must have.
        """
        states = forward_batch.spec_info.hidden_states
        mode = forward_batch.forward_mode
        width = self.config.hidden_size
        if states.shape[0] == 0:
            return states.new_empty((0, width))
        spec = self.plan.spec
        if mode in _FEATURE_PASSES:
            expected = spec.fc_in if spec.fc_in is not None else spec.hidden_size
            if states.shape[-1] != expected:
                raise ValueError(
                    f"{spec.path}: got target states of width {states.shape[-1]} in a {mode.name} pass; expected "
                    f"{expected} ({spec.num_sources} sources of width {spec.target_hidden_size}). "
                    "Serve this draft with --speculative-algorithm EAGLE3."
                )
            return self.project(states)
        if mode in _RECURRENT_PASSES:
            if states.shape[-1] != width:
                raise ValueError(
                    f"{spec.path}: got a recurrent state of width {states.shape[-1]}; expected {width}. "
                    "This is a fault of the serving path; please report it."
                )
            return states
        raise UnsupportedError(
            f"{spec.path}: an EAGLE-3 draft has no {mode.name} pass; expected one of "
            f"{', '.join(m.name for m in sorted(_FEATURE_PASSES | _RECURRENT_PASSES))}. Serve it with "
            "--speculative-algorithm EAGLE3."
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run one feature or recurrent pass.

        Returns:
            (state the head reads [T, E], [state the next recurrent pass receives [T, E]]).
        """
        del pp_proxy_tensors
        embeds = self._embed(input_ids, forward_batch, input_embeds)
        if self.is_mrope_enabled and forward_batch.mrope_positions is not None:
            positions = forward_batch.mrope_positions
        hidden_states = self._incoming(forward_batch)
        if hidden_states.shape[0] == 0:
            return hidden_states, [hidden_states]
        residual: Any = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, embeds, hidden_states, forward_batch, residual)
        if self.norm is None:
            state = hidden_states + residual
            return state, [state]
        to_head, before_norm = self.norm(hidden_states, residual)
        return to_head, [to_head if self.norm_output else before_norm]


class ServedDraft(nn.Module):
    """Serve an EAGLE-3 draft by its plan; comes before SGLang's own class in a class's bases.

    Attributes:
        layer_class: of its decoder layers.
        stacked: part of a canonical name -> the parameter it is stored in with others, and which part of it it is.
    """

    layer_class: ClassVar[type[DraftLayer]]
    stacked: Mapping[str, tuple[str, Any]]

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        key = getattr(config, host_config.DRAFT_KEY, None)
        plan = host_config.plan_of(key) if key is not None else None
        nn.Module.__init__(self)
        if plan is None:
            raise UnsupportedError(
                "an EAGLE-3 draft reached its model class before its target was known; expected SGLang to "
                "resolve the target first. Run: sglang-eagle3 doctor"
            )
        spec = plan.spec
        self.plan = plan
        self.config = config
        self.quant_config = quant_config
        self.pp_group = get_parallel().pp_group
        self.model = DraftModel(
            config, quant_config, add_prefix("model", prefix), plan=plan, layer_class=self.layer_class
        )
        self.load_lm_head_from_target = spec.lm_head == "target"
        if spec.lm_head == "tied":
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                spec.vocab.draft,
                config.hidden_size,
                quant_config=quant_config,
                prefix=add_prefix("lm_head", prefix),
            )
        config.draft_vocab_size = spec.vocab.draft
        logits_config = copy.deepcopy(config)
        logits_config.vocab_size = spec.vocab.draft
        self.logits_processor = LogitsProcessor(logits_config)
        self.capture_aux_hidden_states = True
        self.hot_token_id: torch.Tensor | None = None
        self.embed_origin = "the target's"
        self._first_load = True
        self._shared: set[str] = set()

    # ---- weights ------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Place the tensors of a checkpoint, or of a later partial update, and prove it on the first load.

        Raises:
            CheckpointError: a tensor has no home, a parameter has no tensor, or a value is not finite.
        """
        spec = self.plan.spec
        params = dict(self.named_parameters())
        filled: set[tuple[str, Any]] = set()
        seen: set[str] = set()
        problems: list[str] = []
        blocks: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            seen.add(name)
            canonical = spec.weights.get(name)
            if not self._first_load and (
                canonical is None or canonical in self._shared or tuple(tensor.shape) != spec.tensors[name].shape
            ):
                # A run-time update goes to target and draft alike; what is the target's alone, or shared with
                # it, is placed there.
                logger.debug("%s: left to the target", name)
                continue
            if canonical is None:
                problems.append(
                    f"{spec.path}:{name}: has no home in this draft; expected a known tensor name. Send tensors of "
                    "this draft."
                )
                continue
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                problems.append(
                    f"{spec.path}:{name}: holds values that are not finite; expected numbers. Re-export the draft."
                )
            if canonical == "d2t":
                self.hot_token_id = self._target_ids(tensor)
            if canonical in ("d2t", "t2d") or canonical.startswith("ignored/"):
                continue
            if canonical.startswith("fc_norm."):
                blocks[canonical] = tensor
                continue
            self._place(params, canonical, self.arranged(canonical, tensor), filled, problems)
        for index, tensor in enumerate(self._permuted_norms(blocks, problems)):
            self._place(params, f"fc_norm.{index}.weight", tensor, filled, problems)
        if self._first_load:
            problems += self._ledger(params, filled, seen)
            self._first_load = False
        self.finish_load()
        if problems:
            raise CheckpointError("\n".join(problems))

    def arranged(self, canonical: str, tensor: torch.Tensor) -> torch.Tensor:
        """Bring rows and columns of a tensor of the file into the order in which it is served."""
        if canonical in ("fc.weight", "input_norm.weight"):
            return assembly.permute_fc_weight(tensor, self.plan)
        return tensor

    def finish_load(self) -> None:
        """Compute what the passes read in the place of weights; called after every weight update."""
        self.model.prepare_projection()

    def _target_ids(self, d2t: torch.Tensor) -> torch.Tensor | None:
        kind = self.plan.spec.vocab.map
        if kind == "none":
            return None
        ids = d2t.to(torch.int64)
        return ids + torch.arange(ids.shape[0]) if kind == "offset" else ids

    def _permuted_norms(self, blocks: dict[str, torch.Tensor], problems: list[str]) -> list[torch.Tensor]:
        if not blocks:
            return []
        names = [f"fc_norm.{i}.weight" for i in range(self.plan.spec.num_sources)]
        absent = [n for n in names if n not in blocks]
        if absent:
            problems.append(
                f"{self.plan.spec.path}: got {len(blocks)} of {len(names)} per-source norms, {', '.join(absent)} "
                "missing; expected all of them together, since they change places with their fc blocks. Send them "
                "together."
            )
            return []
        return assembly.permute_blocks([blocks[n] for n in names], self.plan)

    def _place(
        self,
        params: dict[str, nn.Parameter],
        canonical: str,
        tensor: torch.Tensor,
        filled: set[tuple[str, Any]],
        problems: list[str],
    ) -> None:
        """Load one tensor into its parameter, or into its shard of a fused one."""
        parts = canonical.split(".")
        shard: Any = None
        for i, part in enumerate(parts):
            if part in self.stacked:
                parts[i], shard = self.stacked[part]
        name = ".".join(parts)
        if not name.startswith("lm_head."):
            name = f"model.{name}"
        if name not in params:
            problems.append(
                f"{self.plan.spec.path}:{canonical}: the model has no parameter {name}; expected the plan and the "
                "model class to agree. This is a fault of sglang-eagle3-ext; please report it."
            )
            return
        self.load_part(params[name], tensor, shard)
        filled.add((name, shard))

    def load_part(self, param: nn.Parameter, tensor: torch.Tensor, shard: Any) -> None:
        """Load a tensor into its parameter, or into its part of one that holds several."""
        loader = getattr(param, "weight_loader", default_weight_loader)
        if shard is None:
            loader(param, tensor)
        else:
            loader(param, tensor, shard)

    def _ledger(self, params: dict[str, nn.Parameter], filled: set[tuple[str, Any]], seen: set[str]) -> list[str]:
        """Compare what the model needs with what the file gave."""
        spec = self.plan.spec
        expected: set[tuple[str, Any]] = set()
        parts: dict[str, tuple[Any, ...]] = {}
        for whole, shard in self.stacked.values():
            parts[whole] = (*parts.get(whole, ()), shard)
        for name in params:
            if name == "model.embed_tokens.weight" and spec.embed == "target":
                continue
            if name == "lm_head.weight" and spec.lm_head == "target":
                continue
            expected |= {(name, shard) for shard in parts.get(name.split(".")[-2], (None,))}
        problems = [
            f"{spec.path}: parameter {name}{'' if shard is None else f' (shard {shard})'} got no tensor; expected one "
            "in the file. Re-export the draft with all its weights."
            for name, shard in sorted(expected - filled, key=str)
        ]
        problems += [
            f"{spec.path}:{name}: got no such tensor, which the file's header announces; expected all of them. Copy or "
            "export the draft again."
            for name in sorted(set(spec.weights) - seen)
        ]
        return problems

    # ---- what is shared with the target -------------------------------------------------------------------

    def set_embed(self, embed: torch.Tensor) -> None:
        """Share the target's embedding, unless the draft was trained with another one of its own."""
        spec = self.plan.spec
        if spec.embed == "own":
            own = self.model.embed_tokens.weight
            same = own.shape == embed.shape and torch.equal(own.data, embed.data.to(own.dtype))
            if not _all_ranks(same, own.device):
                self.embed_origin = "its own"
                return
            self.embed_origin = "the target's (its own is equal)"
        del self.model.embed_tokens.weight
        self.model.embed_tokens.weight = embed
        self._shared.add("embed_tokens.weight")

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Share the target's embedding and, for a draft without a head, its head."""
        self.set_embed(embed)
        if self.load_lm_head_from_target:
            del self.lm_head.weight
            self.lm_head.weight = head
            self._shared.add("lm_head.weight")


def _all_ranks(holds: bool, device: torch.device) -> bool:
    """Say whether something that each rank sees of its own shard holds on all of them."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return holds
    return bool(parallel.tp_group.all_gather(torch.tensor([int(holds)], device=device)).all())
