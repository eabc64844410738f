"""``assembly.spell_ids``: the ids of other programs beside boundaries in fc column order; lists worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from checkpoints import write_draft

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.host import startup
from sglang_eagle3_ext.spec import AssemblyPlan, TargetFacts, stock_reading


def plan(tmp_path, sources, architecture) -> AssemblyPlan:
    spec = formats.read_draft(write_draft(tmp_path, num_sources=len(sources)), override={"sources": sources})
    return assembly.plan(spec, TargetFacts("target", architecture, 60, 32, 96, stock_reading(architecture)))


ASCENDING = ", and it concatenates in ascending order, whatever its list says"
CASES = [
    (["embed", "layer3", "layer31"], "LlamaForCausalLM", "-1, 3, 31", "0, 4, 32", "0, 4, 32"),
    (
        ["layer31", "embed", "layer3"],
        "LlamaForCausalLM",
        f"31, -1, 3 (to be listed as -1, 3, 31{ASCENDING})",
        f"32, 0, 4 (to be listed as 0, 4, 32{ASCENDING})",
        "32, 0, 4",
    ),
    # Without 1 in the first place ids are boundaries there.
    (
        ["layer0", "layer2", "layer4"],
        "DeepseekV3ForCausalLM",
        "1, 3, 5 (to be listed as 3, 5, 1)",
        "1, 3, 5",
        "1, 3, 5",
    ),
    (
        ["last", "embed", "layer3"],
        "GptOssForCausalLM",
        f"59, -1, 3 (to be listed as -1, 3, 59{ASCENDING})",
        f"60, 0, 4 (to be listed as 0, 4, 60{ASCENDING})",
        "none, 0, 4",
    ),
    (["final_norm", "embed"], "LlamaForCausalLM", "not expressible", "not expressible", "60, 0"),
]


@pytest.mark.parametrize(("sources", "architecture", "sglang", "vllm", "hf"), CASES)
def test_ids_stand_in_fc_column_order(tmp_path, sources, architecture, sglang, vllm, hf):
    found = list(assembly.spell_ids(plan(tmp_path, sources, architecture)))
    assert found == [("SGLang ids", sglang), ("vLLM ids", vllm), ("hidden_states", hf)]


def test_the_start_up_block_has_the_same_words(tmp_path):
    resolved = plan(tmp_path, *CASES[1][:2])
    runner = SimpleNamespace(
        model=SimpleNamespace(embed_origin="the target's", model=SimpleNamespace(computed_by="operators")),
        attn_backend=object(),
        model_config=SimpleNamespace(quantization=None),
        dtype="float32",
    )
    lines = startup.block(resolved, runner, SimpleNamespace(text="proved"))
    for label, text in assembly.spell_ids(resolved):
        assert f"  {label:<17} {text}" in lines
    assert any(line.startswith("  boundaries        [32, 0, 4], order as_listed") for line in lines)
