"""Property: whatever a draft's files hold, ``inspect`` tells its facts or what is wrong, with no traceback.

What it prints is JSON of the published schema, with a target and without; jsonschema decides what that accepts.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
from checkpoints import Dialect, write_draft, write_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from sglang_eagle3_ext import cli, formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import DraftSpec

VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "docs/inspect.schema.json").read_text())
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3))
KEYS = (
    "architectures",
    "attention_bias",
    "bias",
    "draft_vocab_size",
    "dtype",
    "eagle3_ext",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "fc_norm",
    "head_dim",
    "hidden_act",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "norm_before_fc",
    "norm_output",
    "num_aux_hidden_states",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "speculators_config",
    "speculators_model_type",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    "transformer_layer_config",
    "use_last_layernorm",
    "use_sliding_window",
    "vocab_size",
)
PLAUSIBLE = (
    st.integers(-1, 100)
    | st.booleans()
    | st.sampled_from(["yarn", "llama3", "bfloat16", "silu", "LlamaForCausalLM", "LlamaForCausalLMEagle3", 1e4])
    | st.lists(st.integers(-3, 20) | st.sampled_from(["sliding_attention", "full_attention"]), max_size=3)
    | st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "mrope_section", "partial_rotary_factor"]),
        SCALARS | st.sampled_from(["default", "dynamic", "yarn", "mrope"]),
        max_size=3,
    )
)


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """List the paths of all members."""
    return [
        place
        for key, value in config.items()
        for place in ((*path, key), *(places(value, (*path, key)) if isinstance(value, dict) else ()))
    ]


def put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a member, where the way to it is still there."""
    for key in path[:-1]:
        config = config.get(key)  # type: ignore[assignment]
        if not isinstance(config, dict):
            return
    config[path[-1]] = value


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    return {d: write_draft(tmp_path_factory.mktemp(d), d) for d in get_args(Dialect)}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(write_target(tmp_path_factory.mktemp("target")))


def no_json(word):
    raise AssertionError(f"{word} is no JSON")


def inspect(folder, *more, as_json=True):
    """Run the command in this process; return the exit code and the object it prints, ``None`` for text."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(["inspect", str(folder), *more, "--json" if as_json else "--trace"])
    return code, json.loads(out.getvalue(), parse_constant=no_json) if as_json else None


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_mutated_config_reads_or_says_why(drafts, target, data):
    folder = drafts[data.draw(st.sampled_from(sorted(drafts)))]
    file = folder / "config.json"
    text = file.read_text()
    config = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([*places(config), *((key,) for key in KEYS)]))
        put(config, path, data.draw(PLAUSIBLE | VALUES))
    try:
        file.write_text(json.dumps(config))
        for more in ((), ("--target", target)):
            code, printed = inspect(folder, *more)
            assert [error.message for error in VALIDATOR.iter_errors(printed)] == []
            assert code == any(f["severity"] == "error" for f in printed["findings"])
            assert all(f["message"].endswith(".") for f in printed["findings"])
        if printed["format"] is not None:
            inspect(folder, *more, as_json=False)
    finally:
        file.write_text(text)


SIZES = (
    "draft_vocab_size",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "target_hidden_size",
    "v_head_dim",
    "vocab_size",
)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_tensors_read_or_say_why(drafts, target, data):
    folder = drafts[data.draw(st.sampled_from(sorted(drafts)))]
    config, weights = folder / "config.json", folder / "model.safetensors"
    text, whole = config.read_text(), weights.read_bytes()
    keys = json.loads(text)
    sizes = keys.get("transformer_layer_config", keys)
    # What the config does not say is taken from the tensors, whatever their shapes are.
    for key in data.draw(st.lists(st.sampled_from(SIZES), max_size=4)):
        sizes.pop(key, None)
    tensors = load(whole)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=3, unique=True)):
        shape = data.draw(st.none() | st.lists(st.integers(0, 40), max_size=3))
        dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn]))
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(shape).to(dtype)
    try:
        config.write_text(json.dumps(keys))
        weights.write_bytes(save(tensors))
        for more in ((), ("--target", target, "--weights")):
            code, printed = inspect(folder, *more)
            assert [error.message for error in VALIDATOR.iter_errors(printed)] == []
            assert code == any(f["severity"] == "error" for f in printed["findings"])
        if printed["format"] is not None:
            inspect(folder, *more, as_json=False)
    finally:
        config.write_text(text)
        weights.write_bytes(whole)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.dictionaries(st.sampled_from(["weight_map", "metadata"]), VALUES | st.dictionaries(st.text(), VALUES))
)
def test_a_mutated_index_reads_or_says_why(drafts, content):
    folder = drafts["specforge"]
    index = folder / "model.safetensors.index.json"
    try:
        index.write_text(json.dumps(content))
        assert isinstance(formats.read_draft(folder), DraftSpec)
    except CheckpointError:
        pass
    finally:
        index.unlink()
