"""MLA drafts: what each trainer's files say, and every disagreement; the facts are written out by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import DELETE, LATENT, write_draft
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import Latent, Source

ATTENTION = "layers.0.self_attn."
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16}
NO_Q_RANK = LATENT | {"q_lora_rank": None}


def rename(folder, change):
    """Give the tensors of a file other names."""
    file = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)
    return folder


def early_torchspec(folder, **config):
    """Write what TorchSpec wrote before it took over DeepSeek's rotation and names."""
    write_draft(folder, "deepseek", config_changes={"architectures": ["DeepSeekForCausalLMEagle3"], **config})
    return rename(folder, lambda n: n.replace("layers.0.", "midlayer.").replace("kv_a_proj_with_mqa", "kv_a_proj"))


def automodel(folder, **config):
    """Write what NeMo Automodel writes: tensors below ``model.``, a config that is mostly the target's."""
    changes = {"architectures": ["DeepseekV3Eagle3DraftModel"], "num_hidden_layers": 61, "eagle_config": DELETE}
    write_draft(folder, "deepseek", config_changes=changes | config)
    top = ("lm_head.weight", "d2t", "t2d")
    return rename(folder, lambda n: n if n in top else f"model.{n}")


def codes(spec):
    return {f.code: f.severity for f in spec.findings}


def errors(spec):
    return [f.code for f in spec.findings if f.severity == "error"]


def test_a_kimi_draft(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "deepseek"))
    assert (spec.format, spec.architecture) == ("deepseek", "Eagle3DeepseekV2ForCausalLM")
    assert spec.attention.kind == "mla"
    assert spec.attention.latent == Latent(14, 16, 8, 4, 6)
    assert (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) == (4, 4, 12)
    assert (spec.rope.theta, spec.rope.interleaved) == (50000.0, True)
    assert spec.rope.scaling == {
        **YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0
    }  # fmt: skip
    assert spec.sources == tuple(Source("id", i, f"id {i}") for i in (1, 4, 6))
    assert (spec.layer_ids, spec.order, spec.producer) == ("stock", "ascending", None)
    assert spec.dtype == "float32"
    assert spec.findings == ()
    assert (spec.missing, spec.unconsumed) == ((), ())
    assert (spec.stock.loads, spec.stock.ids, spec.stock.differences) == (True, (1, 4, 6), ())
    kept = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "heads"}
    assert {spec.origins[key] for key in kept} == {"config"}
    assert (spec.origins["rope_interleave"], spec.origins["rope_scaling"]) == ("default", "config")


def test_every_tensor_has_a_home(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", layers=2))
    homes = {canonical for canonical in spec.weights.values() if ".self_attn." in canonical}
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    assert homes == {f"layers.{i}.self_attn.{part}.weight" for i in (0, 1) for part in parts}
    assert (spec.missing, spec.unconsumed) == ((), ())
    assert "stock refuses an MLA draft of more than one layer" in spec.stock.differences


def test_queries_may_be_projected_at_once(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", latent=NO_Q_RANK))
    assert spec.attention.latent == Latent(None, 16, 8, 4, 6)
    assert f"{ATTENTION}q_proj.weight" in spec.weights.values()
    assert errors(spec) == []
    assert spec.stock.differences == ("stock refuses an MLA draft without q_lora_rank",)


@pytest.mark.parametrize("latent", [LATENT, NO_Q_RANK], ids=["with_q_rank", "without"])
def test_tensors_stand_for_what_the_config_leaves_out(tmp_path, latent):
    absent = dict.fromkeys(latent, DELETE)
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", latent=latent, config_changes=absent))
    assert spec.attention.latent == Latent(*(latent[key] for key in LATENT))
    assert {spec.origins[key] for key in LATENT} == {"weights"}


def test_heads_may_follow_from_the_others(tmp_path):
    absent = {"num_attention_heads": DELETE, "num_key_value_heads": DELETE, "v_head_dim": DELETE}
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=absent))
    assert (spec.attention.heads, spec.origins["heads"]) == (4, "weights")


@pytest.mark.parametrize("architecture", ["Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"])
def test_all_spellings_are_claimed(tmp_path, architecture):
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes={"architectures": [architecture]}))
    assert spec.format == "deepseek"
    assert spec.stock.loads == (architecture == "Eagle3DeepseekV2ForCausalLM")


@pytest.mark.parametrize(
    ("changes", "producer"),
    [({"_torchspec_version": "0.1.0"}, "torchspec"), ({"eagle_config.use_mtp_layernorm": False}, "modelopt")],
)
def test_traces_tell_the_trainer_and_leave_the_ids_open(tmp_path, changes, producer):
    changes |= {"norm_output": True}
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=changes))
    assert (spec.producer, spec.layer_ids, spec.order) == (producer, "stock", "ascending")
    assert spec.norms.recurrent_state == "post_norm"
    assert spec.findings == ()


