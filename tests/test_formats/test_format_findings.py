"""Every finding of ``formats``: the smallest damage to a good checkpoint that must raise exactly it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import DELETE, write_draft

from sglang_eagle3_ext import formats

NORM, Q = torch.ones(32), torch.ones(48, 64)
OFFSETS = torch.zeros(37, dtype=torch.int64)
IDS = "eagle_aux_hidden_state_layer_ids"


class Case(NamedTuple):
    code: str
    severity: str
    phrase: str
    config: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor | None] = {}
    override: dict[str, Any] | None = None
    sizes: dict[str, int] = {}
    dialect: str = "specforge"
    also: tuple[str, ...] = ()


CASES = [
    Case("layer_count", "warning", "got 36, the file holds 1 layer;", {"num_hidden_layers": 36}),
    Case("layer_count", "warning", "got 1, the file holds 2 layers", {"num_hidden_layers": 1}, sizes={"layers": 2}),
    Case("head_missing", "error", "got 37 of 96 without a head of the draft's own", tensors={"lm_head.weight": None}),
    Case(
        "head_missing",
        "error",
        "got 20 for a draft of width 32 without a head of its own",
        tensors={"lm_head.weight": None},
        sizes={"draft_vocab": 96, "target_hidden": 20},
    ),
    Case(
        "head_missing",
        "error",
        "which the target's head cannot stand in for",
        override={"lm_head": "target"},
        also=("tensor_left_out",),
    ),
    Case(
        "head_from_target",
        "info",
        "the target's head is used",
        tensors={"lm_head.weight": None},
        sizes={"draft_vocab": 96},
    ),
    Case("vocab_map_missing", "error", "got 37 of 96 and no d2t", tensors={"d2t": None, "t2d": None}),
    Case(
        "vocab_map_missing",
        "error",
        "got 'absolute', and the file has no d2t",
        override={"vocab_map": "absolute"},
        sizes={"draft_vocab": 96},
    ),
    Case("vocab_map_range", "error", "draft token 36 becomes 96 of 96", tensors={"d2t": OFFSETS + 60, "t2d": None}),
    Case("vocab_map_range", "error", "draft token 0 becomes -1 of 96", tensors={"d2t": OFFSETS - 1, "t2d": None}),
    Case(
        "vocab_map_repeats",
        "error",
        "two draft tokens become target token 1",
        tensors={"d2t": OFFSETS.clone().index_fill_(0, torch.tensor([0]), 1), "t2d": None},
    ),
    Case(
        "vocab_map_disagrees",
        "error",
        "d2t and t2d disagree about target token 0",
        tensors={"t2d": torch.zeros(96, dtype=torch.bool)},
    ),
    Case(
        "vocab_map_repeats",
        "error",
        'Read as absolute it fits: set "eagle3_ext": {"vocab_map": "absolute"}',
        tensors={"d2t": torch.arange(37).flip(0), "t2d": None},
    ),
    Case(
        "identity_map",
        "info",
        "it changes nothing and is left out",
        tensors={"d2t": torch.arange(96)},
        override={"vocab_map": "absolute"},
        sizes={"draft_vocab": 96},
    ),
    Case(
        "layer_types",
        "warning",
        "got chunked_attention; expected full_attention or sliding_attention. Full attention was taken",
        {"layer_types": ["chunked_attention"], "sliding_window": 8},
    ),
    Case("layer_types", "warning", "got linear_attention; expected", {"layer_types": ["linear_attention"]}),
    Case(
        "sliding_window_unclear",
        "warning",
        "got nothing beside layer_types, which asks for one; expected its size",
        {"layer_types": ["sliding_attention"]},
    ),
    Case(
        "sliding_window_unclear",
        "warning",
        "got nothing beside use_sliding_window, which asks for one",
        {"use_sliding_window": True, "sliding_window": None},
    ),
    Case(
        "config_value",
        "error",
        "sliding_window: got -8; expected a positive number of tokens",
        {"use_sliding_window": True, "sliding_window": -8},
    ),
    Case(
        "identity_map",
        "info",
        "maps every token to itself",
        tensors={"d2t": torch.zeros(96, dtype=torch.int64)},
        sizes={"draft_vocab": 96},
    ),
    Case(
        "vocab_rows",
        "error",
        "got 97 for a target vocabulary of 96",
        {"vocab_size": 96, "draft_vocab_size": 97},
        {
            "lm_head.weight": torch.ones(97, 32),
            "d2t": torch.zeros(97, dtype=torch.int64),
        },
        sizes={"draft_vocab": 96},
        also=("vocab_map_range",),
    ),
    Case("tied_with_head", "warning", "The stored head is used", {"tie_word_embeddings": True}),
    Case("bias_absent", "warning", "attention_bias: got true, and the file holds no", {"attention_bias": True}),
    Case("bias_absent", "warning", "qkv_bias: got true, and the file holds no", {"qkv_bias": True}),
    Case("bias_absent", "warning", "mlp_bias: got true, and the file holds no", {"mlp_bias": True}),
    Case("bias_absent", "warning", "bias: got true, and the file holds no", {"bias": True}),
    Case("missing_tensor", "error", "needs norm.weight, got no such", tensors={"norm.weight": None}),
    Case("missing_tensor", "error", "needs fc.weight, got no such", tensors={"fc.weight": None}),
    Case("missing_tensor", "error", "layers.0.hidden_norm.weight", tensors={"midlayer.hidden_norm.weight": None}),
    Case(
        "missing_tensor",
        "error",
        "k_proj.bias, layers.0.self_attn.v_proj.bias",
        tensors={"midlayer.self_attn.q_proj.bias": torch.ones(48)},
    ),
    Case(
        "missing_tensor",
        "error",
        "layers.0.self_attn.k_norm.weight",
        tensors={"midlayer.self_attn.q_norm.weight": torch.ones(12)},
    ),
    Case("missing_tensor", "error", "needs fc_norm.0.weight, fc_norm.1.weight", {"fc_norm": True}),
    Case("missing_tensor", "error", "needs input_norm.weight", {"norm_before_fc": True}),
    Case("missing_tensor", "error", "needs input_norm.weight", override={"norms": "concatenation"}),
    Case("missing_tensor", "error", "needs embed_tokens.weight", override={"embed": "own"}),
    Case(
        "missing_tensor",
        "error",
        "needs embed_tokens.weight",
        tensors={"embed_tokens.weight": None},
        sizes={"target_hidden": 20},
    ),
    Case(
        "missing_tensor",
        "error",
        "needs lm_head.weight",
        tensors={"lm_head.weight": None},
        override={"lm_head": "own"},
        sizes={"draft_vocab": 96},
    ),
    Case(
        "missing_tensor",
        "error",
        "layers.1.mlp.gate_proj.weight and 2 more",
        {"num_hidden_layers": 3},
        {
            f"layers.1.{name}.weight": None
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
                *(f"self_attn.{p}_proj" for p in "qkvo"),
            )
        }
        | {"layers.1.input_layernorm.weight": NORM},
        sizes={"layers": 3},
    ),
    Case("unconsumed_tensor", "error", "got mask_hidden, which", tensors={"mask_hidden": torch.ones(1, 1, 96)}),
    Case("unconsumed_tensor", "error", "lm_head.bias", tensors={"lm_head.bias": torch.ones(37)}),
    Case(
        "unconsumed_tensor",
        "error",
        "fc_norm.3.weight",
        {"fc_norm": True},
        {f"fc_norm.{i}.weight": NORM for i in range(4)},
    ),
    Case(
        "unconsumed_tensor",
        "error",
        "got input_norm.weight",
        tensors={"input_norm.weight": torch.ones(96)},
        override={"norms": "none"},
    ),
    Case("norm_flag_missing", "error", "norm_before_fc: is not set", tensors={"input_norm.weight": torch.ones(96)}),
    Case(
        "norm_flag_missing",
        "error",
        "fc_norm: is not set",
        {"fc_norm": False},
        {f"fc_norm.{i}.weight": NORM for i in range(3)},
    ),
    Case("norm_flag_missing", "error", "got false beside a stored norm.weight", {"use_last_layernorm": False}),
    Case(
        "norms_clash",
        "error",
        "expected at most one kind of norm",
        {"fc_norm": True, "norm_before_fc": True},
        {f"fc_norm.{i}.weight": NORM for i in range(3)} | {"input_norm.weight": torch.ones(96)},
        also=("unconsumed_tensor",),
    ),
    Case("norm_output_two_meanings", "warning", "which SpecForge writes", {"norm_output": True}),
    Case(
        "tensor_shape",
        "error",
        "got [48, 32]; expected [48, 64]",
        tensors={"midlayer.self_attn.q_proj.weight": torch.ones(48, 32)},
    ),
    Case("tensor_shape", "error", "got [36, 32]; expected [37, 32]", tensors={"lm_head.weight": torch.ones(36, 32)}),
    Case("tensor_shape", "error", "got [36]; expected [37]", tensors={"d2t": OFFSETS[:36]}),
    Case("tensor_shape", "error", "got [95]; expected [96]", tensors={"t2d": torch.zeros(95, dtype=torch.bool)}),
    Case(
        "tensor_shape",
        "error",
        "got [31]; expected [32]",
        {"fc_norm": True},
        {f"fc_norm.{i}.weight": torch.ones(31 if i == 1 else 32) for i in range(3)},
    ),
    Case(
        "tensor_shape",
        "error",
        "got [95, 32]; expected [96, 32]",
        tensors={"embed_tokens.weight": torch.ones(95, 32)},
    ),
    Case(
        "tensor_twice",
        "error",
        "means the same as",
        tensors={"layers.0.self_attn.q_proj.weight": Q},
    ),
    Case(
        "two_input_norms",
        "warning",
        "layers.1.hidden_norm.weight was taken, as stock does",
        tensors={"layers.1.hidden_norm.weight": NORM},
        sizes={"layers": 2},
    ),
    Case("weight_dtype", "error", "fc.weight (I8)", tensors={"fc.weight": torch.ones(32, 96, dtype=torch.int8)}),
    Case("weight_dtype", "error", "got F32; expected integers", tensors={"d2t": torch.zeros(37)}),
    Case("head_count", "error", "got 3 for 4 heads", {"num_key_value_heads": 3}, also=("tensor_shape", "tensor_shape")),
    Case("hidden_act", "error", "got 'gelu'; expected 'silu'", {"hidden_act": "gelu"}),
    Case(
        "unserved_key",
        "error",
        "eagle_config.use_input_layernorm_in_first_layer: got False",
        {"eagle_config.use_input_layernorm_in_first_layer": False},
    ),
    Case("unserved_key", "error", "parallel_draft_step: got 4", {"parallel_draft_step": 4}),
    Case("unread_keys", "info", "(top level): got secret_scale", {"secret_scale": 2.0}),
    Case("unread_keys", "info", "eagle_config: got secret_scale", {"eagle_config.secret_scale": 2.0}),
    Case(
        "unread_keys",
        "info",
        "transformer_layer_config: got secret_scale",
        {"transformer_layer_config.secret_scale": 2.0},
        dialect="speculators",
    ),
    Case("quantization_config", "info", "speaks of the target", {"quantization_config": {"quant_method": "fp8"}}),
    Case(
        "quantization_config",
        "warning",
        "expected plain floating point weights",
        {"quantization_config": {"quant_method": "int8"}},
        {"fc.weight": torch.ones(32, 96, dtype=torch.int8)},
        also=("weight_dtype",),
    ),
    # fc and its sources
    Case(
        "fc_width",
        "error",
        "got 90 input columns, which is no multiple of the target's width 32",
        tensors={"fc.weight": torch.ones(32, 90)},
    ),
    Case(
        "fc_width",
        "error",
        "reads 128 = 4 x 32 columns, got 3 sources",
        {f"eagle_config.{IDS}": [1, 3, 5]},
        sizes={"num_sources": 4},
    ),
    Case(
        "fc_width",
        "error",
        "reads 96 = 3 x 32 columns, got 2 sources",
        override={"sources": ["embed", "last"]},
    ),
    Case(
        "fc_width",
        "error",
        "got 20 for a draft of width 32 without fc",
        {"eagle_config.use_aux_hidden_state": False},
        {"fc.weight": None},
        sizes={"target_hidden": 20},
    ),
    Case(
        "source_count_disagrees",
        "error",
        "got 4 beside 3 ids",
        {f"eagle_config.{IDS}": [1, 3, 5], "num_aux_hidden_states": 4},
    ),
    Case(
        "aux_flag_disagrees",
        "error",
        "got false beside a stored fc.weight",
        {"eagle_config.use_aux_hidden_state": False},
        also=("unconsumed_tensor",),
    ),
    Case(
        "ids_disagree",
        "error",
        "got [1, 3, 6] at the top level and [1, 3, 5]",
        {f"eagle_config.{IDS}": [1, 3, 5], IDS: [1, 3, 6]},
    ),
    Case(
        "flags_disagree",
        "error",
        "got False at the top level and True in eagle_config",
        {"eagle_config.norm_before_residual": True, "norm_before_residual": False},
    ),
    Case("top_level_ids", "warning", "where stock SGLang does not look", {IDS: [1, 3, 5]}),
    Case("unsorted_ids", "warning", "taken in ascending order", {f"eagle_config.{IDS}": [1, 6, 3]}),
    Case(
        "unsorted_ids",
        "warning",
        "taken in that order",
        {f"eagle_config.{IDS}": [1, 6, 3]},
        override={"order": "as_listed"},
    ),
    Case("unsorted_ids", "warning", "taken in ascending order", {IDS: [8, 2, 4]}, dialect="speculators"),
    # what eagle3_ext takes away
    Case(
        "tensor_left_out",
        "info",
        "eagle3_ext takes the target's in its place",
        override={"embed": "target"},
        dialect="speculators",
    ),
    # rope
    Case("rope_type", "error", "got rope_type 'yarn' without factor", {"rope_scaling": {"type": "yarn"}}),
    Case("rope_type", "error", "got rope_type 'spiral'", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}),
    Case(
        "rope_type",
        "error",
        "without factor, low_freq_factor, high_freq_factor",
        {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64}},
    ),
    Case(
        "rope_type",
        "error",
        "eagle3_ext.rope_scaling: got rope_type 'yarn' without",
        override={"rope_scaling": {"rope_type": "yarn"}},
    ),
    Case(
        "config_value",
        "error",
        "rope_scaling.factor: got '8'; expected a number from 1",
        {"rope_scaling": {"type": "linear", "factor": "8"}},
    ),
    Case("rope_type", "error", "got rope_type []", {"rope_scaling": {"rope_type": []}}),
    Case("config_value", "error", "rope_theta: got 0", {"rope_theta": 0}),
    Case("config_value", "error", "rms_norm_eps: got nan", {"rms_norm_eps": float("nan")}),
    Case("config_value", "error", "max_position_embeddings: got -1", {"max_position_embeddings": -1}),
    Case("config_value", "error", "partial_rotary_factor: got 2", {"partial_rotary_factor": 2}),
    Case(
        "rope_clash",
        "warning",
        "beside rope_scaling",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ),
    Case(
        "rope_clash",
        "warning",
        "got 50000, 10000 at different places",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    Case(
        "rope_per_layer_type",
        "error",
        "got one object per layer type",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ),
    Case(
        "rope_not_as_written",
        "info",
        "which scales nothing up to max_position_embeddings in training; none was taken",
        {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 8.0}},
        override={"producer": "angelslim"},
    ),
    Case(
        "rope_not_as_written",
        "warning",
        "got 1e+06, which angelslim does not read in training; 10000 was taken",
        dialect="angelslim",
        also=("tied_with_head",),
    ),
    # windows
    Case(
        "sliding_window",
        "info",
        "got 64; the draft is served with this window",
        {"sliding_window": 64, "use_sliding_window": True},
    ),
    Case(
        "sliding_window",
        "info",
        "got 64; the draft is served with this window",
        {"sliding_window": 64, "layer_types": ["sliding_attention"]},
    ),
    Case("sliding_window_unclear", "warning", "without use_sliding_window or layer_types", {"sliding_window": 64}),
    Case(
        "sliding_window_mixed",
        "error",
        "expected one kind of attention",
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        sizes={"layers": 2},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.code}: {c.phrase[:40]}")
def test_reports(tmp_path, case):
    write_draft(
        tmp_path,
        case.dialect,
        config_changes=case.config,
        tensor_changes=case.tensors,
        **case.sizes,
    )
    spec = formats.read_draft(tmp_path, override=case.override)
    own = [f for f in spec.findings if f.code == case.code]
    assert [f.severity for f in own] == [case.severity]
    assert case.phrase in own[0].message
    # What a command line says lies in no folder.
    assert own[0].message.startswith((f"{tmp_path}/", "--json-model-override-args:eagle3_ext."))
    assert case.override or not own[0].message.startswith("--")
    # The shape: <file:key>: <what is wrong, got ...>; <what was expected>. <what to do>.
    assert own[0].message.endswith(".")
    assert sorted(f.code for f in spec.findings if f is not own[0]) == sorted(case.also)


def test_keys_at_their_usual_value_are_no_finding(tmp_path):
    usual = {"use_input_layernorm_in_first_layer": True, "next_layer_regular": True, "parallel_draft_step": 1}
    assert formats.read_draft(write_draft(tmp_path, config_changes=usual)).findings == ()


def test_findings_come_all_at_once(tmp_path):
    write_draft(
        tmp_path,
        config_changes={"hidden_act": "relu", "norm_before_fc": True},
        tensor_changes={"lm_head.weight": None, "mask_hidden": torch.ones(3)},
    )
    codes = {f.code for f in formats.read_draft(tmp_path).findings if f.severity == "error"}
    assert codes == {"hidden_act", "missing_tensor", "head_missing", "unconsumed_tensor"}


@pytest.mark.parametrize(
    ("config", "theta", "scaling", "partial"),
    [
        ({"rope_theta": DELETE}, 1e4, None, 1.0),
        ({"rope_theta": 5e5}, 5e5, None, 1.0),
        ({"rope_theta": DELETE, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None, 1.0),
        ({"rope_theta": DELETE, "rope_scaling": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None, 1.0),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, {"rope_type": "linear", "factor": 4.0}, 1.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1e4, {"rope_type": "linear", "factor": 4.0}, 1.0),
        (
            {"rope_theta": DELETE, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            1e4,
            {"rope_type": "linear", "factor": 4.0},
            1.0,
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            1e4,
            {"rope_type": "linear", "factor": 4.0},
            1.0,
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}},
            1e4,
            {"rope_type": "default", "mrope_section": [2, 2, 2]},
            1.0,
        ),
        ({"partial_rotary_factor": 0.5}, 1e4, None, 0.5),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 1e4, None, 0.5),
    ],
)
def test_rope_reads_the_same_in_every_spelling(tmp_path, config, theta, scaling, partial):
    spec = formats.read_draft(write_draft(tmp_path, config_changes=config))
    assert (spec.rope.theta, spec.rope.scaling, spec.rope.partial_rotary_factor) == (theta, scaling, partial)
    assert spec.origins["rope_scaling"] == ("config" if scaling else "default")
    assert spec.findings == ()


@pytest.mark.parametrize(
    ("config", "tensors", "sizes", "sentence"),
    [
        ({"draft_vocab_size": DELETE}, {}, {}, "stock stops without the key draft_vocab_size"),
        (
            {"draft_vocab_size": None},
            {},
            {"draft_vocab": 96},
            "stock puts the target's head in the place of the draft's",
        ),
        ({"target_hidden_size": None}, {}, {}, "stock stops at target_hidden_size: null"),
        ({"tie_word_embeddings": True}, {}, {}, "stock ties the head to the embedding and drops the stored one"),
        ({"num_hidden_layers": 36}, {}, {}, "stock builds 36 layers, of which the file fills 1"),
        ({"norm_before_residual": True}, {}, {}, "stock adds attention to the fc output before hidden_norm"),
        ({"eagle_config.norm_output": True}, {}, {}, "stock does not read norm_output inside eagle_config"),
        ({}, {"embed_tokens.weight": torch.ones(96, 32)}, {}, "stock puts the target's embedding in the place"),
        ({}, {"fc.bias": NORM}, {}, "stock builds fc without the stored bias"),
        ({}, {"midlayer.self_attn.o_proj.bias": NORM}, {}, "stock builds o_proj without the stored bias"),
        ({"attention_bias": True}, {}, {}, "stock builds o_proj with a random bias"),
        (
            {},
            {f"midlayer.self_attn.{p}_norm.weight": torch.ones(12) for p in "qk"},
            {},
            "stock drops the q and k norms",
        ),
        ({}, {}, {"num_sources": 4}, "stock builds fc for 96 input columns, the file has 128"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            {},
            {},
            "stock turns whole heads",
        ),
        ({"use_last_layernorm": False}, {"norm.weight": None}, {}, "stock applies a final norm before the head"),
        ({"head_dim": DELETE}, {}, {}, "stock takes head_dim 8"),
    ],
)
def test_names_what_stock_would_compute_otherwise(tmp_path, config, tensors, sizes, sentence):
    spec = formats.read_draft(write_draft(tmp_path, config_changes=config, tensor_changes=tensors, **sizes))
    assert any(sentence in difference for difference in spec.stock.differences), spec.stock.differences
