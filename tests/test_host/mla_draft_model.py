"""The drop-in class of MLA drafts, built and loaded by SGLang itself, against the reference and against stock's class.

Run by ``test_runtimes.py``. Everything is SGLang's own but for the attention over the cache: a stand-in attends
plainly over what SGLang's two attention layers hand to it, whole keys and values in a first prefill, latents after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import LATENT
from safetensors.torch import load_file
from torch import nn

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.errors import CheckpointError
from tests.test_host.draft_model import (
    CLOSE,
    FC_BIAS,
    FC_NORMS,
    HEAD_DELETED,
    INPUT_NORM,
    MLP_BIAS,
    OWN_EMBED,
    PERMUTED,
    VOCAB,
    E,
    M,
    Served,
    Target,
    Variant,
    batch,
    build,
    change_fields,
    distance,
    draft_config,
    kernels,
    norm,
    passes,
    random,
    read_field,
    refer,
    resolve,
    run_reference,
    runtime,
    share,
    targets,
    update,
)

pytestmark = pytest.mark.host

__all__ = ["kernels", "runtime", "targets"]
"""Fixtures that pytest finds here."""

AT = "layers.0.self_attn"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 4.0}


class Latents(nn.Module):
    """Stand in for latent attention over the cache of one request, in its absorbed form."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.scale, self.heads, self.rank = layer.scaling, layer.tp_q_head_num, layer.v_head_dim
        self.rows = torch.empty(0)

    def keep(self, rows: torch.Tensor) -> None:
        """Append rows [T, 1, latent + rotary width], as the cache does."""
        self.rows = torch.cat([self.rows, rows[:, 0]]) if len(self.rows) else rows[:, 0].clone()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        assert save_kv_cache
        assert torch.equal(v, k[..., : self.rank])
        self.keep(k)
        q = q.unflatten(-1, (self.heads, -1)) if q.dim() == 2 else q
        return attend(q, self.rows[:, None], self.rows[:, None, : self.rank], self.scale)


class Heads(nn.Module):
    """Stand in for the first prefill, which sees no row but its own, with keys and values in full."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.scale = layer.scaling
        self.kv_b_proj: Any = None  # SGLang puts it here at the first pass

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any, save_kv_cache: bool, **_: Any
    ) -> torch.Tensor:
        assert not save_kv_cache
        return attend(q, k, v, self.scale)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend causally, the newest query last; [T, H, D], [S, 1 or H, D], [S, 1 or H, DV] -> [T, H*DV]."""
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    q, keys, values = (x.transpose(0, 1) for x in (q, keys, values))
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=distance >= 0, scale=scale, enable_gqa=True)
    return mixed.transpose(0, 1).flatten(1)


class Pool:
    """Stand in for the pool to which a first prefill writes its latents."""

    def __init__(self, model: Any) -> None:
        self.latents = {id(a.attn_mha): a.attn_mqa for a in attentions(model)}

    def set_kv_buffer(self, layer: Any, location: Any, latents: torch.Tensor, values: None) -> None:
        self.latents[id(layer)].keep(latents)


def attentions(model: Any) -> list[Any]:
    layers = model.model.layers if hasattr(model.model, "layers") else [model.model.midlayer]
    return [layer.self_attn for layer in layers]


def put_attention(model: Any) -> None:
    for attention in attentions(model):
        attention.attn_mqa, attention.attn_mha = Latents(attention.attn_mqa), Heads(attention.attn_mha)


@contextmanager
def backend(model: Any) -> Iterator[None]:
    """Publish an attention backend of SGLang's by name; its work is done by the stand-ins."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    named: Any = SimpleNamespace(
        prefill_attention_backend_str="triton",
        decode_attention_backend_str="triton",
        token_to_kv_pool=Pool(model),
    )
    with forward_context(ForwardContext(attn_backend=named)):
        yield


def run_served(model: Any, states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run passes in SGLang; return the logits (of the last row in a prefill) and the recurring states of each."""
    seen = []
    recurring = states[:0]
    with backend(model):
        for step in passes():
            rows = list(step.positions)
            made = batch(step.mode, recurring if step.mode == "DECODE" else states[rows])
            made.extend_prefix_lens_cpu = [rows[0]]
            made.mha_one_shot = False
            made.out_cache_loc = made.out_cache_loc_is_physical = made.attn_cp_metadata = None
            out = model(step.tokens, torch.tensor(rows), made)
            seen.append((out.next_token_logits, out.hidden_states))
            recurring = out.hidden_states[-1:]
    return seen


