"""An EAGLE-3 draft in plain PyTorch: every variant that a ``DraftSpec`` can express, in float32 or float64.

It is the oracle that served drafts are compared with, and what ``probe`` runs. Nothing is fused, quantised or
approximated; a variant is one branch in one place.

Rows. Row ``p`` of a feature pass stands at position ``p``: it reads the target's states at position ``p``
and the embedding of token ``p + 1``, and predicts token ``p + 2``. A recurrent row that continues row ``p``
for the k-th time (k from 1) stands at position ``p + k``, reads the state of its predecessor and the token
proposed by it, and sees the feature rows ``0..p`` and its own predecessors, never later feature rows.

Dimensions: T rows, K sources, M target width, E draft width, HQ/HKV query and key heads, D width of a query or key
head, DV of a value head, S cached rows, R chains, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.formats import read_draft, read_tensors
from sglang_eagle3_ext.formats.folder import headers, load_tensors, locate
from sglang_eagle3_ext.spec import Attention, Boundary, DraftSpec, Latent, Rope

_ROWS_AT_ONCE = 512
"""Rows whose attention scores or logits are held at once; bounds memory, changes no result."""

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_TEXT_ROPES = ("default", "linear", "llama3", "yarn")
_LATENT_ROPES = ("default", "yarn", "deepseek_yarn")


@dataclass(frozen=True)
class Step:
    """What one pass of the draft leaves behind, row by row.

    Attributes:
        normed: [T, E], what the head reads.
        state: [T, E], what the next recurrent pass receives (``Norms.recurrent_state``).
        head: [V, E] over the draft vocabulary.
    """

    normed: Tensor
    state: Tensor
    head: Tensor

    @property
    def logits(self) -> Tensor:
        """Compute [T, V] over the draft vocabulary."""
        return F.linear(self.normed, self.head)

    def best(self) -> Tensor:
        """Return the [T] draft ids with the largest logit, without holding all logits at once."""
        return torch.cat([F.linear(rows, self.head).argmax(-1) for rows in torch.split(self.normed, _ROWS_AT_ONCE)])

    def __getitem__(self, rows: Any) -> Step:
        """Select rows."""
        return Step(self.normed[rows], self.state[rows], self.head)


class KVCache:
    """Keys and values of the rows a draft has seen, per layer, and the positions they stand at.

    Those of latent attention are kept in full, head by head; a server keeps the latents that they are made of.
    """

    def __init__(self, spec: DraftSpec, dtype: torch.dtype) -> None:
        a = spec.attention
        value_dim = a.head_dim if a.latent is None else a.latent.v_head_dim
        self.keys = [torch.empty(0, a.kv_heads, a.head_dim, dtype=dtype) for _ in range(a.num_layers)]
        self.values = [torch.empty(0, a.kv_heads, value_dim, dtype=dtype) for _ in range(a.num_layers)]
        self.positions = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Count the cached rows."""
        return len(self.positions)

    def crop(self, length: int) -> None:
        """Forget every row after the first ``length``, as the server does after drafting."""
        self.keys = [k[:length] for k in self.keys]
        self.values = [v[:length] for v in self.values]
        self.positions = self.positions[:length]


