"""Every dialect's files, spelled as its writer spells them, and who claims which; the facts are written out by hand."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from checkpoints import DELETE, Dialect, write_draft
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import Attention, Latent, Norms, Rope, Source, TargetFacts, Vocab

IDS = "eagle_aux_hidden_state_layer_ids"
CLAIMED = {name: name for name in formats.READERS} | {"specforge": "eagle", "modelopt_megatron": "modelopt"}


def shared(spec, dialect):
    """Return the canonical names that the files of all dialects have, but for the attention of an MLA draft."""
    names = set(spec.weights.values()) - {"t2d", "embed_tokens.weight"}
    return {name for name in names if dialect != "deepseek" or ".self_attn." not in name}


def codes(spec):
    return [f.code for f in spec.findings]


@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize("layers", [1, 2])
def test_exactly_one_dialect_claims_its_own_files_and_reads_the_same_draft(tmp_path, dialect, layers):
    spec = formats.read_draft(write_draft(tmp_path, dialect, layers=layers, num_sources=2))
    assert spec.format == CLAIMED[dialect]
    assert (spec.num_sources, spec.target_hidden_size, spec.hidden_size, spec.fc_in) == (2, 32, 32, 64)
    assert spec.norms == Norms("none", "pre_norm", "pre_norm", True)
    if dialect == "deepseek":
        assert spec.attention == Attention("mla", layers, 4, 4, 12, latent=Latent(14, 16, 8, 4, 6))
    else:
        assert spec.attention == Attention("gqa", layers, 4, 2, 12)
    assert spec.vocab == Vocab(96, 37, "offset")
    assert (spec.intermediate_size, spec.rms_norm_eps, spec.max_position_embeddings) == (40, 1e-5, 512)
    assert spec.lm_head == "own"
    assert not [f for f in spec.findings if f.severity == "error"]
    assert (spec.missing, spec.unconsumed) == ((), ())
    # The same canonical tensors, whatever the file calls them.
    plain = formats.read_draft(write_draft(tmp_path / "plain", layers=layers, num_sources=2))
    assert shared(spec, dialect) == shared(plain, dialect)
    by_name = ("deepseek", "modelopt", "specforge", "torchspec")
    loads = dialect in by_name or (dialect == "modelopt_megatron" and layers == 1)
    assert spec.stock.loads == loads
    assert loads or any(spec.architecture in sentence for sentence in spec.stock.differences)


@pytest.mark.parametrize(
    ("dialect", "ids", "listed", "layer_ids", "order", "producer"),
    [
        ("modelopt", f"eagle_config.{IDS}", [1, 3, 5], "stock", "ascending", "modelopt"),
        ("modelopt_megatron", f"eagle_config.{IDS}", [1, 6, 3], "stock", "ascending", "modelopt"),
        ("torchspec", f"eagle_config.{IDS}", [1, 6, 3], "output", "as_listed", "torchspec"),
        ("torchspec", IDS, [1, 3, 5], "output", "as_listed", "torchspec"),
        ("automodel", f"eagle_config.{IDS}", [1, 3, 5], "output", "as_listed", "automodel"),
        ("vllm", IDS, [2, 4, 6], "boundary", "ascending", None),
        ("vllm", f"eagle_config.{IDS}", [2, 4, 6], "boundary", "ascending", None),
    ],
)
def test_what_an_id_means(tmp_path, dialect, ids, listed, layer_ids, order, producer):
    spec = formats.read_draft(write_draft(tmp_path, dialect, config_changes={ids: listed}))
    assert spec.sources == tuple(Source("id", i, f"id {i}") for i in listed)
    assert (spec.layer_ids, spec.order, spec.producer) == (layer_ids, order, producer)
    assert spec.origins["sources"] == "config"
    assert ("unsorted_ids" in codes(spec)) == (listed != sorted(listed))
    assert "top_level_ids" not in codes(spec)


@pytest.mark.parametrize(
    ("architecture", "dialect", "format"),
    [
        ("LlamaForCausalLMEagle3", "specforge", "eagle"),
        ("LlamaForCausalLM", "eagle", "eagle"),
        ("LlamaForCausalLMEagle3Deep", "modelopt_megatron", "modelopt"),
        ("Eagle3DeepseekV2ForCausalLM", "deepseek", "deepseek"),
        ("Eagle3LlamaForCausalLM", "angelslim", "angelslim"),
        ("LlamaEagle3DraftModel", "automodel", "automodel"),
        ("Eagle3Speculator", "speculators", "speculators"),
        ("Eagle3DraftModel", "speculators", "speculators"),
    ],
)
def test_every_name_of_a_class_is_read(tmp_path, architecture, dialect, format):
    spec = formats.read_draft(write_draft(tmp_path, dialect, config_changes={"architectures": [architecture]}))
    assert (spec.format, spec.architecture) == (format, architecture)


def test_a_parallel_draft_is_not_taken_for_one_of_these(tmp_path):
    with pytest.raises(CheckpointError, match="PEagleDraftModel"):
        formats.read_draft(write_draft(tmp_path, config_changes={"architectures": ["PEagleDraftModel"]}))


def test_modelopt(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "modelopt", layers=3))
    assert (spec.format, spec.architecture, spec.producer) == ("modelopt", "LlamaForCausalLMEagle3", "modelopt")
    assert spec.rope == Rope(10000.0)
    assert spec.findings == ()
    # One head of the parallel variant is what every export says; only more steps than one would use it.
    assert spec.stock.differences == tuple(f"stock does not apply input_layernorm in layer {i}" for i in (1, 2))


def test_modelopt_from_megatron(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "modelopt_megatron", layers=2))
    assert (spec.format, spec.architecture) == ("modelopt", "LlamaForCausalLMEagle3Deep")
    assert spec.rope.theta == 500000.0
    assert spec.rope.scaling["rope_type"] == "llama3"
    assert not spec.stock.loads
    assert spec.stock.differences == ("stock refuses the architecture LlamaForCausalLMEagle3Deep",)


def test_modelopt_without_captured_states(tmp_path):
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            "modelopt",
            draft_vocab=96,
            config_changes={"eagle_config.use_aux_hidden_state": False, "draft_vocab_size": None},
            tensor_changes={"fc.weight": None, "lm_head.weight": None},
        )
    )
    assert (spec.num_sources, spec.lm_head, spec.sources) == (0, "target", (Source("final_norm", None, "final_norm"),))
    assert codes(spec) == ["head_from_target"]


@pytest.mark.parametrize("names", ["midlayer.", "layers.0."])
def test_torchspec(tmp_path, names):
    write_draft(tmp_path, "torchspec", config_changes={"norm_output": True})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n.replace("midlayer.", names): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    spec = formats.read_draft(tmp_path)
    assert (spec.format, spec.producer, spec.embed, spec.rope) == ("torchspec", "torchspec", "own", Rope(1e6))
    # Its trainer recycles what it says, so that nothing is left to warn about.
    assert spec.norms.recurrent_state == "post_norm"
    assert spec.findings == ()


@pytest.mark.parametrize("architecture", ["LlamaEagle3DraftModel", "LlamaForCausalLMEagle3"])
def test_automodel(tmp_path, architecture):
    changes = {"architectures": [architecture], "norm_output": True, "fc_norm": True}
    norms = {f"model.fc_norm.{i}.weight": torch.ones(32) for i in range(3)}
    spec = formats.read_draft(write_draft(tmp_path, "automodel", config_changes=changes, tensor_changes=norms))
    assert (spec.format, spec.producer, spec.embed, spec.sources) == ("automodel", "automodel", "own", None)
    assert spec.norms == Norms("per_source", "pre_norm", "post_norm", True)
    assert spec.weights["model.layers.0.self_attn.q_proj.weight"] == "layers.0.self_attn.q_proj.weight"
    assert spec.rope == Rope(1e6)
    # The window and the number of layers in the config are the target's.
    assert spec.attention == Attention("gqa", 1, 4, 2, 12)
    assert codes(spec) == ["layer_count"]


def test_angelslim(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "angelslim"))
    assert (spec.format, spec.producer, spec.sources, spec.layer_ids) == ("angelslim", "angelslim", None, "output")
    assert (spec.rope, spec.origins["rope_theta"]) == (Rope(10000.0), "default")
    assert (spec.lm_head, spec.embed) == ("own", "target")
    assert codes(spec) == ["rope_not_as_written", "tied_with_head"]


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, Rope(1e4)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            Rope(1e4, {"rope_type": "linear", "factor": 2.0}),
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 2]}},
            Rope(1e6, {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 2]}),
        ),
        ({"rope_theta": 10000, "rope_scaling": None}, Rope(1e4)),
    ],
)
def test_angelslim_trains_with_another_rope_than_it_writes(tmp_path, config, rope):
    spec = formats.read_draft(write_draft(tmp_path, "angelslim", config_changes=config))
    assert spec.rope == rope
    read = config.get("rope_theta") == 10000 or "mrope_section" in config["rope_scaling"]
    assert ("rope_not_as_written" in codes(spec)) == (not read)


def test_a_renamed_upload_of_angelslim_needs_its_producer(tmp_path):
    write_draft(tmp_path, "angelslim", config_changes={"architectures": ["LlamaForCausalLMEagle3"]})
    assert formats.read_draft(tmp_path).rope == Rope(1e6)
    spec = formats.read_draft(tmp_path, override={"producer": "angelslim"})
    assert (spec.format, spec.rope, spec.origins["rope_theta"]) == ("eagle", Rope(1e4), "override")
    said = next(f for f in spec.findings if f.code == "rope_not_as_written")
    assert said.severity == "info"
    assert "stock turns the rotary embedding with theta 1e+06 and the config's scaling" in spec.stock.differences
    # What the user says about theta itself stands above what his trainer is known for.
    told = formats.read_draft(tmp_path, override={"producer": "angelslim", "rope_theta": 5e5})
    assert (told.rope, "rope_not_as_written" in codes(told)) == (Rope(5e5), False)


def test_the_eagle_repository_trains_with_one_base(tmp_path):
    """Its inference code reads ``rope_theta`` and its training code (traineagle3/cnets.py) has no such argument."""
    path = write_draft(tmp_path, config_changes={"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5})
    unsettled = formats.read_draft(path)
    [said] = [f for f in unsettled.findings if f.code == "rope_not_as_written"]
    assert (unsettled.rope, said.severity) == (Rope(5e5), "warning")
    assert "got 500000" in said.message
    assert "trains with 10000 " in said.message
    named = formats.read_draft(path, override={"producer": "eagle"})
    assert (named.rope, named.origins["rope_theta"]) == (Rope(1e4), "override")
    told = formats.read_draft(path, override={"rope_theta": 5e5})
    assert (told.rope, "rope_not_as_written" in codes(told)) == (Rope(5e5), False)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"type": "linear", "factor": 2.0}, "whose code trains and infers with 10000 whatever stands there;"),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, None),
    ],
)
def test_the_eagle_repository_has_two_kinds_of_scaling(tmp_path, kind, said):
    scaling = {**kind, "original_max_position_embeddings": 16}
    changes = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "rope_scaling": scaling}
    path = write_draft(tmp_path, config_changes=changes)
    found = [f.message for f in formats.read_draft(path).findings if f.code == "rope_not_as_written"]
    assert [said in message for message in found] == [True] * (said is not None)
    named = formats.read_draft(path, override={"producer": "eagle"})
    [finding] = [f for f in named.findings if f.code == "rope_not_as_written"]
    # Its code stops at other kinds, so that it cannot have trained this one with its own base.
    assert named.rope.theta == (1e4 if said else 5e5)
    assert ("eagle has no code for" in finding.message) == (said is None)


@pytest.mark.parametrize("kind", [None, {"type": "linear", "factor": 2.0}])
def test_older_specforge_trained_with_one_base(tmp_path, kind):
    """Before its pull request 270 (October 2025) SpecForge handed ``rope_theta`` to no rotary embedding."""
    path = write_draft(tmp_path, config_changes={"rope_theta": 5e5, "rope_scaling": kind})
    spec = formats.read_draft(path, override={"producer": "specforge"})
    [said] = [f for f in spec.findings if f.code == "rope_not_as_written"]
    assert (spec.rope.theta, said.severity) == (5e5, "warning")
    assert 'Settle it with "eagle3_ext": {"rope_theta": 500000}, or 10000 for the other reading.' in said.message
    settled = formats.read_draft(path, override={"producer": "specforge", "rope_theta": 1e4})
    assert (settled.rope.theta, "rope_not_as_written" in codes(settled)) == (1e4, False)


@pytest.mark.parametrize(
    "architecture",
    [
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ],
)
def test_vllm(tmp_path, architecture):
    changes = {"architectures": [architecture], "norm_before_residual": True}
    spec = formats.read_draft(write_draft(tmp_path, "vllm", config_changes=changes))
    assert (spec.format, spec.architecture, spec.producer, spec.rope) == ("vllm", architecture, None, Rope(1e6))
    assert spec.norms.residual == "post_norm"
    assert spec.findings == ()
    assert spec.stock.differences == (f"stock refuses the architecture {architecture}",)


def test_ids_tell_vllm_from_angelslim(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "angelslim", config_changes={IDS: [2, 4, 6]}))
    assert (spec.format, spec.rope, spec.layer_ids) == ("vllm", Rope(1e6), "boundary")


def test_two_traces_are_an_error_that_names_both(tmp_path):
    write_draft(tmp_path, "modelopt", config_changes={"_torchspec_version": "0.1.0"})
    with pytest.raises(CheckpointError, match="modelopt and torchspec claim it; expected exactly one"):
        formats.read_draft(tmp_path)


@pytest.mark.parametrize(
    ("dialect", "changes", "claimed"),
    [
        ("vllm", {f"eagle_config.{IDS}": [1, 3, 5]}, "vllm"),
        ("angelslim", {}, "angelslim"),
        ("automodel", {}, "automodel"),
        ("modelopt", {"architectures": ["LlamaForCausalLMEagle3Deep"]}, "modelopt"),
        ("speculators", {}, "speculators"),
    ],
)
@pytest.mark.parametrize(
    ("trace", "trainer"),
    [({"_torchspec_version": "0.1.0"}, "torchspec"), ({"eagle_config.use_mtp_layernorm": False}, "modelopt")],
)
def test_a_class_name_does_not_settle_what_another_trainer_s_trace_contradicts(
    tmp_path, dialect, changes, claimed, trace, trainer
):
    write_draft(tmp_path, dialect, config_changes={**changes, **trace})
    if trainer == claimed:
        assert formats.read_draft(tmp_path).producer == trainer
        return
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(tmp_path)
    [found] = [f for f in raised.value.findings if f.code == "dialect_ambiguous"]
    assert f"config.json: {claimed} claims it, and config.json" in found.message
    assert next(iter(trace)).rpartition(".")[2] in found.message


def test_a_declared_producer_settles_a_contradicted_trace(tmp_path):
    changes = {f"eagle_config.{IDS}": [1, 3, 5], "_torchspec_version": "0.1.0", "eagle3_ext": {"producer": "torchspec"}}
    spec = formats.read_draft(write_draft(tmp_path, "vllm", config_changes=changes))
    target = TargetFacts("target", "LlamaForCausalLM", 12, 32, 96, assembly.stock_reading("LlamaForCausalLM"))
    assert (spec.producer, assembly.plan(spec, target).boundaries) == ("torchspec", (2, 4, 6))


@pytest.mark.parametrize("where", ["config", "command line", "both"])
def test_two_readers_are_settled_by_a_declared_producer(tmp_path, where):
    changes = {"_torchspec_version": "0.1.0", "num_hidden_layers": 36, f"eagle_config.{IDS}": [1, 3, 5]}
    own = {"config": {"producer": "torchspec"}, "both": {"producer": "modelopt"}}.get(where, {})
    override = {} if where == "config" else {"producer": "torchspec"}
    path = write_draft(tmp_path, "modelopt", config_changes={**changes, "eagle3_ext": own})
    spec = formats.read_draft(path, override=override)
    assert (spec.format, spec.producer) == ("torchspec", "torchspec")
    # What the other reader noticed is not the draft's.
    assert codes(spec).count("layer_count") == 1


def test_a_window_of_automodels_target_is_not_the_drafts(tmp_path):
    changes = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    spec = formats.read_draft(write_draft(tmp_path, "automodel", config_changes=changes))
    assert spec.attention.sliding_window is None
    assert not [f for f in spec.findings if f.code.startswith("sliding_window")]


@pytest.mark.parametrize(
    "key",
    ["parallel_drafting", "transformer_layer_config.use_mtp_layernorm", "transformer_layer_config.parallel_drafting"],
)
def test_speculators_keys_that_nothing_computes_are_refused(tmp_path, key):
    spec = formats.read_draft(write_draft(tmp_path, "speculators", config_changes={key: True}))
    assert [f.message for f in spec.findings if f.code == "unserved_key"] == [
        f"{tmp_path}/config.json:{key}: got True; expected False or nothing. Such a draft cannot be served."
    ]


def test_an_ambiguous_dialect_hides_nothing_else(tmp_path):
    changes = {"_torchspec_version": "0.1.0", "hidden_act": "gelu", "eagle3_ext": {"sorces": []}}
    write_draft(tmp_path, "vllm", config_changes=changes)
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(tmp_path)
    assert sorted(f.code for f in raised.value.findings) == ["dialect_ambiguous", "eagle3_ext", "hidden_act"]


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("KimiK3Eagle3DraftModel", "its attention is MLA with an output gate"),
        ("Glm4MoeForCausalLMEagle3", "its MLP is a mixture of experts"),
        ("LlamaForCausalLMEagle", "an EAGLE-1 draft"),
        ("PEagleDraftModel", "P-EAGLE, which drafts all tokens in one pass"),
    ],
)
def test_drafts_that_no_dialect_serves(tmp_path, architecture, reason):
    write_draft(tmp_path, "torchspec", config_changes={"architectures": [architecture]})
    with pytest.raises(CheckpointError, match=reason) as raised:
        formats.read_draft(tmp_path)
    assert [f.code for f in raised.value.findings] == ["dialect_unknown"]


@pytest.mark.parametrize(
    ("dialect", "changes", "key"),
    [
        ("automodel", {"parallel_drafting": True}, "parallel_drafting"),
        ("modelopt", {"eagle_config.use_mtp_layernorm": True}, "eagle_config.use_mtp_layernorm"),
        ("modelopt", {"eagle_config.parallel_draft_step": 2}, "eagle_config.parallel_draft_step"),
    ],
)
def test_what_a_dialect_can_say_and_nothing_serves(tmp_path, dialect, changes, key):
    spec = formats.read_draft(write_draft(tmp_path, dialect, config_changes=changes))
    assert [f.code for f in spec.findings if f.severity == "error"] == ["unserved_key"]
    assert f"config.json:{key}: got " in next(f.message for f in spec.findings if f.code == "unserved_key")


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_a_pruned_draft_without_its_map_is_an_error(tmp_path, dialect):
    # One exporter of ModelOpt never writes it.
    t2d = {} if dialect.startswith("modelopt") else {"t2d": None}
    spec = formats.read_draft(write_draft(tmp_path, dialect, tensor_changes={"d2t": None} | t2d))
    assert [f.code for f in spec.findings if f.severity == "error"] == ["vocab_map_missing"]


def test_head_that_was_pruned_by_offsets(tmp_path):
    tensors = load_file(write_draft(tmp_path, "torchspec") / "model.safetensors")
    full = torch.randn(96, 32)
    offsets = tensors["d2t"]
    for rows, expected in ((offsets, ["head_rows_by_offset"]), (offsets + torch.arange(37), [])):
        save_file(tensors | {"lm_head.weight": full[rows].contiguous()}, tmp_path / "model.safetensors")
        assert [f.code for f in formats.check_values(formats.read_draft(tmp_path))] == expected


def test_a_quantisation_beside_plain_weights_is_the_target_s(tmp_path):
    changes = {"quantization_config": {"quant_method": "fp8"}}
    spec = formats.read_draft(write_draft(tmp_path, "automodel", config_changes=changes))
    assert next(f.severity for f in spec.findings if f.code == "quantization_config") == "info"
    flat = formats.read_draft(write_draft(tmp_path / "flat", config_changes=changes))
    assert any("quantization_config" in sentence for sentence in flat.stock.differences)


@pytest.mark.parametrize("key", ["draft_vocab_size", "target_hidden_size"])
@pytest.mark.parametrize("value", [None, DELETE])
@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_sizes_that_are_null_or_absent_are_read_off_the_tensors(tmp_path, dialect, key, value):
    spec = formats.read_draft(write_draft(tmp_path, dialect, config_changes={key: value}))
    assert (spec.vocab, spec.target_hidden_size, spec.num_sources) == (Vocab(96, 37, "offset"), 32, 3)
    assert not [f for f in spec.findings if f.severity == "error"]
