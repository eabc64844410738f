"""``inspect --json`` against the schema in docs/; what the schema accepts is decided by jsonschema."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
from checkpoints import LATENT, Dialect, write_draft, write_target

from sglang_eagle3_ext import cli

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/inspect.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FC_NORMS: dict[str, Any] = {f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}

DRAFTS: dict[str, dict[str, Any]] = {
    "norms": {
        "config_changes": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        "tensor_changes": FC_NORMS,
    },
    "no_fc": {
        "config_changes": {"eagle_config.use_aux_hidden_state": False},
        "tensor_changes": {"fc.weight": None},
    },
    "final_norm": {"config_changes": {"eagle3_ext": {"sources": ["embed", "layer3", "final_norm"]}}},
    "window": {"config_changes": {"sliding_window": 8, "use_sliding_window": True}},
    "scaled": {"config_changes": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    "tied": {
        "draft_vocab": 96,
        "config_changes": {"tie_word_embeddings": True},
        "tensor_changes": {"lm_head.weight": None},
    },
    "errors": {"tensor_changes": {"norm.weight": None, "mask_hidden": torch.ones(3)}},
    "queries_projected_at_once": {"dialect": "deepseek", "latent": LATENT | {"q_lora_rank": None}},
}  # fmt: skip
DRAFTS |= {dialect: {"dialect": dialect} for dialect in get_args(Dialect)}


def inspect(capsys, *argv):
    code = cli.main(["inspect", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def problems(result):
    return [error.message for error in VALIDATOR.iter_errors(result)]


def test_the_schema_is_one_and_names_the_published_keys():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["$defs"]["readable"]["properties"]) == list(cli.INSPECT_KEYS)
    for kind in ("readable", "unreadable"):
        assert SCHEMA["$defs"][kind]["required"] == list(cli.INSPECT_KEYS)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_drafts_are_as_the_schema_says(tmp_path, capsys, draft):
    folder = write_draft(tmp_path / "draft", **draft)
    for more in ((), ("--target", write_target(tmp_path / "target"), "--weights")):
        code, result = inspect(capsys, folder, *more)
        assert problems(result) == []
        assert code == any(f["severity"] == "error" for f in result["findings"])


def test_what_cannot_be_read_is_as_the_schema_says(tmp_path, capsys):
    code, result = inspect(capsys, tmp_path / "nothing")
    assert (code, problems(result)) == (1, [])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    code, result = inspect(capsys, tmp_path / "broken")
    assert (code, problems(result)) == (1, [])
    assert {key for key, value in result.items() if value is not None} == {"findings"}
    draft = write_draft(tmp_path / "draft", "deepseek")
    code, result = inspect(capsys, draft, "--target", tmp_path / "nothing")
    assert (code, problems(result)) == (1, [])


def change(result, path, value):
    """Change one value of a result, or take it out."""
    changed = copy.deepcopy(result)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), None),
        (("format",), 3),
        (("boundaries",), ["last"]),
        (("fc_in",), 0),
        (("order",), "descending"),
        (("attention", "kind"), "mha"),
        (("attention", "kind"), "gqa"),
        (("attention", "latent", "kv_lora_rank"), None),
        (("attention", "latent", "q_lora_rank"), "14"),
        (("rope", "scaling"), {"factor": 2.0}),
        (("origins", "sources"), "guess"),
        (("findings",), [{"severity": "fatal", "code": "a", "message": "b"}]),
        (("findings",), [{"severity": "error", "code": "not a slug", "message": "b"}]),
        (("more",), 1),
    ],
)
def test_what_is_not_published_is_refused(tmp_path, capsys, path, value):
    _, result = inspect(capsys, write_draft(tmp_path, "deepseek"))
    assert problems(result) == []
    assert problems(change(result, path, value))
