"""The ``eagle3_ext`` object: resolution order, origins, and what is refused."""

import pytest
import torch
from checkpoints import write_draft

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.eagle3_ext import PRODUCERS
from sglang_eagle3_ext.spec import Expected, Norms, Rope

IDS = {"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 5]}

FULL = {
    "sources": ["embed", "layer3", "last"],
    "order": "ascending",
    "layer_ids": "boundary",
    "producer": "specforge",
    "vocab_map": "offset",
    "residual": "post_norm",
    "recurrent_state": "post_norm",
    "norms": "none",
    "rope_theta": 5000,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "embed": "target",
    "lm_head": "own",
    "expected": {
        "accept_length": 2.1,
        "accept_per_position": [0.6, 0.3],
        "steps": 2,
        "topk": 1,
        "draft_tokens": 3,
    },
    "strict": True,
}


@pytest.mark.parametrize("where", ["eagle3_ext", "override"])
def test_every_key_is_read_and_its_origin_remembered(tmp_path, where):
    stored = {"eagle3_ext": FULL} if where == "eagle3_ext" else {}
    spec = formats.read_draft(
        write_draft(tmp_path, config_changes=IDS | stored), override=FULL if where == "override" else None
    )
    assert [s.text for s in spec.sources] == FULL["sources"]
    assert (spec.order, spec.layer_ids, spec.producer) == ("ascending", "boundary", "specforge")
    assert spec.norms == Norms("none", "post_norm", "post_norm", True)
    assert spec.rope == Rope(5000.0, {"rope_type": "linear", "factor": 2.0})
    assert spec.expected == Expected(2.1, (0.6, 0.3), 2, 1, 3)
    assert spec.strict
    assert spec.has_eagle3_ext
    fields = {"sources", "order", "layer_ids", "producer", "vocab_map", "residual", "recurrent_state", "norms"}
    fields |= {"rope_theta", "rope_scaling", "embed", "lm_head"}
    assert {field: spec.origins[field] for field in fields} == dict.fromkeys(fields, where)


@pytest.mark.parametrize("verify_steps", [None, 9879])
def test_on_how_much_a_recorded_value_rests_may_be_said(tmp_path, verify_steps):
    noted = FULL["expected"] | {"verify_steps": verify_steps}
    spec = formats.read_draft(write_draft(tmp_path), override={"expected": noted})
    assert spec.expected == Expected(2.1, (0.6, 0.3), 2, 1, 3, verify_steps)


def test_override_is_merged_key_by_key(tmp_path):
    write_draft(
        tmp_path, config_changes=IDS | {"eagle3_ext": {"sources": ["embed", "layer3", "last"], "rope_theta": 5.0}}
    )
    spec = formats.read_draft(tmp_path, override={"rope_theta": 7.0})
    assert spec.rope.theta == 7.0
    assert [s.text for s in spec.sources] == ["embed", "layer3", "last"]
    assert (spec.origins["rope_theta"], spec.origins["sources"]) == ("override", "eagle3_ext")


def test_sources_stand_as_listed_unless_said_otherwise(tmp_path):
    path = write_draft(tmp_path)
    listed = {"sources": ["last", "embed", "layer3"]}
    assert formats.read_draft(path, override=listed).order == "as_listed"
    assert formats.read_draft(path, override=listed | {"order": "ascending"}).order == "ascending"
    # The trainer's habit is about id lists; a list of sources says its own order.
    assert formats.read_draft(path, override=listed | {"producer": "specforge"}).order == "as_listed"


@pytest.mark.parametrize(
    ("producer", "layer_ids", "order"),
    [
        ("angelslim", "output", "as_listed"),
        ("automodel", "output", "as_listed"),
        ("eagle", "boundary", "ascending"),
        ("modelopt", "output", "ascending"),
        ("specforge", "output", "ascending"),
        ("speculators", "boundary", "ascending"),
        ("torchspec", "output", "as_listed"),
    ],
)
def test_producer_settles_what_its_id_list_means(tmp_path, producer, layer_ids, order):
    spec = formats.read_draft(write_draft(tmp_path, config_changes=IDS), override={"producer": producer})
    assert (spec.layer_ids, spec.order) == (layer_ids, order)
    assert spec.origins["layer_ids"] == spec.origins["order"] == "override"
    assert producer in PRODUCERS


def test_keys_win_over_the_producer(tmp_path):
    override = {"producer": "automodel", "layer_ids": "boundary", "order": "ascending"}
    spec = formats.read_draft(write_draft(tmp_path, config_changes=IDS), override=override)
    assert (spec.layer_ids, spec.order) == ("boundary", "ascending")


def test_specforge_means_something_else_by_norm_output(tmp_path):
    on = write_draft(tmp_path / "on", config_changes={"norm_output": True})
    off = write_draft(tmp_path / "off", config_changes={"norm_output": False})
    others = formats.read_draft(on, override={"producer": "automodel"})
    assert others.norms == Norms("none", "pre_norm", "post_norm", True)
    assert others.findings == ()
    specforge = formats.read_draft(on, override={"producer": "specforge"})
    assert specforge.norms == Norms("none", "pre_norm", "pre_norm", True)
    assert specforge.stock.differences == ("stock recycles the post-norm state",)
    without = formats.read_draft(off, override={"producer": "specforge"})
    assert without.norms == Norms("none", "pre_norm", "pre_norm", False)
    assert without.weights["norm.weight"] == "ignored/norm.weight"
    assert without.findings == ()
    assert formats.read_draft(off).norms.final_norm


def test_norms_must_have_their_tensors(tmp_path):
    path = write_draft(tmp_path, tensor_changes={f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)})
    read = formats.read_draft(path, override={"norms": "per_source"})
    assert read.findings == ()
    assert read.stock.differences == ("stock goes by the flags of the config and applies no norm around fc",)
    flagged = write_draft(
        tmp_path / "flagged",
        config_changes={"fc_norm": True},
        tensor_changes={f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)},
    )
    assert formats.read_draft(flagged, override={"norms": "per_source"}).stock.differences == ()
    wrong = formats.read_draft(path, override={"norms": "concatenation"})
    assert {f.code for f in wrong.findings} == {"missing_tensor", "unconsumed_tensor"}


