"""``assembly.plan``: boundaries, order and findings on hand-worked cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import write_draft, write_target

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import TargetFacts, stock_reading

IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"


def target(architecture="LlamaForCausalLM", layers=60, hidden=32, vocab=96):
    return TargetFacts("the/target", architecture, layers, hidden, vocab, stock_reading(architecture))


def plan(tmp_path, facts=None, *, override=None, config=None, **details):
    spec = formats.read_draft(write_draft(tmp_path, config_changes=config, **details), override=override)
    return assembly.plan(spec, facts or target())


def codes(plan, severity=None):
    return [f.code for f in plan.findings if severity in (None, f.severity)]


def test_the_story(tmp_path):
    """A draft trained on the embedding and the outputs of layers 3 and 31, on a target of 60 layers."""
    p = plan(tmp_path, override={"sources": ["embed", "layer3", "layer31"]})
    assert p.boundaries == p.capture == (0, 4, 32)
    assert p.is_identity
    assert p.stock_boundaries == (2, 30, 57)
    assert p.stock_ids == (-1, 3, 31)
    assert not p.equals_stock
    assert p.differences == (
        "stock feeds fc with [layer 1 output | layer 29 output | layer 56 output]; "
        "this draft was trained on [embedding | layer 3 output | layer 31 output]",
    )
    assert assembly.spellings(p) == {"sglang": (-1, 3, 31), "vllm": (0, 4, 32), "hf": (0, 4, 32)}
    assert codes(p) == []


def test_served_as_ids_on_a_deepseek_like_target(tmp_path):
    """The list [3, 31, 59] that the story's config held is one layer early on such a target."""
    p = plan(tmp_path, target("KimiK25ForConditionalGeneration", 61), config={IDS: [3, 31, 59]})
    assert p.boundaries == (3, 31, 59)
    assert p.equals_stock
    assert codes(p) == ["layer_ids_two_readings"]
    assert p.findings[0].severity == "warning"
    assert "boundaries [3, 31, 59]; the other convention gives" in p.findings[0].message
    assert "boundaries [4, 32, 60]" in p.findings[0].message


@pytest.mark.parametrize(
    ("architecture", "ids", "n", "boundaries", "severity"),
    [
        ("LlamaForCausalLM", [3, 31, 57], 60, (4, 32, 58), "info"),
        ("LlamaForCausalLM", [-1, 3, 31], 60, (0, 4, 32), None),
        ("DeepseekV3ForCausalLM", [1, 29, 57], 61, (2, 30, 58), "warning"),
        ("DeepseekV3ForCausalLM", [2, 30, 58], 61, (2, 30, 58), "warning"),
        ("GptOssForCausalLM", [1, 17, 32], 36, (2, 18, 33), "info"),
        ("GptOssForCausalLM", [24, 30, 36], 36, (24, 30, 36), None),
        ("NobodyKnowsForCausalLM", [1, 3, 5], 60, (2, 4, 6), "warning"),
    ],
)
def test_plain_ids_keep_the_reading_of_stock(tmp_path, architecture, ids, n, boundaries, severity):
    p = plan(tmp_path, target(architecture, n), config={IDS: ids})
    assert p.boundaries == boundaries
    readings = [f for f in p.findings if f.code == "layer_ids_two_readings"]
    expected = severity
    if architecture.startswith("GptOss") and severity:
        expected = "warning"
    assert [f.severity for f in readings] == ([expected] if expected else [])


@pytest.mark.parametrize(("meaning", "boundaries"), [("output", (2, 18, 33)), ("boundary", (1, 17, 32))])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
def test_a_declared_meaning_settles_the_ids(tmp_path, meaning, boundaries, architecture):
    p = plan(tmp_path, target(architecture), config={IDS: [1, 17, 32]}, override={"layer_ids": meaning})
    assert p.boundaries == boundaries
    assert codes(p) == []


def test_order_of_ids(tmp_path):
    ascending = plan(tmp_path / "a", config={IDS: [31, -1, 3]})
    assert ascending.boundaries == (0, 4, 32)
    assert ascending.is_identity
    listed = plan(tmp_path / "b", config={IDS: [31, -1, 3]}, override={"order": "as_listed"})
    assert listed.boundaries == (32, 0, 4)
    assert listed.capture == (0, 4, 32)
    assert listed.block_of == (1, 2, 0)
    assert "unsorted_ids" in codes(ascending, "warning")
    assert "unsorted_ids" in codes(listed, "warning")
    assert ascending.equals_stock
    assert not listed.equals_stock


