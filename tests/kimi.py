"""Kimi-K2.5 in miniature: the wrapper's files with random weights, its greedy text, and drafts trained on that text.

The configuration has the structure of the public one (61 layers, the first one dense, sigmoid routing with a bias,
latent attention under yarn, a vision tower and its projector beside the text model) in tiny sizes. Everything is made
from a seed, so what a test trains is the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.formats import read_draft, read_tensors
from sglang_eagle3_ext.reference import ReferenceDraft

LAYERS, VOCAB, M = 61, 64, 32

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": M,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
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
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

VISION: dict[str, Any] = {
    "patch_size": 4,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vt_hidden_size": 16,
    "mm_hidden_size": 16,
    "text_hidden_size": M,
}

SOURCES = ["embed", "layer3", "layer31"]
BOUNDARIES = (0, 4, 32)
"""What the drafts are trained on, as a user names it and as boundaries."""


def make_target(layers: int = LAYERS, seed: int = 0) -> Any:
    """Make the text model in transformers, with fewer layers if need be.

    What a layer adds is small beside the embedding, so that greedy text wanders instead of running in a circle, and
    half of what comes next depends on the last token alone, which a draft can learn in seconds.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    fields = TEXT | {"num_hidden_layers": layers}
    scaling, theta = fields.pop("rope_scaling"), fields.pop("rope_theta")
    fields["rope_parameters"] = {**scaling, "rope_type": scaling["type"], "rope_theta": theta}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.normal_(1, 0.1, generator=generator)
            else:
                share = 0.12 if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else 1.0
                parameter.normal_(0, share * parameter.shape[-1] ** -0.5, generator=generator)
        model.model.embed_tokens.weight.normal_(generator=generator)
        for layer in model.model.layers[TEXT["first_k_dense_replace"] :]:
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.1, generator=generator)
    return model


class Text(NamedTuple):
    """What the target wrote behind a prompt.

    Attributes:
        ids: [T] tokens of prompt and answer; the states of the last one are not known.
        prompt: tokens of the prompt.
        features: [T-1, K*M] states, in the order in which they were asked for.
        logits: [T-1, V].
    """

    ids: Tensor
    prompt: int
    features: Tensor
    logits: Tensor


@contextmanager
def _keeping(model: Any, boundaries: Sequence[int]) -> Iterator[list[Tensor]]:
    """Keep the states of the pass that ran last, [N, T, M] each, in the order of these boundaries."""
    kept = [torch.empty(0)] * len(boundaries)

    def keep(i: int) -> Any:
        return lambda _layer, args: kept.__setitem__(i, args[0].clone())

    hooks = [model.model.layers[b].register_forward_pre_hook(keep(i)) for i, b in enumerate(boundaries)]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def write_texts(model: Any, prompts: Tensor, new_tokens: int, boundaries: Sequence[int] = BOUNDARIES) -> list[Text]:
    """Let the target go on greedily behind prompts [N, P] of one length, and keep its states on the way."""
    from transformers import DynamicCache

    passes: list[Tensor] = []
    cache, ids, logits = DynamicCache(config=model.config), [prompts], []
    with _keeping(model, boundaries) as kept:
        for _ in range(new_tokens):
            out = model(ids[-1], past_key_values=cache, use_cache=True).logits
            passes.append(torch.cat(kept, -1))
            logits.append(out)
            ids.append(out[:, -1:].argmax(-1))
    features = torch.cat(passes, 1)
    columns = (torch.cat(ids, 1), features, torch.cat(logits, 1))
    return [Text(i.clone(), prompts.shape[1], f.clone(), x.clone()) for i, f, x in zip(*columns, strict=True)]