_Norm = Callable[[Tensor, Tensor], Tensor]
_Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _GroupedQuery:
    """Attention in which every key head serves a group of query heads."""

    head_dim: int
    q: _Linear
    k: _Linear
    v: _Linear
    o: _Linear
    q_norm: Tensor | None
    k_norm: Tensor | None

    def heads(self, x: Tensor, norm: _Norm, rotate: _Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries [T, HQ, D], keys [T, HKV, D] and values [T, HKV, D]."""
        q, k, v = (torch.unflatten(proj(x), -1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm(q, self.q_norm), norm(k, self.k_norm)
        return rotate(q), rotate(k), v


@dataclass(frozen=True)
class _LatentAttention:
    """Attention whose keys and values are made of a latent, and a part of the key that all heads share."""

    latent: Latent
    q_a: _Linear | None
    q_a_norm: Tensor | None
    q: _Linear
    kv_a: _Linear
    kv_a_norm: Tensor
    kv_b: _Linear
    o: _Linear

    def heads(self, x: Tensor, norm: _Norm, rotate: _Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries [T, HQ, D], keys [T, HQ, D] and values [T, HQ, DV]."""
        size = self.latent
        parts = [size.qk_nope_head_dim, size.qk_rope_head_dim]
        squeezed = x if self.q_a is None or self.q_a_norm is None else norm(self.q_a(x), self.q_a_norm)
        q, q_rope = torch.unflatten(self.q(squeezed), -1, (-1, sum(parts))).split(parts, dim=-1)
        latent, k_rope = self.kv_a(x).split([size.kv_lora_rank, size.qk_rope_head_dim], dim=-1)
        kv = torch.unflatten(self.kv_b(norm(latent, self.kv_a_norm)), -1, (q.shape[1], -1))
        k, v = kv.split([size.qk_nope_head_dim, size.v_head_dim], dim=-1)
        shared = rotate(k_rope[:, None]).expand_as(q_rope)
        return torch.cat([q, rotate(q_rope)], dim=-1), torch.cat([k, shared], dim=-1), v


@dataclass(frozen=True)
class _Layer:
    """One decoder layer. ``embed_norm`` exists in the first layer only, which reads the embedding as well."""

    embed_norm: Tensor | None
    hidden_norm: Tensor
    attention: _GroupedQuery | _LatentAttention
    mlp_norm: Tensor
    gate: _Linear
    up: _Linear
    down: _Linear


class ReferenceDraft:
    """A draft that can be run row by row.

    Args:
        spec: what the draft is.
        tensors: canonical name -> tensor (``DraftSpec.weights`` lists the names), any floating dtype.
        embed: [V, E] embedding of the target, needed where ``spec.embed`` is ``target``.
        lm_head: [V, E] head of the target, needed where ``spec.lm_head`` is ``target``.
        dtype: dtype of all arithmetic; float32 or float64.

    Raises:
        CheckpointError: tensors are missing or their shapes contradict the spec; lists all of them.
        UnsupportedError: the spec describes something that is not implemented here.
    """

    def __init__(
        self,
        spec: DraftSpec,
        tensors: Mapping[str, Tensor],
        *,
        embed: Tensor | None = None,
        lm_head: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _refuse_unsupported(spec)
        self.spec = spec
        self.dtype = dtype
        read = _TensorReader(spec, tensors, dtype)
        width, fc_in, norms = spec.hidden_size, spec.num_sources * spec.target_hidden_size, spec.norms
        self._fc = read.linear("fc", width, fc_in, spec.fc_bias) if spec.num_sources else None
        self._source_norms = None
        if norms.around_fc == "per_source":
            names = [f"fc_norm.{k}.weight" for k in range(spec.num_sources)]
            self._source_norms = torch.stack([read.vector(name, spec.target_hidden_size) for name in names])
        self._input_norm = None
        if norms.around_fc == "concatenation":
            self._input_norm = read.vector("input_norm.weight", fc_in)
        self._layers = [_read_layer(spec, i, read) for i in range(spec.attention.num_layers)]
        self._final_norm = read.vector("norm.weight", width) if norms.final_norm else None
        self._to_target = None
        if spec.vocab.map != "none":
            ids = read.stored("d2t", spec.vocab.draft).to(torch.int64)
            self._to_target = ids + torch.arange(len(ids)) if spec.vocab.map == "offset" else ids
        # The embedding keeps its stored dtype (it can be gigabytes); a row is promoted when it is looked up.
        self.embed = read.end("embed_tokens.weight", spec.embed == "own", embed)
        borrowed = self.embed if spec.lm_head == "tied" else lm_head
        head = read.end("lm_head.weight", spec.lm_head == "own", borrowed)
        read.check_rows_of_head(head)
        if read.problems:
            raise CheckpointError("\n".join(read.problems))
        # A head of the target's, or one tied to its embedding, spans the target's vocabulary.
        spans_target = spec.lm_head != "own" and len(head) > spec.vocab.draft and self._to_target is not None
        self.head = (head[self._to_target] if spans_target else head[: spec.vocab.draft]).to(dtype)
        self._activation = _ACTIVATIONS[spec.hidden_act]
        self._inv_freq, self._rope_factor = _rope_frequencies(spec, dtype)
        self._scale = _softmax_scale(spec)

    def project(self, features: Tensor) -> Tensor:
        """Turn the target's states into the draft's hidden input: the norms around ``fc``, and ``fc``.

        Args:
            features: [T, K*M] in fc column order; for a draft without ``fc`` [T, E], returned as it is.

        Returns:
            [T, E].
        """
        spec = self.spec
        width = spec.fc_in if self._fc is not None else spec.hidden_size
        if features.dim() != 2 or features.shape[1] != width:
            raise ValueError(
                f"features: got {list(features.shape)}; expected [T, {width}], {spec.num_sources} sources of"
                f" {spec.target_hidden_size}. Capture the sources that the draft was trained on."
            )
        x = features.to(self.dtype)
        if self._fc is None:
            return x
        if self._source_norms is not None:
            x = self._norm(torch.unflatten(x, -1, (spec.num_sources, spec.target_hidden_size)), self._source_norms)
            x = x.flatten(-2)
        if self._input_norm is not None:
            x = self._norm(x, self._input_norm)
        return self._fc(x)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: KVCache) -> Step:
        """Run rows after those in the cache, each seeing the rows before it, and add them to the cache.

        Args:
            tokens: [T] target ids, the token whose embedding each row reads.
            hidden: [T, E]: projected features, or the ``state`` of an earlier step.
            positions: [T] positions for the rotary embedding and the sliding window.
            cache: grows by T rows.

        Returns:
            The step of the T rows.
        """
        past = len(cache)
        cache.positions = torch.cat([cache.positions, positions])
        earlier = torch.arange(past + len(tokens)) <= torch.arange(past, past + len(tokens))[:, None]
        visible = earlier & self._in_window(positions[:, None] - cache.positions)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer] = torch.cat([cache.keys[layer], k])
            cache.values[layer] = torch.cat([cache.values[layer], v])
            return _attention(q, cache.keys[layer], cache.values[layer], visible, self._scale)

        return self._run(tokens, hidden, positions, attend)

    def feature_pass(self, hidden: Tensor, tokens: Tensor) -> tuple[Step, KVCache]:
        """Run every feature row of a sequence at once.

        Args:
            hidden: at least [T-1, E] projected features; row p belongs to position p.
            tokens: [T] target ids of the sequence; row p reads token p+1.

        Returns:
            The step of the T-1 rows, and their cache.
        """
        rows = len(tokens) - 1
        if rows < 1 or hidden.dim() != 2 or len(hidden) < rows:
            raise ValueError(
                f"hidden: got {list(hidden.shape)} for {len(tokens)} tokens; expected a row for each token"
                " but the last. Capture all of them."
            )
        cache = KVCache(self.spec, self.dtype)
        return self.forward(tokens[1:], hidden[:rows], torch.arange(rows), cache), cache

    def propose_chain(self, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
        """Draft a chain after the last token, one pass after another, as a server does.

        Args:
            features: at least [T-1, K*M] states of the target, in fc column order.
            tokens: [T] target ids: the text, and the bonus token that the target produced last.
            steps: number of tokens to draft.

        Returns:
            [steps] target ids.
        """
        step, cache = self.feature_pass(self.project(features), tokens)
        step = step[-1:]
        proposed = [self.to_target(step.best())]
        for k in range(1, steps):
            position = torch.tensor([len(tokens) - 2 + k])
            step = self.forward(proposed[-1], step.state, position, cache)
            proposed.append(self.to_target(step.best()))
        return torch.cat(proposed)

    def propose_chains(self, hidden: Tensor, tokens: Tensor, steps: int, rows: Tensor | None = None) -> Tensor:
        """Draft a chain after many places of one sequence at once.

        Because a feature row sees only rows before it, one feature pass over the sequence serves every place;
        the recurrent passes of all chains then run side by side.

        Args:
            hidden: at least [T-1, E] projected features.
            tokens: [T] target ids of the sequence.
            steps: number of tokens to draft.
            rows: [R] feature rows to continue (row p drafts tokens p+2, p+3, ...); all of them by default.

        Returns:
            [R, steps] target ids.
        """
        step, cache = self.feature_pass(hidden, tokens)
        rows = torch.arange(len(cache)) if rows is None else rows
        chains = []
        for some in torch.split(rows, _ROWS_AT_ONCE):
            here, running = step[some], Chains(self, cache, some)
            proposed = [self.to_target(here.best())]
            for _ in range(1, steps):
                here = running.advance(proposed[-1], here.state)
                proposed.append(self.to_target(here.best()))
            chains.append(torch.stack(proposed, dim=1))
        return torch.cat(chains)

    def to_target(self, ids: Tensor) -> Tensor:
        """Translate draft ids to target ids."""
        return ids if self._to_target is None else self._to_target[ids]

    def _run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Step:
        """Run all layers; ``attend`` knows which keys the rows see."""
        norms = self.spec.norms
        hidden = hidden.to(self.dtype)
        cos, sin = self._rotary(positions)

        def rotate(x: Tensor) -> Tensor:
            return _rotate(x, cos, sin, self.spec.rope.interleaved)

        for i, layer in enumerate(self._layers):
            normed = x = self._norm(hidden, layer.hidden_norm)
            residual = hidden
            if layer.embed_norm is not None:
                embeds = self.embed[tokens].to(self.dtype)
                x = torch.cat([self._norm(embeds, layer.embed_norm), normed], dim=-1)  # [T, 2E]
                residual = normed if norms.residual == "post_norm" else hidden
            attended = attend(i, *layer.attention.heads(x, self._norm, rotate))
            hidden = residual + layer.attention.o(attended)
            x = self._norm(hidden, layer.mlp_norm)
            hidden = hidden + layer.down(self._activation(layer.gate(x)) * layer.up(x))
        normed = hidden if self._final_norm is None else self._norm(hidden, self._final_norm)
        return Step(normed, normed if norms.recurrent_state == "post_norm" else hidden, self.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps) * weight

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, 1, rotary width]."""
        angles = positions.to(self.dtype)[:, None] * self._inv_freq
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos() * self._rope_factor, angles.sin() * self._rope_factor

    def _in_window(self, distance: Tensor) -> Tensor:
        """Say which keys are near enough, given how many positions they lie before the query."""
        window = self.spec.attention.sliding_window
        return torch.ones_like(distance, dtype=torch.bool) if window is None else distance < window


class Chains:
    """Recurrent passes that continue many feature rows of one sequence side by side.

    Args:
        draft: the draft.
        cache: of the feature pass; read, never written.
        rows: [R] feature rows that the chains continue.
    """

    def __init__(self, draft: ReferenceDraft, cache: KVCache, rows: Tensor) -> None:
        self._draft = draft
        self._cache = cache
        self._rows = rows
        self._earlier = torch.arange(len(cache)) <= rows[:, None]  # [R, S]
        self._own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in cache.keys]
        self._depth = 0

    def advance(self, tokens: Tensor, state: Tensor) -> Step:
        """Run the next recurrent pass of every chain.

        Args:
            tokens: [R] target ids, the token each chain goes on with.
            state: [R, E], the ``state`` of the step before.

        Returns:
            The step of the R rows.
        """
        self._depth += 1
        positions = self._cache.positions[self._rows] + self._depth
        visible = self._earlier & self._draft._in_window(positions[:, None] - self._cache.positions)
        own_visible = self._draft._in_window(torch.arange(self._depth - 1, -1, -1)).expand(len(self._rows), -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._own[layer].append((k, v))
            keys, values = (torch.stack(part, dim=1) for part in zip(*self._own[layer], strict=True))
            own = (keys, values, own_visible)
            return _attention(q, self._cache.keys[layer], self._cache.values[layer], visible, self._draft._scale, own)

        return self._draft._run(tokens, state, positions, attend)


@dataclass(frozen=True)
class ChainResult:
    """Acceptance of chains, counted as SGLang counts it.

    Attributes:
        histogram: entry i counts the verify steps in which exactly i draft tokens were accepted.
        completion_tokens: tokens of the answers, the one that prefill produces included.
    """

    histogram: tuple[int, ...]
    completion_tokens: int

    @property
    def verify_steps(self) -> int:
        """Count the verify steps."""
        return sum(self.histogram)

    @property
    def accept_length(self) -> float:
        """Divide completion tokens by verify steps (``spec_accept_length``); NaN without a verify step."""
        return self.completion_tokens / self.verify_steps if self.verify_steps else math.nan

    @property
    def accept_per_position(self) -> tuple[float, ...]:
        """Give the share of verify steps in which draft token i was accepted, for each i."""
        if not self.verify_steps:
            return tuple(math.nan for _ in self.histogram[1:])
        return tuple(sum(self.histogram[i:]) / self.verify_steps for i in range(1, len(self.histogram)))

    def __add__(self, other: ChainResult) -> ChainResult:
        """Pool the counts of two results with the same number of steps."""
        if len(self.histogram) != len(other.histogram):
            raise ValueError(
                f"histogram: got {len(other.histogram) - 1} steps; expected {len(self.histogram) - 1}."
                " Pool results of the same number of steps."
            )
        counts = tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True))
        return ChainResult(counts, self.completion_tokens + other.completion_tokens)


def simulate_chain(
    draft: ReferenceDraft,
    tokens: Tensor,
    features: Tensor,
    prompt_length: int,
    steps: int,
    *,
    completion_tokens: int | None = None,
) -> ChainResult:
    """Replay how SGLang would have served one greedy answer with chains of ``steps`` draft tokens.

    Prefill runs the draft over the prompt with the bonus token as its last embedding. Each verify step then
    accepts the longest prefix of the chain that the target itself wrote, emits one bonus token more, and
    extends the draft over the newly committed rows with the target's true states; the rows of rejected drafts
    are forgotten. Serving ends with the verify step that reaches the last token of the answer.

    That last step is counted in full, as the server counts it: drafts beyond the end of the answer are
    accepted where the target would have gone on with them. Let ``tokens`` run ``steps`` past the answer,
    and say with ``completion_tokens`` where it ends; drafts beyond the known tokens count as rejected.

    Args:
        draft: the draft.
        tokens: [T] target ids: prompt and answer, generated greedily by the target.
        features: at least [T-1, K*M] states of the target at every position, in fc column order.
        prompt_length: tokens of the prompt.
        steps: draft tokens per chain (``--speculative-num-steps``; topk 1, one more draft token than steps).
        completion_tokens: length of the answer; everything after the prompt by default.

    Returns:
        The counts.
    """
    available = len(tokens) - prompt_length
    answer = available if completion_tokens is None else completion_tokens
    if prompt_length < 1 or not 1 <= answer <= available or steps < 1:
        raise ValueError(
            f"tokens: got {len(tokens)} with a prompt of {prompt_length}, an answer of {answer} and {steps}"
            " steps; expected at least one of each, and prompt and answer within the tokens. Correct the counts."
        )
    histogram = [0] * (steps + 1)
    if answer > 1:
        first_row = prompt_length - 1
        rows = torch.arange(first_row, prompt_length + answer - 2)
        chains = draft.propose_chains(draft.project(features[: len(tokens) - 1]), tokens, steps, rows)
        after = F.pad(tokens, (0, steps), value=-1).unfold(0, steps, 1)[rows + 2]  # [R, steps]
        accepted = (chains == after).long().cumprod(dim=1).sum(dim=1).tolist()
        emitted = 1
        while emitted < answer:
            count = accepted[emitted - 1]
            histogram[count] += 1
            emitted += count + 1
    return ChainResult(tuple(histogram), answer)


def final_norm(model: Any) -> torch.nn.Module:
    """Find the norm behind the last layer of a model of transformers; boundary n is its input.

    Args:
        model: a causal language model of transformers.

    Raises:
        UnsupportedError: its class keeps no norm where those of Llama's kind do.
    """
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise UnsupportedError(
            f"{model.config.name_or_path or type(model).__name__}: got {type(decoder).__name__} without a module named "
            "norm; expected one behind the last layer, at which the last boundary is caught. Let SGLang run this "
            "target (probe --sglang), or capture its states elsewhere (probe --features)."
        )
    return norm


def capture_hf(model_or_path: Any, tokens: Tensor | Sequence[int], boundaries: Sequence[Boundary]) -> Tensor:
    """Run a target in transformers and return its states at the given boundaries, side by side.

    ``hidden_states[b]`` of transformers is boundary b for every b below the number of layers n, but
    ``hidden_states[n]`` is the state after the final norm; boundary n is caught at the final norm's input.

    Args:
        model_or_path: a causal language model of transformers, or what ``from_pretrained`` takes (then run in
            float32).
        tokens: [T] token ids.
        boundaries: the states wanted, in the order wanted.

    Returns:
        [T, len(boundaries) * M] in the model's dtype.

    Raises:
        UnsupportedError: boundary n cannot be caught on this class.
    """
    if isinstance(model_or_path, (str, Path)):
        from transformers import AutoModelForCausalLM

        # The one form that leaves nothing out: "sdpa" drops Gemma-2's cap of the scores without a word.
        model_or_path = AutoModelForCausalLM.from_pretrained(
            model_or_path, dtype=torch.float32, attn_implementation="eager"
        )
    model = model_or_path
    layers = model.config.get_text_config().num_hidden_layers
    wrong = [b for b in boundaries if b != "final_norm" and not 0 <= int(b) <= layers]
    if wrong or not boundaries:
        raise ValueError(
            f"boundaries: got {list(boundaries)}; expected at least one, each in 0..{layers} or 'final_norm'. "
            "Correct them."
        )
    ids = torch.as_tensor(tokens, device=model.device).reshape(1, -1)
    before_norm: list[Tensor] = []
    hook = final_norm(model).register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    try:
        with torch.inference_mode():
            states = model.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    by_boundary: dict[Boundary, Tensor] = dict(enumerate(states.hidden_states[:layers]))
    by_boundary[layers] = before_norm[0]
    by_boundary["final_norm"] = states.last_hidden_state
    # A clone, because tensors of inference mode cannot be used where gradients are recorded.
    return torch.cat([by_boundary[b][0] for b in boundaries], dim=-1).clone()


def load(
    path_or_spec: str | Path | DraftSpec,
    *,
    target: str | Path | None = None,
    override: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> ReferenceDraft:
    """Read a draft from disk.

    Args:
        path_or_spec: folder or Hub id of the checkpoint, or what ``read_draft`` returned for it (as it is or
            changed; its findings are then the caller's affair).
        target: folder or Hub id of the target, from which a borrowed embedding or head is read.
        override: the ``eagle3_ext`` keys that win over the checkpoint's own, where a path is given.
        dtype: dtype of all arithmetic.
        embed: [V, E] embedding of the target, in place of reading it from ``target``.
        lm_head: [V, E] head of the target, likewise.

    Returns:
        The draft.

    Raises:
        CheckpointError: the checkpoint, alone or with this target, cannot be run as it stands.
        UnsupportedError: the draft is of a kind that is not implemented here.
    """
    if isinstance(path_or_spec, DraftSpec):
        spec = path_or_spec
    else:
        spec = read_draft(path_or_spec, override=override)
        if any(f.severity == "error" for f in spec.findings):
            raise CheckpointError.from_findings(spec.findings)
    if target is not None:
        embed, lm_head = borrowed(spec, target, embed=embed, lm_head=lm_head)
    return ReferenceDraft(spec, dict(read_tensors(spec)), embed=embed, lm_head=lm_head, dtype=dtype)


def borrowed(
    spec: DraftSpec, target: str | Path, *, embed: Tensor | None = None, lm_head: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Read what a draft borrows from its target, in the dtype in which it is stored there.

    Args:
        spec: the draft.
        target: folder or Hub id of the target.
        embed: the embedding, where it need not be read.
        lm_head: the head, likewise.

    Returns:
        The target's embedding [V, E] and its head [V, E]; ``None`` for what the draft has itself.

    Raises:
        CheckpointError: the target has no such tensor.
    """
    if spec.embed == "target" and embed is None:
        embed = _read_target_tensor(target, "embed_tokens.weight")
    if spec.lm_head == "target" and lm_head is None:
        lm_head = _read_target_tensor(target, "lm_head.weight")
    return embed, lm_head


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    own: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend to shared keys, and to keys of the row's own where there are any.

    Args:
        q: [T, HQ, D].
        keys: [S, HKV, D].
        values: [S, HKV, DV].
        visible: [T, S], which shared keys a row sees.
        scale: of the scores.
        own: keys [T, C, HKV, D] and values [T, C, HKV, DV] and their visibility [T, C].

    Returns:
        [T, HQ*DV].
    """
    shared = keys.shape[0]
    grouped = torch.unflatten(q, 1, (keys.shape[1], -1)) * scale  # [T, HKV, G, D]
    out = []
    for rows in torch.split(torch.arange(len(q)), _ROWS_AT_ONCE):
        scores = torch.einsum("thgd,shd->thgs", grouped[rows], keys)
        seen = visible[rows]
        if own is not None:
            scores = torch.cat([scores, torch.einsum("thgd,tchd->thgc", grouped[rows], own[0][rows])], dim=-1)
            seen = torch.cat([seen, own[2][rows]], dim=-1)
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(dim=-1)
        attended = torch.einsum("thgs,shd->thgd", weights[..., :shared], values)
        if own is not None:
            attended = attended + torch.einsum("thgc,tchd->thgd", weights[..., shared:], own[1][rows])
        out.append(attended.flatten(1))
    return torch.cat(out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first part of each head (all of it unless the rotary embedding is partial).

    Interleaved pairs come out as halves: scores do not depend on the order, which is that of queries and keys alike.
    """
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, kept], dim=-1)