def test_two_traces_are_an_error(tmp_path):
    changes = {"_torchspec_version": "0.1.0", "eagle_config.use_mtp_layernorm": False}
    with pytest.raises(CheckpointError, match="the traces of modelopt and torchspec"):
        formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=changes))


def test_fc_norms_of_eagle_3_1(tmp_path):
    tensors = {f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}
    changes = {"fc_norm": True, "norm_output": True, "eagle3_ext": {"producer": "torchspec"}}
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=changes, tensor_changes=tensors))
    assert (spec.norms.around_fc, spec.norms.recurrent_state) == ("per_source", "post_norm")
    assert errors(spec) == []


def test_early_torchspec_rotated_halves(tmp_path):
    spec = formats.read_draft(early_torchspec(tmp_path))
    assert (spec.rope.interleaved, spec.origins["rope_interleave"]) == (False, "weights")
    assert codes(spec) == {"rope_halves": "info"}
    assert f"{ATTENTION}kv_a_proj_with_mqa.weight" in spec.weights.values()
    assert (spec.missing, spec.unconsumed) == ((), ())
    assert "stock refuses the architecture DeepSeekForCausalLMEagle3" in spec.stock.differences
    renamed = early_torchspec(tmp_path, architectures=["Eagle3DeepseekV2ForCausalLM"])
    assert formats.read_draft(renamed).stock.differences == (
        "stock drops kv_a_proj and leaves the projection of keys and values random",
        "stock rotates neighbouring elements together",
    )


def test_what_transformers_writes_into_its_config_is_doubted(tmp_path):
    """transformers writes ``rope_interleave: true`` into every DeepSeek config that it saves."""
    spec = formats.read_draft(early_torchspec(tmp_path, rope_interleave=True))
    assert not spec.rope.interleaved
    assert codes(spec) == {"rope_halves": "warning"}
    assert errors(formats.read_draft(early_torchspec(tmp_path, rope_interleave=False))) == []


@pytest.mark.parametrize("says", [True, False])
def test_the_key_says_which_elements_are_rotated_together(tmp_path, says):
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes={"rope_interleave": says}))
    assert (spec.rope.interleaved, spec.origins["rope_interleave"]) == (says, "config")
    assert spec.stock.differences == (() if says else ("stock rotates halves of a head with CUDA only",))


def test_automodel_scales_neither_rotation_nor_softmax(tmp_path):
    spec = formats.read_draft(automodel(tmp_path))
    assert (spec.producer, spec.attention.num_layers) == ("automodel", 1)
    assert spec.rope.scaling is not None
    assert (spec.rope.scaling["mscale"], spec.rope.scaling["mscale_all_dim"]) == (0.0, 0.0)
    assert codes(spec) == {"layer_count": "warning", "rope_not_as_written": "warning"}
    assert "stock drops the tensors below model." in spec.stock.differences
    settled = {"eagle3_ext": {"rope_scaling": YARN}}
    spec = formats.read_draft(automodel(tmp_path, **settled))
    assert spec.rope.scaling == YARN
    assert "rope_not_as_written" not in codes(spec)
    # Without yarn there is nothing that it could have left out.
    spec = formats.read_draft(automodel(tmp_path, rope_scaling=None))
    assert spec.rope.scaling is None
    assert "rope_not_as_written" not in codes(spec)


def test_what_a_config_leaves_out_is_what_deepseek_s_class_fills_in(tmp_path):
    absent = dict.fromkeys(("max_position_embeddings", "rms_norm_eps", "rope_theta"), DELETE)
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=absent))
    assert (spec.max_position_embeddings, spec.rms_norm_eps, spec.rope.theta) == (4096, 1e-6, 10000.0)


class Case(NamedTuple):
    code: str
    severity: str
    phrase: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor | None] = {}
    also: tuple[str, ...] = ()


