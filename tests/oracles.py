"""Float64 oracles written from the definitions, and the one tolerance policy of the kernel tests.

Nothing here is shared with the code under test: loops and sums as the formulas read, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sglang_eagle3_ext.spec import DraftSpec


def rms_norm_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Divide each row by the root of its mean square and scale it, one row at a time."""
    out = np.empty_like(x, dtype=np.float64)
    for i, row in enumerate(x.astype(np.float64)):
        out[i] = row / math.sqrt(sum(v * v for v in row) / len(row) + eps) * weight.astype(np.float64)
    return out


def fc_proj_oracle(
    sources: Sequence[np.ndarray],
    weight: np.ndarray,
    *,
    norm: str,
    norm_weight: np.ndarray | None,
    eps: float,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Sum ``norm_k(x_k) W_k^T`` source by source, each with its own column block of the weight."""
    width = sources[0].shape[1]
    blocks = [s.astype(np.float64) for s in sources]
    if norm == "per_source":
        assert norm_weight is not None
        blocks = [rms_norm_oracle(b, norm_weight[k], eps) for k, b in enumerate(blocks)]
    elif norm == "concatenation":
        assert norm_weight is not None
        total = rms_norm_oracle(np.concatenate(blocks, axis=1), norm_weight, eps)
        blocks = [total[:, k * width : (k + 1) * width] for k in range(len(blocks))]
    y = np.zeros((sources[0].shape[0], weight.shape[0]))
    for k, block in enumerate(blocks):
        y += np.einsum("tm,em->te", block, weight[:, k * width : (k + 1) * width].astype(np.float64))
    return y if bias is None else y + bias.astype(np.float64)


def as_float64(t: torch.Tensor) -> np.ndarray:
    """Promote a tensor of any floating dtype exactly."""
    return t.detach().to(torch.float64).numpy()


def assert_within_budget(
    actual: torch.Tensor,
    low_precision_eager: torch.Tensor,
    oracle: np.ndarray,
    *,
    reductions: Sequence[int],
) -> None:
    """Hold the error of ``actual`` to twice that of plain eager code in the same dtype, plus rounding.

    Args:
        actual: what the code under test returned.
        low_precision_eager: the same computation written in eager PyTorch in the same dtype.
        oracle: the float64 truth.
        reductions: lengths of the sums behind each element; float32 sums of n terms may differ by order.
    """
    assert actual.dtype == low_precision_eager.dtype
    assert tuple(actual.shape) == oracle.shape
    assert torch.isfinite(actual).all()
    scale = float(np.abs(oracle).max()) if oracle.size else 0.0
    output_rounding = torch.finfo(actual.dtype).eps / 2 * scale
    acc_eps = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps
    order = acc_eps * sum(math.sqrt(n) for n in reductions) * scale
    error = float(np.abs(as_float64(actual) - oracle).max()) if oracle.size else 0.0
    eager = float(np.abs(as_float64(low_precision_eager) - oracle).max()) if oracle.size else 0.0
    budget = 2 * eager + output_rounding + order
    assert error <= budget, f"error {error:.3e} exceeds budget {budget:.3e} (eager {eager:.3e})"


def project_oracle(spec: DraftSpec, w: Mapping[str, np.ndarray], features: np.ndarray) -> np.ndarray:
    """Turn the target's states into the draft's hidden input, as training does."""
    if spec.num_sources == 0:
        return features
    m = spec.target_hidden_size
    norm_weight = None
    if spec.norms.around_fc == "per_source":
        norm_weight = np.stack([w[f"fc_norm.{k}.weight"] for k in range(spec.num_sources)])
    elif spec.norms.around_fc == "concatenation":
        norm_weight = w["input_norm.weight"]
    return fc_proj_oracle(
        [features[:, k * m : (k + 1) * m] for k in range(spec.num_sources)],
        w["fc.weight"],
        norm=spec.norms.around_fc,
        norm_weight=norm_weight,
        eps=spec.rms_norm_eps,
        bias=w["fc.bias"] if spec.fc_bias else None,
    )


def draft_oracle(
    spec: DraftSpec,
    w: Mapping[str, np.ndarray],
    embeds: np.ndarray,
    hidden: np.ndarray,
    positions: Sequence[int],
    sees: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Run the draft's layers over rows of which each sees the rows that ``sees`` [T, T] grants it.

    Attention is one loop over rows, heads and keys; rotation multiplies complex numbers. Latent attention never expands
    its keys and values: scores and sums are taken over the latents themselves.

    Returns:
        Logits [T, draft vocabulary] and the state that recurs [T, E].
    """
    a, rows = spec.attention, range(len(embeds))
    for i in range(a.num_layers):
        at = f"layers.{i}"

        def linear(name: str, x: np.ndarray, at: str = at) -> np.ndarray:
            return x @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", 0.0)

        def norm(name: str, x: np.ndarray, at: str = at) -> np.ndarray:
            return rms_norm_oracle(x, w[f"{at}.{name}.weight"], spec.rms_norm_eps)

        if i == 0:
            normed = norm("hidden_norm", hidden)
            x = np.concatenate([norm("input_layernorm", embeds), normed], axis=1)
            residual = normed if spec.norms.residual == "post_norm" else hidden
        else:
            x, residual = norm("input_layernorm", hidden), hidden
        if a.latent is not None:
            mixed = _latent_attention(spec, w, f"{at}.self_attn", x, positions, sees)
            hidden = residual + linear("self_attn.o_proj", mixed)
            hidden = hidden + _mlp(spec, w, at, hidden)
            continue
        q = linear("self_attn.q_proj", x).reshape(-1, a.heads, a.head_dim)
        k = linear("self_attn.k_proj", x).reshape(-1, a.kv_heads, a.head_dim)
        v = linear("self_attn.v_proj", x).reshape(-1, a.kv_heads, a.head_dim)
        mixed = np.zeros((len(embeds), a.heads, a.head_dim))
        for t in rows:
            for h in range(a.heads):
                group = h // (a.heads // a.kv_heads)
                seen = [s for s in rows if sees[t, s]]
                if a.sliding_window is not None:
                    seen = [s for s in seen if positions[t] - positions[s] < a.sliding_window]
                query = _turned(spec, w, at, "q", q[t, h], positions[t])
                scores = [
                    float(query @ _turned(spec, w, at, "k", k[s, group], positions[s])) / math.sqrt(a.head_dim)
                    for s in seen
                ]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                for s, weight in zip(seen, weights, strict=True):
                    mixed[t, h] += weight / sum(weights) * v[s, group]
        hidden = residual + linear("self_attn.o_proj", mixed.reshape(len(embeds), -1))
        hidden = hidden + _mlp(spec, w, at, hidden)
    normed = hidden
    if spec.norms.final_norm:
        normed = rms_norm_oracle(hidden, w["norm.weight"], spec.rms_norm_eps)
    state = normed if spec.norms.recurrent_state == "post_norm" else hidden
    return normed @ w["lm_head.weight"].T, state


def _mlp(spec: DraftSpec, w: Mapping[str, np.ndarray], at: str, hidden: np.ndarray) -> np.ndarray:
    """Normalise and run the gated MLP."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{at}.mlp.{name}.weight"].T + w.get(f"{at}.mlp.{name}.bias", 0.0)

    x = rms_norm_oracle(hidden, w[f"{at}.post_attention_layernorm.weight"], spec.rms_norm_eps)
    gate = linear("gate_proj", x)
    return linear("down_proj", gate / (1 + np.exp(-gate)) * linear("up_proj", x))


def _latent_attention(
    spec: DraftSpec,
    w: Mapping[str, np.ndarray],
    at: str,
    x: np.ndarray,
    positions: Sequence[int],
    sees: np.ndarray,
) -> np.ndarray:
    """Attend over latents in the absorbed form; return [T, heads * value width]."""
    a, size, rows = spec.attention, spec.attention.latent, range(len(x))
    assert size is not None
    nope, rank = size.qk_nope_head_dim, size.kv_lora_rank

    def normed(name: str, y: np.ndarray) -> np.ndarray:
        return rms_norm_oracle(y, w[f"{at}.{name}.weight"], spec.rms_norm_eps)

    if size.q_lora_rank is None:
        q = x @ w[f"{at}.q_proj.weight"].T
    else:
        q = normed("q_a_layernorm", x @ w[f"{at}.q_a_proj.weight"].T) @ w[f"{at}.q_b_proj.weight"].T
    q = q.reshape(len(x), a.heads, nope + size.qk_rope_head_dim)
    both = x @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
    latents = normed("kv_a_layernorm", both[:, :rank])
    shared = [_turned_pairs(spec, both[t, rank:], positions[t]) for t in rows]
    up = w[f"{at}.kv_b_proj.weight"].reshape(a.heads, nope + size.v_head_dim, rank)
    out = np.zeros((len(x), a.heads, size.v_head_dim))
    for t in rows:
        for h in range(a.heads):
            query, turned = q[t, h, :nope] @ up[h, :nope], _turned_pairs(spec, q[t, h, nope:], positions[t])
            seen = [s for s in rows if sees[t, s]]
            scores = [float(query @ latents[s] + turned @ shared[s]) / math.sqrt(a.head_dim) for s in seen]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weight * latents[s] for s, weight in zip(seen, weights, strict=True)) / sum(weights)
            out[t, h] = up[h, nope:] @ total
    return out.reshape(len(x), -1)


def _turned_pairs(spec: DraftSpec, head: np.ndarray, position: int) -> np.ndarray:
    """Rotate the rotary part of a head, neighbours or halves together."""
    half = len(head) // 2
    out = head.copy()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if spec.rope.interleaved else (i, half + i)
        angle = position * spec.rope.theta ** (-i / half)
        turned = complex(head[first], head[second]) * complex(math.cos(angle), math.sin(angle))
        out[first], out[second] = turned.real, turned.imag
    return out


def _turned(
    spec: DraftSpec, w: Mapping[str, np.ndarray], at: str, which: str, head: np.ndarray, position: int
) -> np.ndarray:
    """Normalise one query or key head if the draft does, and rotate it to its position."""
    if spec.attention.qk_norm:
        weight = w[f"{at}.self_attn.{which}_norm.weight"]
        head = rms_norm_oracle(head[None], weight, spec.rms_norm_eps)[0]
    scaling = spec.rope.scaling or {}
    stretch = scaling["factor"] if scaling.get("rope_type") == "linear" else 1.0
    width = int(spec.attention.head_dim * spec.rope.partial_rotary_factor)
    half = width // 2
    out = head.copy()
    for i in range(half):
        angle = position / stretch * spec.rope.theta ** (-2 * i / width)
        turned = complex(head[i], head[half + i]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[half + i] = turned.real, turned.imag
    return out
