"""The rotary embedding: every key of every kind of scaling, with values that a draft can have and cannot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DELETE, write_draft, write_target

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import rope_kinds
from sglang_eagle3_ext.spec import DraftSpec

IDS = {"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 8.0]}
GOOD: dict[str, dict[str, Any]] = {
    "default": {},
    "mrope": {"mrope_section": [2, 1, 3], "mrope_interleaved": False},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "alpha": 8.0},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {**LONG, "factor": 8.0, "attention_factor": 1.25, "original_max_position_embeddings": 16},
}
"""For each kind all of its keys; a head of the tiny draft has 12 elements, so that 6 pairs are rotated."""

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
NO_NUMBERS: list[Any] = ["2", [2.0], {"a": 2.0}, True, NAN, INF, -2.0, HUGE]
NO_LISTS: list[Any] = ["abc", 1.0, [], [1.0] * 5, [1.0] * 7, [0.0] * 6, [-1.0] * 6, ["1"] * 6, [True] * 6, [NAN] * 6]
NO_FLAGS: list[Any] = ["false", 1, 0.0, []]
NO_SECTIONS: list[Any] = ["abc", 6, [], [6], [2, 2, 1], [2, 2, 3], [-2, 4, 4], [2.0] * 3, [2, 2, 2, 0], [[2], 2, 2]]
WRONG: dict[str, list[Any]] = {
    "factor": [*NO_NUMBERS, 0, 0.5, 1e308],
    "alpha": [*NO_NUMBERS, 0],
    "beta_fast": [*NO_NUMBERS, 0, 5e-324, 1e308],
    "beta_slow": [*NO_NUMBERS, 0, 9.0],
    "mscale": NO_NUMBERS,
    "mscale_all_dim": NO_NUMBERS,
    "attention_factor": [*NO_NUMBERS, 0],
    "low_freq_factor": [*NO_NUMBERS, 0, 5.0],
    "high_freq_factor": [*NO_NUMBERS, 0],
    "original_max_position_embeddings": [*NO_NUMBERS, 0, 1, 16.0, 2**31],
    "truncate": NO_FLAGS,
    "mrope_interleaved": NO_FLAGS,
    "mrope_section": NO_SECTIONS,
    "short_factor": NO_LISTS,
    "long_factor": NO_LISTS,
}


def read(folder: Path, config: Mapping[str, Any], dialect: Any = "specforge", **asked: Any) -> DraftSpec:
    return formats.read_draft(write_draft(folder, dialect, config_changes={**IDS, **config}), **asked)


def errors(spec: DraftSpec) -> list[tuple[str, str]]:
    """List code and place of the errors."""
    return [
        (f.code, f.message.removeprefix(f"{spec.path}/config.json:").split(": ")[0])
        for f in spec.findings
        if f.severity == "error"
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_the_cases_are_all_kinds_and_keys():
    off = {"use_fope", "video_rope", "mrope_interleaved_glm"}
    for kind, keys in rope_kinds.KINDS.items():
        mine = GOOD["mrope" if kind == "default" else kind].keys()
        assert set(keys) - off - (GOOD["mrope"].keys() if kind == "yarn" else set()) == mine, kind


def test_the_kinds_and_their_keys_are_documented():
    text = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    section = text.split("\n## Kinds of rope scaling\n", 1)[1].split("\n#", 1)[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    off = (rope_kinds.FALSE, rope_kinds.TRUE)
    kinds = rope_kinds.KINDS | {"mrope": rope_kinds.MROPE}
    expected = {
        kind: (set(rope_kinds.NEEDS.get(kind, ())), {key for key, rule in keys.items() if rule not in off})
        for kind, keys in kinds.items()
    }
    names = {row[0].strip(" `"): [set(re.findall(r"`(\w+)`", cell)) for cell in row[1:3]] for row in table}
    assert {kind: (needs, needs | may) for kind, (needs, may) in names.items()} == expected


@pytest.mark.parametrize("kind", GOOD)
def test_good_values_are_read_as_they_are(tmp_path, kind):
    spec = read(tmp_path, {"rope_scaling": {"rope_type": kind, **GOOD[kind]}})
    assert errors(spec) == []
    base = {"mrope": "default"}.get(kind, kind)
    expected = None if kind in ("default", "dynamic") else {"rope_type": base, **GOOD[kind]}
    assert spec.rope.scaling == expected
    assert all(f.code in ("layer_ids_two_readings", "rope_not_as_written") for f in spec.findings)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in GOOD.items() for key in keys])
def test_a_value_that_nothing_computes_with_is_an_error(tmp_path, target, kind, key):
    read(tmp_path, {})
    config, facts = json.loads((tmp_path / "config.json").read_text()), formats.read_target(target)
    for value in WRONG[key]:
        changed = config | {"rope_scaling": {"rope_type": kind, **GOOD[kind], key: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        spec = formats.read_draft(tmp_path)
        assert errors(spec) == [("config_value", f"rope_scaling.{key}")], value
        # What is wrong is computed with nowhere, and can be printed as JSON.
        assert (spec.rope.theta, spec.rope.scaling) == (1e4, None)
        assert assembly.plan(spec, facts).findings


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in rope_kinds.NEEDS.items() if kind in GOOD for key in keys]
)
@pytest.mark.parametrize("absent", [DELETE, None], ids=["deleted", "null"])
def test_a_kind_without_a_key_it_needs_is_an_error(tmp_path, kind, key, absent):
    scaling = {"rope_type": kind, **GOOD[kind], key: absent}
    spec = read(tmp_path, {"rope_scaling": {k: v for k, v in scaling.items() if v is not DELETE}})
    assert errors(spec) == [("rope_type", "rope_scaling")]
    assert spec.rope.scaling is None


@pytest.mark.parametrize("kind", ["su", "deepseek_yarn", "proportional", "YARN", "", 3, True, ["yarn"], {"a": 1}])
def test_a_kind_that_is_not_served_is_refused_by_name(tmp_path, kind):
    spec = read(tmp_path, {"rope_scaling": {"rope_type": kind, "factor": 2.0, **LONG}})
    assert ("rope_type", "rope_scaling") in errors(spec)
    # What eagle3_ext says in its place settles it.
    assert errors(read(tmp_path / "own", {"rope_scaling": {"rope_type": kind}}, override={"rope_scaling": None})) == []


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, 1, 0.5])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling", "eagle3_ext.rope_scaling"])
def test_a_base_that_is_none_is_an_error_wherever_it_stands(tmp_path, place, value):
    inner = {"rope_type": "default", "rope_theta": value}
    at = {"eagle3_ext": {"rope_scaling": inner}} if "." in place else {place: inner}
    spec = read(tmp_path, {"rope_theta": DELETE, **at})
    assert ("config_value", f"{place}.rope_theta") in errors(spec)
    assert spec.rope.theta == 10000.0


@pytest.mark.parametrize("value", ["0.5", True, [0.5], NAN, HUGE, 0, -0.5, 1.5])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling", "eagle3_ext.rope_scaling"])
def test_a_share_that_is_none_is_an_error_wherever_it_stands(tmp_path, place, value):
    inner = {"rope_type": "default", "partial_rotary_factor": value}
    at = {"eagle3_ext": {"rope_scaling": inner}} if "." in place else {place: inner}
    spec = read(tmp_path, at)
    assert errors(spec) == [("config_value", f"{place}.partial_rotary_factor")]
    assert spec.rope.partial_rotary_factor == 1.0


@pytest.mark.parametrize(("share", "width"), [(0.3, 3), (0.25, 3), (1e-9, 0), (0.1, 1)])
def test_pairs_are_rotated(tmp_path, share, width):
    spec = read(tmp_path, {"partial_rotary_factor": share})
    assert errors(spec) == [("config_value", "partial_rotary_factor")]
    assert f"not {width} of 12" in spec.findings[-1].message


def test_a_head_of_odd_width_is_an_error(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, head_dim=13, config_changes=IDS))
    assert errors(spec) == [("config_value", "head_dim")]


def test_the_lists_are_as_long_as_the_rotated_part(tmp_path):
    half = {key: value[:3] for key, value in LONG.items()}
    scaling = {"rope_type": "longrope", **half, "original_max_position_embeddings": 16}
    assert errors(read(tmp_path / "half", {"rope_scaling": scaling, "partial_rotary_factor": 0.5})) == []
    assert len(errors(read(tmp_path / "whole", {"rope_scaling": scaling}))) == 2


@pytest.mark.parametrize("dialect", ["specforge", "deepseek"])
@pytest.mark.parametrize("value", [10**400, 2**31, 0, -1])
def test_a_length_that_is_none_is_an_error(tmp_path, target, dialect, value):
    spec = read(tmp_path, {"max_position_embeddings": value, "rope_scaling": {"type": "yarn", "factor": 4.0}}, dialect)
    assert errors(spec) == [("config_value", "max_position_embeddings")]
    assert assembly.positions(spec) == spec.max_position_embeddings < 2**31


@pytest.mark.parametrize(
    ("key", "value"),
    [("mrope_section", [1, 1, 1]), ("attention_factor", 2.0), ("truncate", False), ("factor", "4"), ("mscale", [1])],
)
def test_latent_attention_has_fewer_keys(tmp_path, key, value):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, key: value}
    spec = read(tmp_path, {"rope_scaling": scaling}, "deepseek")
    assert errors(spec) == [("config_value", f"rope_scaling.{key}")]


# ---- nothing is dropped in silence ------------------------------------------------------------------------------


def test_what_eagle3_ext_says_inside_its_scaling_is_read(tmp_path):
    own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    spec = read(tmp_path, {"eagle3_ext": {"rope_scaling": own}})
    assert (spec.rope.theta, spec.rope.partial_rotary_factor) == (5e5, 0.5)
    assert spec.rope.scaling == {"rope_type": "linear", "factor": 2.0}
    assert spec.origins["rope_theta"] == spec.origins["rope_scaling"] == "eagle3_ext"


@pytest.mark.parametrize(
    ("config", "place", "rope_is"),
    [
        # transformers prefers rope_scaling to rope_parameters, and rope_type to type.
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_parameters",
            {"scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 4.0}},
            "rope_scaling.type",
            {"scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_theta": 2e4, "rope_scaling": {"rope_type": "default", "rope_theta": 3e4}},
            "rope_theta",
            {"theta": 3e4},
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 1.0}},
            "rope_scaling.partial_rotary_factor",
            {"partial_rotary_factor": 0.5},
        ),
        (
            {
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
            },
            "rope_scaling.original_max_position_embeddings",
            {"scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}},
        ),
    ],
)
def test_two_places_that_disagree_are_a_clash(tmp_path, config, place, rope_is):
    spec = read(tmp_path, config)
    (finding,) = [f for f in spec.findings if f.code == "rope_clash"]
    assert finding.severity == "warning"
    assert finding.message.startswith(f"{tmp_path}/config.json:{place}: ")
    assert {name: getattr(spec.rope, name) for name in rope_is} == rope_is


def test_a_clash_that_is_settled_is_none(tmp_path):
    config = {
        "rope_theta": 2e4,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
        "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 4.0},
    }
    spec = read(tmp_path, config, override={"rope_theta": 7e4, "rope_scaling": {"rope_type": "linear", "factor": 3}})
    assert [f for f in spec.findings if f.code == "rope_clash"] == []
    assert (spec.rope.theta, spec.rope.scaling) == (7e4, {"rope_type": "linear", "factor": 3.0})


@pytest.mark.parametrize(
    ("scaling", "unread", "difference"),
    [
        ({"rope_type": "linear", "factor": 2.0, "finetuned": True}, "finetuned", None),
        ({"rope_type": "yarn", "factor": 2.0, "attn_factor": "x"}, "attn_factor", "stock reads attn_factor"),
        ({"rope_type": "default", "factor": NAN}, "factor", None),
        # Stock and transformers read these two only together.
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 0.5}, "mscale", None),
    ],
)
def test_keys_of_no_kind_are_told(tmp_path, scaling, unread, difference):
    spec = read(tmp_path, {"rope_scaling": scaling})
    (finding,) = [f for f in spec.findings if f.code == "unread_keys"]
    assert f"rope_scaling: got {unread}, which nothing reads" in finding.message
    assert unread not in (spec.rope.scaling or {})
    assert difference is None or any(difference in said for said in spec.stock.differences)


@pytest.mark.parametrize(
    ("scaling", "theta"),
    [({"type": "dynamic", "factor": 2.0}, 3.0), ({"type": "dynamic", "factor": 1.0, "alpha": 8.0}, 8.0)],
)
def test_dynamic_scaling_is_none_where_drafts_are_trained(tmp_path, scaling, theta):
    spec = read(tmp_path, {"rope_scaling": scaling})
    (finding,) = [f for f in spec.findings if f.code == "rope_not_as_written"]
    assert finding.severity == "warning"
    # What stock makes of it at every position, for those who did train so, and what SpecForge does.
    assert f'"rope_theta": {1e4 * theta ** (12 / 10):.9g}' in finding.message
    assert f'"rope_theta": {1e4 * (1 + 20 * scaling["factor"] / 512) ** (12 / 10):.9g}' in finding.message
    assert finding.message.endswith("beyond 512 positions: serve with --context-length 512 to rule them out.")
    assert (spec.rope.theta, spec.rope.scaling) == (1e4, None)
    assert any("stock turns the rotary embedding" in said for said in spec.stock.differences)


def test_a_dynamic_factor_of_one_is_none_but_for_a_longer_table(tmp_path):
    write = {"rope_scaling": {"type": "dynamic", "factor": 1.0}}
    unknown = read(tmp_path, write)
    # Stock stretches nothing with it, so that it is the trainer alone that is in question.
    assert (unknown.rope.theta, unknown.stock.differences) == (1e4, ())
    assert [f.code for f in unknown.findings if f.code.startswith("rope")] == ["rope_not_as_written"]
    known = read(tmp_path, write, override={"producer": "speculators"})
    assert (known.rope.theta, known.stock.differences) == (1e4, ())
    assert not any(f.code.startswith("rope") for f in known.findings)
    longer = read(tmp_path, write, override={"producer": "specforge"})
    assert longer.rope.theta == pytest.approx(1e4 * (1 + 20 / 512) ** (12 / 10), rel=1e-12)
    assert any("stock turns the rotary embedding" in said for said in longer.stock.differences)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("share", ["rope_scaling", "rope_parameters"])
def test_dynamic_scaling_turns_as_specforge_s_own_embedding(tmp_path, factor, share):
    torch = pytest.importorskip("torch")
    trainers = pytest.importorskip("trainers")
    from sglang_eagle3_ext import reference

    with trainers._quiet():
        reason = "SpecForge is the oracle: pip install --no-deps specforge==0.2.0"
        module = pytest.importorskip("specforge.modeling.draft.llama3_eagle", reason=reason, exc_type=ImportError)
        theirs = module.LlamaDynamicNTKScalingRotaryEmbedding(12, 64, base=5e4, scaling_factor=factor)
        cos, sin = theirs(torch.ones(1), seq_len=64)
    write = {"max_position_embeddings": 64, "rope_theta": 5e4, share: {"rope_type": "dynamic", "factor": factor}}
    spec = read(tmp_path, write, override={"producer": "specforge"})
    mine = reference.load(spec, embed=torch.ones(96, 32), dtype=torch.float32)._rotary(torch.arange(64))
    for got, expected in zip(mine, (cos, sin), strict=True):
        torch.testing.assert_close(got[:, 0, :6], expected[0, 0, :, :6], rtol=0, atol=1e-5)
    plain = read(tmp_path, write, override={"producer": "speculators"})
    other = reference.load(plain, embed=torch.ones(96, 32), dtype=torch.float32)._rotary(torch.arange(64))
    assert (other[0] - mine[0]).abs().max() > 0.1


@pytest.mark.parametrize("kind", [{"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}])
def test_both_bases_of_torchspec_are_named(tmp_path, kind):
    spec = read(tmp_path, {"rope_theta": 5e4, "rope_scaling": kind}, override={"producer": "torchspec"})
    stretch = (1 + 2 * 20 / 512) ** (12 / 10) if kind["type"] == "dynamic" else 1.0
    assert spec.rope.theta == pytest.approx(5e4 * stretch, rel=1e-12)
    (finding,) = [f for f in spec.findings if f.severity == "warning" and f.code == "rope_not_as_written"]
    assert f"{5e4 * stretch:.9g} was taken" in finding.message
    assert f"or {1e4 * stretch:.9g} for the other reading." in finding.message
    told = {"producer": "torchspec", "rope_theta": 1e4 * stretch}
    settled = read(tmp_path, {"rope_theta": 5e4, "rope_scaling": kind}, override=told)
    assert settled.rope.theta == 1e4 * stretch
    assert not any(f.severity == "warning" and f.code.startswith("rope") for f in settled.findings)


def test_dynamic_scaling_is_refused_as_an_author_s_last_word(tmp_path):
    own = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    spec = read(tmp_path, {"eagle3_ext": own})
    assert errors(spec) == [("rope_type", "eagle3_ext.rope_scaling")]
    remedy = {"rope_theta": round(1e4 * 3.0 ** (12 / 10), 4), "rope_scaling": None}
    assert f'"rope_theta": {remedy["rope_theta"]}, "rope_scaling": null' in spec.findings[-1].message
    assert errors(read(tmp_path, {"eagle3_ext": remedy})) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "x"},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 9.0},
        {"rope_type": "linear", "factor": 2.0, "low_freq_factor": "x"},
        {"rope_type": "default", "rope_theta": "x"},
        {"rope_type": "default", "mrope_section": [1, 1, 1]},
        {"rope_type": "su"},
        {"full_attention": {"rope_type": "default"}},
    ],
)
@pytest.mark.parametrize("own", [None, {"rope_type": "linear", "factor": 2.0}])
def test_what_eagle3_ext_settles_is_no_error(tmp_path, broken, own):
    spec = read(tmp_path, {"rope_scaling": broken}, override={"rope_theta": 1e4, "rope_scaling": own})
    assert [f.code for f in spec.findings if f.severity != "info" and f.code != "layer_ids_two_readings"] == []
    assert (spec.rope.theta, spec.rope.scaling) == (1e4, own)
    if errors(read(tmp_path / "alone", {"rope_scaling": broken})):
        # What we would refuse stock does read.
        assert any("stock" in said for said in spec.stock.differences)


def test_a_base_is_named_where_it_stands(tmp_path):
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e4}
    spec = read(tmp_path, {"rope_theta": DELETE, "rope_parameters": parameters}, "torchspec")
    places = {f.message.partition(": ")[0].rpartition(":")[2] for f in spec.findings if f.code == "rope_not_as_written"}
    assert places == {"rope_parameters", "rope_parameters.rope_theta"}


def test_two_kinds_in_an_authors_own_object_are_said(tmp_path):
    own = {"type": "linear", "rope_type": "yarn", "factor": 2.0}
    spec = read(tmp_path, {"eagle3_ext": {"rope_scaling": own}})
    [said] = [f.message for f in spec.findings if f.code == "rope_clash"]
    assert 'eagle3_ext.rope_scaling.type: got "linear" beside rope_type "yarn"' in said
    assert said.endswith("Remove one of the two.")


def test_no_number_is_advised_that_hangs_on_broken_weights(tmp_path):
    own = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    path = write_draft(tmp_path, config_changes={"eagle3_ext": own})
    advice = '"eagle3_ext": {"rope_theta": 37371.9282, "rope_scaling": null}'
    assert any(advice in f.message for f in formats.read_draft(path).findings)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(path)
    assert any(advice.replace("37371.9282", "...") in f.message for f in raised.value.findings)


def test_sections_for_another_head_leave_the_plain_rotation(tmp_path):
    spec = read(tmp_path, {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}})
    (finding,) = [f for f in spec.findings if f.code.startswith("rope")]
    assert (finding.code, finding.severity, spec.rope.scaling) == ("rope_clash", "warning", None)
    assert "config.json:rope_scaling.mrope_section: got [16, 24, 24]" in finding.message


@pytest.mark.parametrize("key", ["apply_yarn_scaling", "apply_scale"])
def test_latent_attention_is_scaled_as_yarn_says(tmp_path, key):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    plain, said = read(tmp_path, {"rope_scaling": scaling}, "deepseek"), {**scaling, key: True}
    spec = read(tmp_path, {"rope_scaling": said}, "deepseek")
    assert (spec.rope, spec.findings, spec.stock) == (plain.rope, plain.findings, plain.stock)
    for other in (False, None):  # null is false to who asks for the key
        spec = read(tmp_path, {"rope_scaling": {**scaling, key: other}}, "deepseek")
        assert errors(spec) == [("config_value", f"rope_scaling.{key}")]


def test_yarn_under_two_names_is_one_kind_for_latent_attention(tmp_path):
    scaling = {"type": "yarn", "rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    spec = read(tmp_path, {"rope_scaling": scaling}, "deepseek")
    assert not any(f.code == "rope_clash" for f in spec.findings)


def test_one_scaling_under_two_names_is_read_once(tmp_path):
    scaling = {"rope_type": "linear", "factor": 2, "finetuned": True}
    config = {"rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": 1e4}}
    spec, once = read(tmp_path, config), read(tmp_path / "once", {"rope_scaling": scaling})
    assert [f.code for f in spec.findings] == [f.code for f in once.findings]
    assert spec.stock.differences == once.stock.differences
    assert spec.rope == once.rope
    wrong = {"rope_type": "linear", "factor": "x"}
    for other in (wrong, {"type": "linear", "factor": "x"}, {**wrong, "type": "linear"}):
        assert len(errors(read(tmp_path, {"rope_scaling": other, "rope_parameters": wrong}))) == 1


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (
            {"original_max_position_embeddings": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.3}}, "rope_scaling.partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "rope_parameters.partial_rotary_factor"),
        (
            {"eagle3_ext": {"rope_scaling": {"partial_rotary_factor": 0.3}}},
            "eagle3_ext.rope_scaling.partial_rotary_factor",
        ),
    ],
)
def test_an_error_stands_where_the_value_does(tmp_path, config, place):
    assert errors(read(tmp_path, config)) == [("config_value", place)]


def test_a_linear_factor_without_a_fraction_stops_stock_and_is_served(tmp_path):
    spec = read(tmp_path, {"rope_scaling": {"type": "linear", "factor": 2}})
    assert spec.rope.scaling is not None
    assert isinstance(spec.rope.scaling["factor"], float)
    assert any("stock stops at a linear factor" in said for said in spec.stock.differences)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_without_a_length_of_their_own_they_start_from_the_draft_s(tmp_path, kind):
    scaling = {"rope_type": kind, **({"factor": 2.0} if kind == "yarn" else LONG)}
    spec = read(tmp_path, {"rope_scaling": scaling, "max_position_embeddings": 128})
    assert spec.rope.scaling is not None
    assert spec.rope.scaling["original_max_position_embeddings"] == 128
    assert assembly.positions(spec) == 128


# ---- A13: three spellings of one rotation -----------------------------------------------------------------------


def test_yarn_gives_one_table_in_every_spelling(tmp_path):
    torch = pytest.importorskip("torch")
    from sglang_eagle3_ext import reference

    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
    spellings: dict[str, dict[str, Any]] = {
        "type": {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **yarn}},
        "rope_type": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **yarn}},
        "rope_parameters": {"rope_theta": DELETE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn}},
    }
    positions, tables = torch.arange(100), {}
    for name, config in spellings.items():
        spec = read(tmp_path / name, config)
        tables[name] = reference.load(spec, embed=torch.ones(96, 32))._rotary(positions)
        assert errors(spec) == []
    # The paper's angles (arXiv 2309.00071, equations 16 to 18): the ramp runs over the turns within 16 positions.
    angles, factor = [], 0.1 * math.log(4.0) + 1.0

    def bound(turns: float) -> float:
        return 12 * math.log(16 / (turns * 2 * math.pi)) / (2 * math.log(5e5))

    low, high = max(math.floor(bound(4.0)), 0), min(math.ceil(bound(1.0)), 11)
    for i in range(6):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        base = 5e5 ** (-2 * i / 12)
        angles.append(base / 4.0 * ramp + base * (1 - ramp))
    expected = positions[:, None].double() * torch.tensor(angles, dtype=torch.float64)
    for cos, sin in tables.values():
        for got, function in ((cos, torch.cos), (sin, torch.sin)):
            torch.testing.assert_close(
                got[:, 0, :6].double(), function(expected) * factor, rtol=0, atol=2e-5, check_dtype=False
            )