def _rope_frequencies(spec: DraftSpec, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the inverse frequencies [rotary width / 2] and the factor on cosine and sine."""
    rope, latent = spec.rope, spec.attention.latent
    kind = _rope_kind(rope).removeprefix("deepseek_")
    width = spec.attention.head_dim if latent is None else latent.qk_rope_head_dim
    if kind in ("default", "linear"):
        width = int(width * rope.partial_rotary_factor)
        stretch = float((rope.scaling or {})["factor"]) if kind == "linear" else 1.0
        return 1.0 / (stretch * rope.theta ** (torch.arange(0, width, 2, dtype=dtype) / width)), 1.0
    # The other kinds are the business of transformers, which computes them in float32.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        **(rope.scaling or {}),
        "rope_type": kind,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial_rotary_factor,
    }
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.attention.heads,
        head_dim=width,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if latent is not None:
        # transformers reads the two factors only together, DeepSeek's code and SGLang each by itself.
        factor = _yarn_factor(rope, "mscale", 1.0) / _yarn_factor(rope, "mscale_all_dim", 0.0)
    return frequencies.to(dtype), float(factor)


def _yarn_factor(rope: Rope, key: str, absent: float) -> float:
    """Compute one of yarn's factors for attention (arXiv 2309.00071, section 3.4), as DeepSeek weighs it."""
    scaling = rope.scaling or {}
    factor, weight = float(scaling["factor"]), scaling.get(key)
    return 0.1 * (absent if weight is None else float(weight)) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _softmax_scale(spec: DraftSpec) -> float:
    """Return the factor on the scores of attention."""
    scale: float = spec.attention.head_dim**-0.5
    if spec.attention.latent is not None and _rope_kind(spec.rope) != "default":
        scale *= _yarn_factor(spec.rope, "mscale_all_dim", 0.0) ** 2
    return scale


def _rope_kind(rope: Rope) -> str:
    kind = str((rope.scaling or {}).get("rope_type", "default"))
    # On text every axis of a multimodal rotary embedding counts alike, which makes it the default one.
    return "default" if kind == "mrope" else kind


_MEASURE = "The reference computes no other; measure this draft with sglang-eagle3 bench."


def _refuse_unsupported(spec: DraftSpec) -> None:
    problems = []
    ropes = _TEXT_ROPES if spec.attention.latent is None else _LATENT_ROPES
    if spec.hidden_act not in _ACTIVATIONS:
        problems.append(
            f"{spec.path}: hidden_act: got {spec.hidden_act}; expected one of {', '.join(_ACTIVATIONS)}. {_MEASURE}"
        )
    if _rope_kind(spec.rope) not in ropes:
        problems.append(
            f"{spec.path}: rope_scaling: got {_rope_kind(spec.rope)}; expected one of {', '.join(ropes)}. {_MEASURE}"
        )
    if problems:
        raise UnsupportedError("\n".join(problems))


class _TensorReader:
    """Takes tensors out of a checkpoint and keeps count of those that are missing or do not fit.

    A tensor that does not fit is replaced by zeros, so that all problems can be told at once.
    """

    def __init__(self, spec: DraftSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._spec = spec
        self._tensors = tensors
        self._dtype = dtype
        self.problems: list[str] = []

    def stored(self, name: str, *shape: int) -> Tensor:
        """Take a tensor in the dtype it was stored in."""
        tensor = self._tensors.get(name)
        if tensor is not None and tuple(tensor.shape) == shape:
            return tensor
        got = "nothing" if tensor is None else list(tensor.shape)
        self._report(name, f"got {got}; expected {list(shape)} by the config. Correct either one.")
        return torch.zeros(shape)

    def vector(self, name: str, size: int) -> Tensor:
        """Take a norm's weight or a bias."""
        return self.stored(name, size).to(self._dtype)

    def linear(self, name: str, rows: int, columns: int, has_bias: bool) -> _Linear:
        """Take a linear layer, named without its suffix."""
        weight = self.stored(f"{name}.weight", rows, columns).to(self._dtype)
        return _Linear(weight, self.vector(f"{name}.bias", rows) if has_bias else None)

    def end(self, name: str, is_own: bool, borrowed: Tensor | None) -> Tensor:
        """Take the embedding or the head, which may be the target's."""
        tensor = self._tensors.get(name) if is_own else borrowed
        width = self._spec.hidden_size
        if tensor is not None and tensor.dim() == 2 and tensor.shape[1] == width:
            return tensor
        got = "nothing" if tensor is None else list(tensor.shape)
        whose = "the draft's own" if is_own else "the target's"
        advice = "Export it again" if is_own else "Name the target, or give the draft its own"
        self._report(name, f"got {got}; expected {whose}, {width} columns wide. {advice}.")
        return torch.zeros(max(self._spec.vocab.draft, self._spec.vocab.target), width)

    def check_rows_of_head(self, head: Tensor) -> None:
        """Check that the head reaches over the draft vocabulary."""
        draft = self._spec.vocab.draft
        if len(head) < draft:
            advice = "Correct draft_vocab_size."
            self._report("lm_head.weight", f"got {len(head)} rows; expected at least {draft}. {advice}")

    def _report(self, name: str, problem: str) -> None:
        self.problems.append(f"{self._spec.path}: {name}: {problem}")


def _read_layer(spec: DraftSpec, index: int, read: _TensorReader) -> _Layer:
    at, width = f"layers.{index}", spec.hidden_size
    # Layer 0 reads [embedding | hidden] and norms both; the others norm what they read as any decoder does.
    first = index == 0
    inputs = read.vector(f"{at}.input_layernorm.weight", width)
    read_attention = _read_grouped_query if spec.attention.latent is None else _read_latent
    return _Layer(
        embed_norm=inputs if first else None,
        hidden_norm=read.vector(f"{at}.hidden_norm.weight", width) if first else inputs,
        attention=read_attention(spec.attention, f"{at}.self_attn", 2 * width if first else width, width, read),
        mlp_norm=read.vector(f"{at}.post_attention_layernorm.weight", width),
        gate=read.linear(f"{at}.mlp.gate_proj", spec.intermediate_size, width, spec.mlp_bias),
        up=read.linear(f"{at}.mlp.up_proj", spec.intermediate_size, width, spec.mlp_bias),
        down=read.linear(f"{at}.mlp.down_proj", width, spec.intermediate_size, spec.mlp_bias),
    )


def _read_grouped_query(a: Attention, at: str, columns: int, width: int, read: _TensorReader) -> _GroupedQuery:
    """Read the attention of one layer, which reads ``columns`` and writes ``width``."""
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return _GroupedQuery(
        head_dim=a.head_dim,
        q=read.linear(f"{at}.q_proj", queries, columns, a.qkv_bias),
        k=read.linear(f"{at}.k_proj", keys, columns, a.qkv_bias),
        v=read.linear(f"{at}.v_proj", keys, columns, a.qkv_bias),
        o=read.linear(f"{at}.o_proj", width, queries, a.o_bias),
        q_norm=read.vector(f"{at}.q_norm.weight", a.head_dim) if a.qk_norm else None,
        k_norm=read.vector(f"{at}.k_norm.weight", a.head_dim) if a.qk_norm else None,
    )


def _read_latent(a: Attention, at: str, columns: int, width: int, read: _TensorReader) -> _LatentAttention:
    """Read the latent attention of one layer, likewise."""
    size = a.latent
    if size is None:
        raise ValueError("attention: got no latent sizes; expected those of an MLA draft. Read it anew.")
    rank, queries = size.q_lora_rank, a.heads * a.head_dim
    return _LatentAttention(
        latent=size,
        q_a=None if rank is None else read.linear(f"{at}.q_a_proj", rank, columns, False),
        q_a_norm=None if rank is None else read.vector(f"{at}.q_a_layernorm.weight", rank),
        q=(
            read.linear(f"{at}.q_proj", queries, columns, False)
            if rank is None
            else read.linear(f"{at}.q_b_proj", queries, rank, False)
        ),
        kv_a=read.linear(f"{at}.kv_a_proj_with_mqa", size.kv_lora_rank + size.qk_rope_head_dim, columns, False),
        kv_a_norm=read.vector(f"{at}.kv_a_layernorm.weight", size.kv_lora_rank),
        kv_b=read.linear(
            f"{at}.kv_b_proj", a.heads * (size.qk_nope_head_dim + size.v_head_dim), size.kv_lora_rank, False
        ),
        o=read.linear(f"{at}.o_proj", width, a.heads * size.v_head_dim, False),
    )


def _read_target_tensor(target: str | Path, suffix: str) -> Tensor:
    """Read the embedding or the head of a target; a target without a head of its own lends its embedding."""
    folder = locate(target, None)
    tensors = headers(folder, [])
    found = sorted((n for n in tensors if n == suffix or n.endswith(f".{suffix}")), key=len)
    if not found and suffix == "lm_head.weight":
        return _read_target_tensor(folder, "embed_tokens.weight")
    if not found:
        raise CheckpointError(
            f"{folder}: got {len(tensors)} tensors, none of which ends in {suffix}; expected the target's"
            " own. Check that it is a causal language model, or pass the tensor instead."
        )
    return next(load_tensors(folder, {found[0]: tensors[found[0]]}))[1]