def train(folder: Path, target: Path, texts: Sequence[Text], updates: int, *, seed: int = 0, batch: int = 16) -> float:
    """Train a draft in place, towards the target's distribution at every step of a chain of three.

    The texts of an update stand in one pass, row p of each reading its states at p and the token p + 1. The passes
    behind it are recurrent: row p then continues itself, one token further on each time, and sees the feature rows
    up to its own place and its own predecessors, as it will when it is served.

    Args:
        folder: the draft, its random weights included.
        target: folder of the target, for the embedding.
        texts: what the target wrote; all of one length.
        updates: steps of the optimiser.
        seed: of the order of the texts.
        batch: texts of one update.

    Returns:
        The share of first tokens that the last updates had right.
    """
    spec = read_draft(folder)
    tensors = {name: t.clone() for name, t in read_tensors(spec)}
    embed = reference.load(spec, target=target).embed
    learned = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    optimizer = torch.optim.AdamW(learned, lr=5e-3)
    generator = torch.Generator().manual_seed(seed)
    prompt, length = texts[0].prompt, len(texts[0].ids)
    rows, steps = length - 1, 3
    text = torch.arange(batch).repeat_interleave(rows)
    place = torch.arange(rows).repeat(batch)
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    right = []
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - update / updates)
        draft = ReferenceDraft(spec, tensors, embed=embed)
        seen: list[Any] = []

        def attend(
            _layer: int, q: Tensor, k: Tensor, v: Tensor, own: list[Any] = seen, scale: float = draft._scale
        ) -> Tensor:
            q, k, v = (x.reshape(batch, rows, len(x[0]), -1).transpose(1, 2) for x in (q, k, v))
            own.append(tuple(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)))
            (keys, values), *rest = own
            scores = [(q @ keys.mT).masked_fill(later, -torch.inf), *((q * k).sum(-1, keepdim=True) for k, _ in rest)]
            weights = (scale * torch.cat(scores, -1)).softmax(-1)
            mixed = weights[..., :rows] @ values
            for i, (_, value) in enumerate(rest):
                mixed = mixed + weights[..., rows + i, None] * value
            return mixed.transpose(1, 2).reshape(batch * rows, -1)

        chosen = [texts[i] for i in torch.randint(len(texts), (batch,), generator=generator).tolist()]
        ids = torch.stack([F.pad(t.ids, (0, steps)) for t in chosen])
        hidden = draft.project(torch.cat([t.features for t in chosen]))
        # A head over part of the vocabulary learns the target's distribution over that part.
        ends = draft.to_target(torch.arange(spec.vocab.draft))
        wanted = torch.stack([F.pad(t.logits[:, ends], (0, 0, 0, steps)) for t in chosen])
        losses = []
        for step in range(steps):
            answered = place + step >= prompt - 2
            answered &= place + step + 1 < rows
            out = draft._run(ids[text, place + 1 + step], hidden, place + step, attend)
            hidden = out.state
            aims = wanted[text, place + 1 + step][answered]
            logits = out[answered].logits
            losses.append(0.8**step * F.cross_entropy(logits, aims.softmax(-1)))
            if not step:
                right.append(float((logits.argmax(-1) == aims.argmax(-1)).float().mean()))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    names = {canonical: file for file, canonical in spec.weights.items()}
    save_file({names[name]: tensor.detach() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return sum(right[-20:]) / 20


def write_target(folder: Path, model: Any) -> Path:
    """Write a target's files as Kimi-K2.5's are laid out: the text model, a vision tower and a projector.

    Without ``language_model_only`` SGLang would want the image processor's own code, which comes with the public files.
    """
    model.save_pretrained(folder)
    tensors = {f"language_model.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors | vision_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    layers = {"num_hidden_layers": model.config.num_hidden_layers}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "language_model_only": True,
        "media_placeholder_token_id": VOCAB - 1,
        "pad_token_id": TEXT["pad_token_id"],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "text_config": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **TEXT, **layers},
        "vision_config": VISION,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def vision_tensors() -> dict[str, Tensor]:
    """Make random weights of the vision tower and the projector, under their names in the public files."""
    generator = torch.Generator().manual_seed(7)
    width, inner, patch = (VISION[k] for k in ("hidden_size", "intermediate_size", "patch_size"))
    rows, columns = VISION["init_pos_emb_height"], VISION["init_pos_emb_width"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (rows, columns, width),
    }
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    linears = {"mm_projector.proj.0": (4 * width, 4 * width), "mm_projector.proj.2": (M, 4 * width)}
    for i in range(VISION["num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{i}."
        norms += [f"{at}norm0", f"{at}norm1"]
        linears |= {f"{at}wqkv": (3 * width, width), f"{at}wo": (width, width)}
        linears |= {f"{at}mlp.fc0": (inner, width), f"{at}mlp.fc1": (width, inner)}
    shapes |= {f"{name}.{part}": (width,) for name in norms for part in ("weight", "bias")}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def write_draft(folder: Path, kind: str, sources: Sequence[str] = SOURCES, **changes: Any) -> Path:
    """Write an untrained draft for the target: ``latent`` (MLA) or ``grouped`` (Llama-type, K x M -> M).

    The latter has what public ones have: yarn under the older key, the target's base, and a part of the vocabulary.
    """
    config: dict[str, Any] = {"eagle3_ext": {"sources": list(sources)}}
    if kind == "grouped":
        shared = ("type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        scaling = {key: TEXT["rope_scaling"][key] for key in shared}
        config |= {"rope_theta": TEXT["rope_theta"], "rope_scaling": scaling}
    return checkpoints.write_draft(
        folder,
        {"latent": "deepseek", "grouped": "specforge"}[kind],
        hidden=M,
        heads=4,
        intermediate=96,
        vocab=VOCAB,
        draft_vocab=VOCAB if kind == "latent" else VOCAB * 3 // 4,
        num_sources=len(sources),
        config_changes=config,
        **changes,
    )


@torch.inference_mode()
def is_greedy(model: Any, ids: Sequence[int], prompt: int) -> bool:
    """Say whether the target itself would have gone on behind a prompt of this length as a text does."""
    text = torch.tensor(list(ids))
    chosen = model(text[None], use_cache=False).logits[0].argmax(-1)
    return torch.equal(chosen[prompt - 1 : -1], text[prompt:])


@torch.inference_mode()
def states_of(model: Any, ids: Sequence[int], boundaries: Sequence[int] = BOUNDARIES) -> Tensor:
    """Run a whole text through the target at once; return its states [T, K*M] in the order of these boundaries."""
    with _keeping(model, boundaries) as kept:
        model.model(torch.tensor([list(ids)]), use_cache=False)
    return torch.cat(kept, -1)[0]