def test_the_first_id_as_listed_decides_on_a_deepseek_like_target(tmp_path):
    p = plan(tmp_path, target("DeepseekV3ForCausalLM", 61), config={IDS: [3, 1, 57]})
    assert p.boundaries == p.stock_boundaries == (1, 3, 57)


def test_last_and_final_norm(tmp_path):
    p = plan(tmp_path, override={"sources": ["final_norm", "last", "embed"]})
    assert p.boundaries == ("final_norm", 60, 0)
    assert p.capture == (0, 60, "final_norm")
    assert p.block_of == (2, 1, 0)
    assert p.stock_ids is None
    assert assembly.spellings(p) == {"sglang": None, "vllm": None, "hf": (60, None, 0)}
    assert codes(p) == []


def test_sources_in_ascending_order(tmp_path):
    p = plan(tmp_path, override={"sources": ["last", "layer3", "embed"], "order": "ascending"})
    assert p.boundaries == (0, 4, 60)
    assert p.is_identity


def test_draft_without_fc_reads_what_stock_feeds_it(tmp_path):
    path = write_draft(
        tmp_path,
        config_changes={"eagle_config.use_aux_hidden_state": False},
        tensor_changes={"fc.weight": None},
    )
    p = assembly.plan(formats.read_draft(path), target())
    assert p.boundaries == p.capture == p.stock_boundaries == ("final_norm",)
    assert p.equals_stock
    assert codes(p) == []


def test_no_sources_take_the_default_of_stock_and_say_so(tmp_path):
    p = plan(tmp_path)
    assert p.boundaries == p.stock_boundaries == (2, 30, 57)
    assert p.equals_stock
    assert p.origins["sources"] == p.origins["boundaries"] == "default"
    assert codes(p) == ["no_sources_declared"]
    assert "[layer 1 output | layer 29 output | layer 56 output], boundaries [2, 30, 57]" in p.findings[0].message


def test_shifted_default(tmp_path):
    p = plan(tmp_path, target("MiniMaxM3SparseForConditionalGeneration"))
    assert p.boundaries == (3, 31, 58)
    assert p.equals_stock


@pytest.mark.parametrize(
    ("layers", "default"), [(3, (0, 1, 2)), (4, (1, 2, 2)), (5, (2, 2, 2)), (6, (2, 3, 3)), (2, (-1, 1, 2))]
)
def test_default_collapses_on_a_target_of_few_layers(tmp_path, layers, default):
    p = plan(tmp_path, target(layers=layers))
    assert p.boundaries == default
    expected = ["default_collapses"] if len({b for b in default if b >= 0}) < 3 else []
    assert codes(p, "error") == expected
    assert p.equals_stock == (not expected)


