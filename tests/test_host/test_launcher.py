"""What the launcher says about the flags beside a draft; whole launches are in ``test_e2e/test_refusals.py``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from checkpoints import write_draft

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import read_draft
from sglang_eagle3_ext.host import launcher
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