def test_the_scaling_can_be_taken_away(tmp_path):
    path = write_draft(tmp_path, config_changes={"rope_scaling": {"type": "linear", "factor": 2.0}})
    spec = formats.read_draft(path, override={"rope_scaling": None})
    assert spec.rope == Rope(10000.0)
    assert spec.stock.differences
    assert formats.read_draft(path, override={"rope_theta": 10000.0}).stock.differences == ()


def test_every_problem_is_reported_at_once(tmp_path):
    path = write_draft(tmp_path, config_changes={"eagle3_ext": {"source": ["embed"], "strict": "yes"}})
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(path, override={"order": "random", "sources": ["layer 3"], "producer": "me"})
    text = str(raised.value)
    assert len(raised.value.findings) == 5
    assert f"{path}/config.json:eagle3_ext.source: unknown key; expected one of sources, order," in text
    assert 'eagle3_ext.strict: got "yes"; expected true or false. Correct or remove it.' in text
    assert (
        '--json-model-override-args:eagle3_ext.order: got "random"; expected one of as_listed, ascending. Correct'
        in text
    )
    assert "eagle3_ext.sources: 'layer 3' is not a source; expected embed, layerK" in text
    assert 'eagle3_ext.producer: got "me"; expected one of angelslim, automodel' in text