def mla(write: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any) -> Variant:
    return Variant({"dialect": "deepseek", **(write or {})}, *args, **kwargs)


def serve(folder: Path, target: Target, dtype: str = "float32") -> Served:
    """Bring a draft to where SGLang would run its first pass."""
    config = draft_config(folder, None, dtype)
    plan = resolve(config, target)
    model = build(config)
    assert type(model).__module__ == "sglang_eagle3_ext.host.models.deepseek_eagle3"
    share(model, target)
    put_attention(model)
    return Served(model, plan, refer(plan.spec, target), target)


VARIANTS = {
    "plain": mla(says={"attention.kind": "mla", "rope.interleaved": True}),
    "permuted": mla(ext=PERMUTED),
    "one_source": mla({"num_sources": 1}, ext={"sources": ["layer3"]}, says={"fc_in": E}),
    "halves": mla(
        config={"rope_interleave": False}, says={"rope.interleaved": False}, unlike={"rope.interleaved": True}
    ),
    "halves_queries_projected_at_once_two_layers": mla(
        {"layers": 2, "latent": LATENT | {"q_lora_rank": None, "qk_rope_head_dim": 6}},
        {"rope_interleave": False},
        ext=PERMUTED,
        unlike={"rope.interleaved": True},
    ),
    "early_torchspec": mla(
        config={"architectures": ["DeepSeekForCausalLMEagle3"]},
        tensors={f"{AT}.kv_a_proj_with_mqa.weight": None, f"{AT}.kv_a_proj.weight": random(20, 2 * E) / 8},
        says={"rope.interleaved": False},
        unlike={"rope.interleaved": True},
    ),
    "vllm_name": mla(config={"architectures": ["Eagle3DeepseekV3ForCausalLM"]}),
    "queries_projected_at_once": mla(
        {"latent": LATENT | {"q_lora_rank": None}}, says={"attention.latent.q_lora_rank": None}
    ),
    "three_layers": mla({"layers": 3}, says={"attention.num_layers": 3}),
    "layers_queries_projected_at_once": mla({"layers": 2, "latent": LATENT | {"q_lora_rank": None}}),
    "no_scaling": mla(config={"rope_scaling": None}, says={"rope.scaling": None}),
    "yarn_without_mscale": mla(config={"rope_scaling": YARN}),
    "yarn_with_two_mscales": mla(
        config={"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
        unlike={"rope.scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "automodel": mla(ext={"producer": "automodel"}, says={"producer": "automodel"}),
    "norms_per_source": mla(config={"fc_norm": True}, tensors=FC_NORMS, says={"norms.around_fc": "per_source"}),
    "norms_per_source_permuted": mla(config={"fc_norm": True}, tensors=FC_NORMS, ext=PERMUTED),
    "norm_over_all_permuted": mla(config={"norm_before_fc": True}, tensors=INPUT_NORM, ext=PERMUTED),
    "residual_after_norm": mla(
        config={"norm_before_residual": True},
        says={"norms.residual": "post_norm"},
        unlike={"norms.residual": "pre_norm"},
    ),
    "state_after_norm": mla(
        config={"norm_output": True},
        says={"norms.recurrent_state": "post_norm"},
        unlike={"norms.recurrent_state": "pre_norm"},
    ),
    "no_final_norm": mla(
        config={"eagle_config.use_last_layernorm": False},
        tensors={"norm.weight": None},
        says={"norms.final_norm": False},
    ),
    "biases": mla(
        config={"bias": True, "mlp_bias": True},
        tensors=FC_BIAS | {name.replace("midlayer", "layers.0"): tensor for name, tensor in MLP_BIAS.items()},
        says={"fc_bias": True, "mlp_bias": True},
        unlike={"mlp_bias": False},
    ),
    "own_embedding": mla(tensors=OWN_EMBED, says={"embed": "own"}, unlike={"embed": "target"}),
    "head_of_the_target": mla(
        {"draft_vocab": VOCAB}, {"draft_vocab_size": None}, HEAD_DELETED, says={"lm_head": "target"}
    ),
    "tied": mla({"draft_vocab": VOCAB}, {"tie_word_embeddings": True}, HEAD_DELETED, says={"lm_head": "tied"}),
    "wider_target_permuted": mla(
        {"target_hidden": 48}, {"fc_norm": True}, {f"fc_norm.{i}.weight": norm(48, i) for i in range(3)}, PERMUTED
    ),
    "no_map": mla({"draft_vocab": VOCAB}, says={"vocab.map": "none", "lm_head": "own"}),
    "own_head_without_a_size": mla(
        {"draft_vocab": VOCAB}, {"draft_vocab_size": None}, says={"lm_head": "own"}, unlike={"lm_head": "target"}
    ),
    "no_head_with_a_size": mla({"draft_vocab": VOCAB}, {}, HEAD_DELETED, says={"lm_head": "target"}),
}

every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_passes_equal_the_reference(
    variant: Variant, kernels: str, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    target = targets(variant.write.get("target_hidden", M))
    served = serve(variant.at(tmp_path), target)
    spec, model = served.spec, served.model
    assert {name: read_field(spec, name) for name in variant.says} == variant.says
    features = served.features(9)
    wanted = run_reference(served.reference, passes(), features)
    assert distance(run_served(model, served.in_capture_order(features)), wanted) < CLOSE
    if variant.unlike:
        other = refer(change_fields(spec, variant.unlike), target)
        assert distance(run_reference(other, passes(), features), wanted) > 100 * CLOSE
    if spec.vocab.map == "none":
        assert model.hot_token_id is None
    else:
        assert torch.equal(model.hot_token_id, served.reference.to_target(torch.arange(spec.vocab.draft)))


@every_variant
def test_what_equals_stock_has_stocks_own_bits(
    variant: Variant, targets: Callable[[int], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plan says that stock computes the same draft, stock does, bit for bit, without our kernels."""
    from sglang.srt.models import kimi_k25_eagle3 as stock
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils.hf_transformers import config as parsing

    target = targets(variant.write.get("target_hidden", M))
    folder = variant.at(tmp_path)
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "off")
    served = serve(folder, target)
    scaling = served.spec.rope.scaling
    if not served.plan.equals_stock:
        assert served.plan.differences
        return
    if scaling is None:
        pytest.skip("stock has no rotation without yarn on a CPU")
    # Stock frees memory of a GPU when it shares the target's embedding.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    theirs = stock.Eagle3DeepseekV2ForCausalLM(parsing.get_config(str(folder), trust_remote_code=False))
    theirs.load_weights(load_file(folder / "model.safetensors").items())
    current_platform.post_load_model(theirs)
    share(theirs, target)
    put_attention(theirs)
    states = served.in_capture_order(served.features(9))
    for mine, his in zip(run_served(served.model, states), run_served(theirs.eval(), states), strict=True):
        assert torch.equal(mine[0], his[0])
        assert torch.equal(mine[1], his[1])


def test_some_variants_equal_stock(targets: Callable[[int], Target], tmp_path: Path) -> None:
    """The test before means something only where there are such plans."""
    same_width = {name: variant for name, variant in VARIANTS.items() if "target_hidden" not in variant.write}
    plans = {name: resolve(draft_config(v.at(tmp_path / name)), targets(M)) for name, v in same_width.items()}
    equal = {name for name, plan in plans.items() if plan.equals_stock}
    assert equal == {
        "plain", "no_scaling", "yarn_without_mscale", "yarn_with_two_mscales", "norms_per_source",
        "state_after_norm", "head_of_the_target", "tied", "no_map",
    }  # fmt: skip


@every_variant
def test_sglang_sizes_its_buffers_from_the_draft(
    variant: Variant, targets: Callable[[int], Target], tmp_path: Path
) -> None:
    from sglang.srt.configs.model_config import AttentionArch

    config = draft_config(variant.at(tmp_path))
    spec = resolve(config, targets(variant.write.get("target_hidden", M))).spec
    latent = spec.attention.latent
    assert latent is not None
    assert config.hf_config.architectures == ["Eagle3DeepseekV2ForCausalLM"]
    assert config.attention_arch == AttentionArch.MLA
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (latent.kv_lora_rank, latent.qk_rope_head_dim)
    assert (config.qk_nope_head_dim, config.v_head_dim) == (latent.qk_nope_head_dim, latent.v_head_dim)
    assert config.num_hidden_layers == config.num_attention_layers == spec.attention.num_layers
    assert (config.hidden_size, config.num_attention_heads) == (spec.hidden_size, spec.attention.heads)
    assert config.scaling == pytest.approx(reference.load(spec, **lent(spec))._scale)


def lent(spec: Any) -> dict[str, torch.Tensor]:
    """Give what a draft may borrow, all zeros."""
    return {name: torch.zeros(VOCAB, spec.hidden_size) for name in ("embed", "lm_head")}


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unloaded(targets: Callable[[int], Target], tmp_path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Let SGLang build a draft; its weights are still in the file."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _initialize_model

    folder = mla({"layers": 2}).at(tmp_path)
    config = draft_config(folder)
    resolve(config, targets(M))
    return _initialize_model(config, LoadConfig()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("fc.weight", ["model.fc.weight"]),
        (f"{AT}.q_a_proj.weight", ["model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight", "shard q)"]),
        (f"{AT}.kv_a_proj_with_mqa.weight", ["layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight", "shard kv)"]),
        ("layers.1.self_attn.kv_b_proj.weight", ["model.layers.1.self_attn.kv_b_proj.weight"]),
        (f"{AT}.q_a_layernorm.weight", ["model.layers.0.self_attn.q_a_layernorm.weight"]),
        ("layers.1.mlp.up_proj.weight", ["model.layers.1.mlp.gate_up_proj.weight", "shard 1"]),
    ],
)
def test_a_parameter_without_a_tensor_is_named(
    unloaded: tuple[Any, dict[str, torch.Tensor]], absent: str, names: list[str]
) -> None:
    model, tensors = unloaded
    with pytest.raises(CheckpointError) as caught:
        model.load_weights((n, t) for n, t in tensors.items() if n != absent)
    assert all(name in str(caught.value) for name in names)
    assert str(caught.value).count("got no tensor") == 1


def test_a_tensor_without_a_home_is_refused(unloaded: tuple[Any, dict[str, torch.Tensor]]) -> None:
    model, tensors = unloaded
    with pytest.raises(CheckpointError, match="self_attn.kv_c_proj.weight: has no home"):
        model.load_weights([*tensors.items(), (f"{AT}.kv_c_proj.weight", torch.zeros(3))])


@pytest.mark.parametrize("part", ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj"])
def test_an_update_reaches_the_passes(part: str, targets: Callable[[int], Target], tmp_path: Path) -> None:
    """Weights that are fused or absorbed at load change with a later update of one of them."""
    served = serve(mla(ext=PERMUTED).at(tmp_path), targets(M))
    name = f"{AT}.{part}.weight"
    changed = random(*served.spec.tensors[name].shape) / 4
    update(served.model, {name: changed})
    features = served.features(9)
    tensors = dict(reference.read_tensors(served.spec)) | {name: changed}
    wanted = reference.ReferenceDraft(served.spec, tensors, embed=served.target.embed.weight.data[:VOCAB])
    assert (
        distance(run_served(served.model, served.in_capture_order(features)), run_reference(wanted, passes(), features))
        < CLOSE
    )


def test_a_longer_target_does_not_stretch_the_rotation(targets: Callable[[int], Target], tmp_path: Path) -> None:
    """Yarn falls back on the draft's own length, which SGLang may have made the target's by then."""
    target = targets(M)
    scaling = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    folder = mla(config={"rope_scaling": scaling, "max_position_embeddings": 64}).at(tmp_path / "draft")
    config = draft_config(folder)
    resolve(config, target)
    config.hf_text_config.max_position_embeddings = 4096
    model = build(config)
    share(model, target)
    rotation = model.model.layers[0].self_attn.rotary_emb
    cos = rotation.cos_sin_cache[5]
    expected = torch.cat([part[0, 0, :2] for part in refer(model.plan.spec, target)._rotary(torch.tensor([5]))])
    torch.testing.assert_close(cos, expected, rtol=1e-5, atol=1e-6)