FINDINGS = {
    "source_beyond_depth": (
        {"override": {"sources": ["embed", "layer60", "layer3"]}},
        "error",
        "got layer60 (boundary 61) for a target of 60 layers; every boundary must be in 0..60",
    ),
    "source_beyond_depth of an id": (
        {"config": {IDS: [-2, 3, 5]}},
        "error",
        "got id -2 (boundary -1)",
    ),
    "duplicate_source": (
        {"override": {"sources": ["embed", "layer3", "layer4.input"]}},
        "error",
        "which names boundary 4 more than once",
    ),
    "duplicate_source by depth": (
        {"override": {"sources": ["embed", "last", "layer59"]}},
        "error",
        "which names boundary 60 more than once",
    ),
    "source_count": (
        {"override": {"sources": [f"layer{k}" for k in range(9)]}, "num_sources": 9},
        "error",
        "got 9 sources; expected 1 to 8",
    ),
    "fc_width": (
        {"num_sources": 4},
        "error",
        "reads 128 columns, got 3 sources of width 32 = 96 on the/target",
    ),
    "target_width": (
        {"facts": target(hidden=48), "num_sources": 3, "override": {"sources": ["embed", "layer3", "last"]}},
        "error",
        "target_hidden_size: 32, got the/target with hidden_size 48",
    ),
    "vocab_size": (
        {"facts": target(vocab=97), "override": {"sources": ["embed", "layer3", "last"]}},
        "error",
        "vocab_size: 96, got the/target with vocab_size 97",
    ),
    "verifier_mismatch": (
        {
            "facts": target("Qwen3ForCausalLM"),
            "dialect": "speculators",
            "override": {"sources": ["embed", "layer3", "last"]},
        },
        "warning",
        "records LlamaForCausalLM (a/target), got Qwen3ForCausalLM",
    ),
    "target_class_unlisted": (
        {"facts": target("NobodyKnowsForCausalLM"), "override": {"sources": ["embed", "layer3", "last"]}},
        "info",
        "stock SGLang has no EAGLE-3 capture on NobodyKnowsForCausalLM",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_reports(tmp_path, name):
    keywords, severity, phrase = FINDINGS[name]
    p = plan(tmp_path, **keywords)
    own = [f for f in p.findings if f.code == name.split()[0]]
    assert [f.severity for f in own] == [severity]
    assert phrase in own[0].message
    assert own[0].message.endswith(".")
    if severity == "error":
        with pytest.raises(CheckpointError, match="expected|must be"):
            assembly.check(p)
    else:
        assembly.check(p)


def test_all_errors_are_raised_at_once(tmp_path):
    p = plan(tmp_path, target(hidden=48, vocab=97), override={"sources": ["layer77", "layer77", "embed"]})
    with pytest.raises(CheckpointError) as raised:
        assembly.check(p)
    assert {f.code for f in raised.value.findings} == {
        "source_beyond_depth",
        "duplicate_source",
        "fc_width",
        "target_width",
        "vocab_size",
    }
    assert len(str(raised.value).splitlines()) == 5


def test_a_pair_is_read_and_planned(tmp_path):
    draft, served = write_draft(tmp_path / "d"), write_target(tmp_path / "t")
    p = assembly.plan_pair(draft, served)
    assert (p.spec.path, p.target.path) == (str(draft), str(served))


def test_a_pair_with_the_problems_of_both(tmp_path):
    draft, served = write_draft(tmp_path / "d"), write_target(tmp_path / "t")
    with pytest.raises(CheckpointError) as raised:
        assembly.plan_pair(served, draft)
    assert [f.code for f in raised.value.findings] == ["dialect_unknown", "target_is_draft"]


def test_a_wrong_key_does_not_hide_a_wrong_target(tmp_path):
    draft = write_draft(tmp_path / "d", config_changes={"eagle3_ext": {"sorces": []}})
    served = write_target(tmp_path / "t", hidden=48, vocab=97)
    with pytest.raises(CheckpointError) as raised:
        assembly.plan_pair(draft, served)
    assert [f.code for f in raised.value.findings] == ["eagle3_ext", "target_width", "vocab_size"]


def test_a_broken_target_hides_nothing_of_the_draft(tmp_path):
    draft = write_draft(tmp_path / "d", config_changes={"eagle3_ext": {"sources": ["embed", "embed", "layer2"]}})
    served = write_target(tmp_path / "t", config_changes={"num_hidden_layers": 0})
    with pytest.raises(CheckpointError) as raised:
        assembly.plan_pair(draft, served)
    assert {f.code for f in raised.value.findings} >= {"duplicate_source"}
    assert len(raised.value.findings) == 2


def test_a_width_that_disagrees_within_the_checkpoint_is_reported_once(tmp_path):
    p = plan(tmp_path, override={"sources": ["embed", "last"]})
    assert codes(p) == ["fc_width"]


@pytest.mark.parametrize(
    ("keywords", "code"),
    [
        ({}, "no_sources_declared"),
        ({"config": {IDS: [3, 31, 57]}}, "layer_ids_two_readings"),
        ({"config": {IDS: [31, -1, 3]}}, "unsorted_ids"),
        (
            {"config": {"norm_output": True}, "override": {"sources": ["embed", "layer3", "last"]}},
            "norm_output_two_meanings",
        ),
    ],
)
def test_strict_turns_ambiguities_into_errors(tmp_path, keywords, code):
    lenient = plan(tmp_path, **keywords)
    assert code in codes(lenient)
    assembly.check(lenient)
    strict = plan(tmp_path, **keywords | {"override": keywords.get("override", {}) | {"strict": True}})
    assert code in codes(strict, "error")
    with pytest.raises(CheckpointError):
        assembly.check(strict)


def test_strict_leaves_a_settled_draft_alone(tmp_path):
    p = plan(tmp_path, override={"sources": ["embed", "layer3", "last"], "strict": True})
    assembly.check(p)


def test_differences_of_the_checkpoint_stand_beside_those_of_the_boundaries(tmp_path):
    p = plan(tmp_path, config={"norm_before_residual": True})
    assert p.stock_boundaries == p.boundaries
    assert not p.equals_stock
    assert p.differences == p.spec.stock.differences
    q = plan(tmp_path, config={"norm_before_residual": True}, override={"sources": ["embed", "layer3", "last"]})
    assert len(q.differences) == 2


def test_stock_on_gemma_3_takes_only_the_embedding_right(tmp_path):
    p = plan(tmp_path / "a", target("Gemma3ForCausalLM"), config={IDS: [-1, 3, 31]})
    assert p.boundaries == p.stock_boundaries
    assert p.stock_ids is None
    assert "without the residual stream" in p.differences[0]
    q = plan(tmp_path / "b", target("Gemma3ForCausalLM"), config={IDS: [-1]}, num_sources=1)
    assert q.stock_ids == (-1,)
    assert q.differences == ("stock skips fc, because its input is as wide as the draft",)


def test_stock_loses_boundary_n_where_the_class_does(tmp_path):
    lost = plan(tmp_path, config={IDS: [3, 31, 59]})
    assert lost.boundaries == (4, 32, 60)
    assert lost.stock_boundaries is None
    assert lost.stock_ids is None
    assert not lost.equals_stock
    kept = plan(tmp_path, target("Gemma4ForCausalLM"), config={IDS: [3, 31, 59]})
    assert kept.stock_boundaries == (4, 32, 60)
    assert kept.equals_stock


@pytest.mark.parametrize(
    ("boundary", "words"),
    [
        (0, "embedding"),
        (1, "layer 0 output"),
        (59, "layer 58 output"),
        (60, "layer 59 output (last)"),
        ("final_norm", "final norm"),
    ],
)
def test_spell(boundary, words):
    assert assembly.spell(boundary, 60) == words


def test_permuted_on_disk_with_matching_sources_is_the_same_draft(tmp_path):
    """Blocks in another order with the matching sources give the same fc weight in capture order."""
    weight = torch.randn(32, 96)
    order = (2, 0, 1)
    texts = ["embed", "layer3", "layer15"]
    a = plan(tmp_path / "a", override={"sources": texts})
    b = plan(tmp_path / "b", override={"sources": [texts[i] for i in order]})
    stored = torch.cat([weight[:, 32 * i : 32 * (i + 1)] for i in order], dim=1)
    assert a.capture == b.capture
    assert torch.equal(assembly.permute_fc_weight(weight, a), assembly.permute_fc_weight(stored, b))


def test_column_order_without_a_target_agrees_with_the_plan(tmp_path):
    texts = ["final_norm", "layer7", "last", "embed"]
    p = plan(tmp_path, num_sources=4, override={"sources": texts, "order": "ascending"})
    assert [s.text for s in assembly.column_order(p.spec.sources, "ascending")] == [
        "embed",
        "layer7",
        "last",
        "final_norm",
    ]
    assert p.boundaries == (0, 8, 60, "final_norm")
    assert assembly.column_order(p.spec.sources, "as_listed") == p.spec.sources


def test_the_plan_never_mixes_up_targets(tmp_path):
    p = plan(tmp_path, override={"sources": ["embed", "layer3", "last"]})
    q = assembly.plan(p.spec, replace(p.target, num_layers=12))
    assert (p.boundaries[-1], q.boundaries[-1]) == (60, 12)


@pytest.mark.parametrize(
    ("config", "context", "severity"),
    [
        ({}, 128, None),
        ({}, None, None),
        ({}, 129, "info"),
        # SGLang multiplies the length by the factor of the scalings that stretch it.
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 256, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 257, "info"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
            129,
            "info",
        ),
        # Where nothing is scaled nothing is stretched.
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 128, None),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 129, "info"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 129, "info"),
    ],
)
def test_a_draft_with_fewer_positions_than_its_target(tmp_path, config, context, severity):
    p = plan(
        tmp_path,
        replace(target(), context=context),
        override={"sources": ["embed", "layer3", "layer31"]},
        config={"max_position_embeddings": 128, **config},
    )
    found = [f for f in p.findings if f.code == "short_context"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert any("stock stops" in sentence for sentence in p.differences) == bool(severity)


@pytest.mark.parametrize(("context", "severities"), [(64, []), (65, ["warning"]), (129, ["warning", "info"])])
def test_longrope_is_another_rotation_beyond_its_trained_length(tmp_path, context, severities):
    lists = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    scaling = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 64}
    p = plan(
        tmp_path,
        replace(target(), context=context),
        override={"sources": ["embed", "layer3", "layer31"]},
        config={"max_position_embeddings": 128, "rope_scaling": scaling},
    )
    found = [f for f in p.findings if f.code == "short_context"]
    assert [f.severity for f in found] == severities
    assert not found or "--context-length 64" in found[0].message
