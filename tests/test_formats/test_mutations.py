"""Property: whatever stands in ``config.json``, reading a draft gives its facts or a ``CheckpointError``."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from checkpoints import Dialect, write_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import DraftSpec

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


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_mutated_config_reads_or_says_why(drafts, data):
    folder = drafts[data.draw(st.sampled_from(sorted(drafts)))]
    file = folder / "config.json"
    text = file.read_text()
    config = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([*places(config), *((key,) for key in KEYS)]))
        put(config, path, data.draw(PLAUSIBLE | VALUES))
    try:
        file.write_text(json.dumps(config))
        findings = formats.read_draft(folder).findings
    except CheckpointError as error:
        findings = error.findings
        assert any(f.severity == "error" for f in findings)  # noqa: PT017
    finally:
        file.write_text(text)
    assert all(f.message.endswith(".") for f in findings)


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