CASES = [
    Case("head_count", "warning", "got 2 for 4 heads; expected as many", {"num_key_value_heads": 2}),
    Case("mla_use_nope", "warning", "does not read; the draft is rotated", {"mla_use_nope": True}),
    Case("unserved_key", "error", "mla_use_output_gate: got true", {"mla_use_output_gate": True}),
    Case("rope_mscale", "warning", "mscale 0.7 and mscale_all_dim None", {"rope_scaling": {**YARN, "mscale": 0.7}}),
    Case("rope_type", "error", "got rope_type 'linear' for latent", {"rope_scaling": {"type": "linear", "factor": 2}}),
    Case("rope_type", "error", "got rope_type 'mrope' for", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}),
    Case(
        "config_value",
        "error",
        "rope_scaling.mscale: got 'one'",
        {"rope_scaling": {**YARN, "mscale": "one", "mscale_all_dim": 1.0}},
    ),
    Case("config_value", "error", "partial_rotary_factor: got 0.5", {"partial_rotary_factor": 0.5}),
    Case("config_value", "error", "qk_head_dim: got 13; expected 12", {"qk_head_dim": 13}),
    Case(
        "sliding_window_mla",
        "error",
        "got 64 for latent attention",
        {"sliding_window": 64, "use_sliding_window": True},
        also=("sliding_window",),
    ),
    Case(
        "tensor_shape",
        "error",
        "expected [48, 14] from the config",
        {},
        {f"{ATTENTION}q_b_proj.weight": torch.ones(16, 14)},
    ),
    Case("tensor_shape", "error", "got [20, 64]; expected [22, 64]", {"kv_lora_rank": 18}, also=("tensor_shape",) * 2),
    Case(
        "unconsumed_tensor",
        "error",
        "kv_a_proj_with_mqa.bias",
        {},
        {f"{ATTENTION}kv_a_proj_with_mqa.bias": torch.ones(20)},
    ),
    Case("missing_tensor", "error", "kv_b_proj.weight", {}, {f"{ATTENTION}kv_b_proj.weight": None}),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.code}" for i, case in enumerate(CASES)])
def test_the_smallest_damage_raises_exactly_its_finding(tmp_path, case):
    draft = write_draft(tmp_path, "deepseek", config_changes=case.config, tensor_changes=case.tensors)
    spec = formats.read_draft(draft)
    found = [f for f in spec.findings if f.code == case.code]
    assert sorted(f.code for f in spec.findings) == sorted((case.code, *case.also))
    assert found[0].severity == case.severity
    assert any(case.phrase in f.message for f in found)


@pytest.mark.parametrize("key", [key for key in LATENT if key != "q_lora_rank"])
def test_a_size_that_nothing_tells_is_named(tmp_path, key):
    absent = {key: DELETE}
    tensors: dict[str, torch.Tensor | None] = {
        f"{ATTENTION}{part}.weight": None for part in ("kv_a_layernorm", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
    }
    with pytest.raises(CheckpointError) as caught:
        formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=absent, tensor_changes=tensors))
    assert [f.code for f in caught.value.findings] == ["config_incomplete", "missing_tensor"]
    assert f"config.json:{key}: got nothing" in caught.value.findings[0].message
    assert all(f"self_attn.{part}.weight" in str(caught.value) for part in ("kv_a_layernorm", "q_b_proj", "kv_b_proj"))


def test_all_sizes_that_nothing_tells_are_named_at_once(tmp_path):
    absent = dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    tensors: dict[str, torch.Tensor | None] = {
        f"{ATTENTION}{part}.weight": None for part in ("kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj")
    }
    with pytest.raises(CheckpointError) as caught:
        formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=absent, tensor_changes=tensors))
    assert [f.code for f in caught.value.findings] == [*["config_incomplete"] * 3, "missing_tensor"]


@pytest.mark.parametrize("key", LATENT)
@pytest.mark.parametrize("value", [-4, 0])
def test_a_size_that_no_draft_can_have_is_an_error_and_taken_from_the_tensors(tmp_path, key, value):
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes={key: value}))
    assert [f.code for f in spec.findings if f.severity == "error"] == ["config_value"]
    assert f"config.json:{key}: got {value}; expected a positive integer" in spec.findings[-1].message + str(
        [f.message for f in spec.findings]
    )
    assert spec.attention.latent == Latent(14, 16, 8, 4, 6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"norm_before_fc": True}, "stock does not apply norm_before_fc in an MLA draft"),
        ({"draft_vocab_size": DELETE}, "stock puts the target's head in the place of the draft's own, since"),
        ({"num_aux_hidden_states": 3, "eagle_config": DELETE}, None),
        ({"num_aux_hidden_states": 2}, "stock builds fc for 96 input columns, the file has 64"),
    ],
)
def test_what_stock_would_do_otherwise(tmp_path, changes, sentence):
    tensors: dict[str, torch.Tensor | None] = {}
    if "norm_before_fc" in changes:
        tensors["input_norm.weight"] = torch.ones(96)
    if changes.get("num_aux_hidden_states") == 2:
        changes |= {"eagle_config": DELETE}
        tensors["fc.weight"] = torch.ones(32, 64)
    spec = formats.read_draft(write_draft(tmp_path, "deepseek", config_changes=changes, tensor_changes=tensors))
    assert errors(spec) == []
    assert [d for d in spec.stock.differences if sentence is None or sentence not in d] == []
    assert len(spec.stock.differences) == (sentence is not None)