@pytest.mark.parametrize("value", [[], "embed", 3])
def test_it_must_be_an_object(tmp_path, value):
    path = write_draft(tmp_path, config_changes={"eagle3_ext": value})
    with pytest.raises(CheckpointError, match="expected an object"):
        formats.read_draft(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sources", "embed"),
        ("sources", [3]),
        ("layer_ids", "stock"),
        ("rope_theta", -1.0),
        ("rope_theta", float("inf")),
        ("rope_theta", "10000"),
        ("lm_head", "tied"),
        ("expected", {"accept_length": 2.0}),
        ("expected", FULL["expected"] | {"extra": 1}),
    ],
)
def test_wrong_values_are_refused(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=rf"eagle3_ext\.{key}(\.\w+)?: "):
        formats.read_draft(write_draft(tmp_path), override={key: value})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"accept_length": 3.1}, ["accept_length: got 3.1 with 2 steps and 3 draft tokens; expected at most 3"]),
        ({"accept_length": 2.5, "draft_tokens": 2}, ["accept_length: got 2.5 with 2 steps and 2 draft tokens"]),
        ({"accept_length": 0.9}, ["accept_length: got 0.9; expected a number of at least 1"]),
        ({"accept_length": float("inf")}, ["accept_length: got Infinity"]),
        ({"accept_length": float("nan")}, ["accept_length: got NaN"]),
        ({"accept_per_position": [0.6]}, ["accept_per_position: got 1 shares for 2 steps"]),
        ({"accept_per_position": [0.6, 0.3, 0.1]}, ["accept_per_position: got 3 shares for 2 steps"]),
        ({"accept_per_position": [0.6, -0.1]}, ["accept_per_position: got [0.6, -0.1]; expected a list of numbers"]),
        ({"accept_per_position": [1.2, 0.3]}, ["accept_per_position: got [1.2, 0.3]; expected a list of numbers from"]),
        ({"accept_per_position": [0.3, 0.6]}, ["accept_per_position: got [0.3, 0.6], which rises"]),
        ({"steps": 0, "topk": 1.5}, ["steps: got 0; expected an integer of at least 1", "topk: got 1.5; expected"]),
        ({"verify_steps": 0}, ["verify_steps: got 0; expected an integer of at least 1"]),
        ({"draft_tokens": True, "more": 1}, ["draft_tokens: got true", "more: unknown key; expected one of"]),
    ],
)  # fmt: skip
def test_what_nobody_can_have_measured_is_refused(tmp_path, changes, wrong):
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(write_draft(tmp_path), override={"expected": FULL["expected"] | changes})
    lines = str(raised.value).splitlines()
    assert len(lines) == len(wrong)
    assert all(f"eagle3_ext.expected.{text}" in line for line, text in zip(lines, wrong, strict=True))


def test_what_is_missing_in_expected_is_named(tmp_path):
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(write_draft(tmp_path), override={"expected": {"steps": 3}})
    missing = [line.split(": got nothing")[0].rpartition(".")[2] for line in str(raised.value).splitlines()]
    assert missing == ["accept_length", "accept_per_position", "topk", "draft_tokens"]


def test_what_a_value_may_be_is_said_for_every_key(tmp_path):
    """No key accepts an object of objects; what each expects is listed with its words or its kind."""
    override = dict.fromkeys(FULL, {"a": {}}) | {"rope_scaling": 3, "expected": 3}
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(write_draft(tmp_path), override=override)
    told = {}
    for line in str(raised.value).splitlines():
        key, _, rest = line.partition("eagle3_ext.")[2].partition(": got ")
        told[key] = rest.partition("; expected ")[2].partition(". Correct")[0]
    assert told == {
        "sources": "a list of texts",
        "order": "one of as_listed, ascending",
        "layer_ids": "one of boundary, output",
        "producer": "text",
        "vocab_map": "one of absolute, offset",
        "residual": "one of post_norm, pre_norm",
        "recurrent_state": "one of post_norm, pre_norm",
        "norms": "one of concatenation, none, per_source",
        "rope_theta": "a number above 0",
        "rope_scaling": "an object or null",
        "embed": "one of own, target",
        "lm_head": "one of own, target",
        "expected": "an object with accept_length, accept_per_position, steps, topk, draft_tokens",
        "strict": "true or false",
    }
