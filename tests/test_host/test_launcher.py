"""What the launcher says about the flags beside a draft; whole launches are in ``test_e2e/test_refusals.py``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import DELETE, write_draft

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import read_draft
from sglang_eagle3_ext.host import config, launcher
from sglang_eagle3_ext.host.launcher import flag_findings


def flags(**changes):
    plain = {
        "pp_size": 1,
        "enable_two_batch_overlap": False,
        "attn_dp_size": 1,
        "attn_cp_size": 1,
        "enable_prefill_cp": False,
        "enable_pdmux": False,
        "enable_multi_layer_eagle": False,
        "speculative_draft_model_quantization": None,
        "_speculative_draft_quantization_explicitly_set": False,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    return SimpleNamespace(**(plain | changes))


def spec(tmp_path, **declared):
    changes = {"eagle3_ext": {"sources": ["embed", "layer3", "last"], **declared}}
    return read_draft(write_draft(tmp_path / "draft", config_changes=changes))


def found(*args):
    return [(f.severity, f.code) for f in flag_findings(*args)]


def test_flags_that_agree_say_nothing(tmp_path):
    draft = spec(tmp_path)
    assert found(flags(), 4, draft) == found(flags(), None, draft) == []
    assert found(flags(speculative_eagle_topk=4, speculative_num_draft_tokens=8), 8, draft) == []


@pytest.mark.parametrize(("strict", "severity"), [(False, "warning"), (True, "error")])
def test_adjusted_draft_tokens_are_said_with_the_effective_values(tmp_path, strict, severity, caplog):
    (finding,) = flag_findings(flags(), 7, spec(tmp_path, strict=strict))
    assert (finding.severity, finding.code) == (severity, "draft_tokens_adjusted")
    assert "got 7 with --speculative-num-steps 3" in finding.message
    assert "steps 3, topk 1, draft tokens 4" in finding.message
    # Where it is an error it is raised, and said once.
    assert len(caplog.records) == (0 if strict else 1)


def test_every_problem_is_found_at_once(tmp_path):
    args = flags(
        pp_size=2,
        enable_two_batch_overlap=True,
        attn_dp_size=2,
        attn_cp_size=2,
        enable_pdmux=True,
        enable_multi_layer_eagle=True,
    )
    assert found(args, 5, spec(tmp_path)) == [
        ("error", "pipeline_parallel"),
        ("error", "two_batch_overlap"),
        ("error", "attention_data_parallel"),
        ("error", "context_parallel"),
        ("error", "prefill_multiplexing"),
        ("error", "multi_layer_eagle"),
        ("warning", "draft_tokens_adjusted"),
    ]


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 9999])
def test_an_override_that_is_no_object_is_refused(text):
    with pytest.raises(CheckpointError, match="^--json-model-override-args: got .*; expected a JSON object"):
        launcher._override(SimpleNamespace(json_model_override_args=text))


def test_a_rope_on_the_command_line_is_said_to_be_the_targets(caplog):
    given = '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "eagle3_ext": {}}'
    launcher._note_ropes_of_the_target(SimpleNamespace(json_model_override_args='{"eagle3_ext": {}}'))
    assert not caplog.records
    launcher._note_ropes_of_the_target(SimpleNamespace(json_model_override_args=given))
    assert "got rope_scaling, which is the target's alone" in caplog.records[0].getMessage()
    assert "eagle3_ext.rope_scaling" in caplog.records[0].getMessage()


NO_CLASS = {
    "no architectures": {"architectures": None},
    "none that is a name": {"architectures": [None]},
    "a whole model": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "draft_vocab_size": None},
    "a typing error": {"architectures": ["LlamaForCausalLMEagel3"]},
    "nobody's draft class": {"architectures": ["PEagleLlamaForCausalLM"]},
}


@pytest.mark.host
@pytest.mark.parametrize("changes", NO_CLASS.values(), ids=NO_CLASS)
def test_what_no_draft_class_serves_is_refused(tmp_path, changes):
    # No fc: nothing but the config says what it is.
    path = write_draft(tmp_path / "draft", config_changes=changes, tensor_changes={"fc.weight": None})
    with pytest.raises(CheckpointError, match=r"config\.json: .*expected an EAGLE-3 draft"):
        config.read_spec(str(path), None, None)


@pytest.mark.host
@pytest.mark.parametrize("override", [None, {}])
def test_a_draft_that_declares_nothing_is_read_so(tmp_path, override):
    spec = config.read_spec(str(write_draft(tmp_path / "draft", config_changes={"eagle3_ext": DELETE})), None, override)
    assert spec is not None
    assert not spec.has_eagle3_ext


@pytest.mark.host
def test_a_draft_class_of_another_kind_is_left_alone(tmp_path):
    path = write_draft(tmp_path / "draft", config_changes={"architectures": ["MistralForCausalLMEagle"]})
    assert config.read_spec(str(path), None, None) is None
    with pytest.raises(CheckpointError, match="MistralForCausalLMEagle|no dialect claims it"):
        config.read_spec(str(path), None, {"sources": ["embed", "layer3", "last"]})


@pytest.mark.host
@pytest.mark.parametrize(
    ("method", "is_explicit", "codes"),
    [
        ("awq", True, [("error", "draft_quantization")]),
        ("fp8", True, []),  # quantises plain weights while it loads
        ("awq", False, []),  # the target's, and not handed on
        (None, False, []),
    ],
)
def test_a_plain_draft_under_a_quantisation(tmp_path, method, is_explicit, codes):
    args = flags(
        speculative_draft_model_quantization=method, _speculative_draft_quantization_explicitly_set=is_explicit
    )
    assert found(args, 4, spec(tmp_path)) == codes


@pytest.mark.host
def test_a_llama_type_draft_gets_a_backend_of_its_own_beside_a_latent_one(tmp_path, caplog):
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.server_args import ServerArgs

    def resolved(draft, **named):
        args = ServerArgs(model_path="target", **named)
        launcher._settle_draft_backend(args, resolving_view(args), draft)
        return resolving_view(args).speculative_draft_attention_backend

    llama = spec(tmp_path)
    latent = replace(llama, attention=replace(llama.attention, kind="mla"))
    assert resolved(llama, attention_backend="flashmla") == "triton"
    assert "flashmla" in caplog.records[0].getMessage()
    assert "--speculative-draft-attention-backend" in caplog.records[0].getMessage()
    assert resolved(llama, attention_backend="triton", decode_attention_backend="trtllm_mla") == "triton"
    assert len(caplog.records) == 2
    assert resolved(llama, attention_backend="flashmla", speculative_draft_attention_backend="fa3") == "fa3"
    assert resolved(llama, attention_backend="fa3") is None
    assert resolved(latent, attention_backend="flashmla") is None
    assert len(caplog.records) == 2


@pytest.mark.host
def test_sglangs_own_arguments_have_the_flags_that_are_asked_for(tmp_path):
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.server_args import ServerArgs

    draft = spec(tmp_path)
    assert found(resolving_view(ServerArgs(model_path="target")), None, draft) == []
    for changes, code in (
        ({"pp_size": 2}, "pipeline_parallel"),
        ({"enable_two_batch_overlap": True}, "two_batch_overlap"),
        ({"enable_pdmux": True}, "prefill_multiplexing"),
        ({"enable_multi_layer_eagle": True}, "multi_layer_eagle"),
    ):
        assert found(resolving_view(ServerArgs(model_path="target", **changes)), None, draft) == [("error", code)]


@pytest.mark.host
def test_a_wrong_key_hides_no_value_that_is_no_number(tmp_path):
    from sglang.srt.server_args import ServerArgs

    draft = write_draft(
        tmp_path, config_changes={"fc_norm": 3}, tensor_changes={"fc.weight": torch.full((32, 96), torch.nan)}
    )
    args = ServerArgs(model_path="target", speculative_algorithm="EAGLE3", speculative_draft_model_path=str(draft))
    with pytest.raises(CheckpointError) as raised:
        launcher.check_draft(args)
    assert [finding.code for finding in raised.value.findings] == ["config_type", "not_finite"]


@pytest.mark.host
def test_no_draft_is_an_error():
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="target", speculative_algorithm="EAGLE3")
    with pytest.raises(CheckpointError, match="--speculative-draft-model-path: got none"):
        launcher.check_launch(None, args)
