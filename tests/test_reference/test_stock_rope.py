"""The rotary embedding of the reference against SGLang's own, for every kind of scaling both know."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from reference_drafts import make_spec, random_tensors

from sglang_eagle3_ext.reference import ReferenceDraft
from sglang_eagle3_ext.spec import Rope

pytestmark = pytest.mark.host

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_angles_are_those_of_stock(scaling: dict | None, partial: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    # On a machine without an accelerator stock looks for another package's rotation; only its tables are read here.
    absent = types.SimpleNamespace(rotary_embedding=None)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", absent)
    from sglang.srt.layers.rotary_embedding import get_rope

    spec = make_spec(
        rope=Rope(theta=5e5, scaling=scaling, partial_rotary_factor=partial),
        attention={"head_dim": 64, "heads": 2, "kv_heads": 1},
    )
    stock = get_rope(64, 64, 256, 500000, True, scaling, torch.float32, partial)
    draft = ReferenceDraft(spec, random_tensors(spec))
    positions = torch.arange(200)
    cos, sin = draft._rotary(positions)
    half = cos.shape[-1] // 2
    table = stock.cos_sin_cache[positions]
    torch.testing.assert_close(cos[:, 0, :half], table[:, :half], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin[:, 0, :half], table[:, half:], rtol=1e-4, atol=1e-4)
    assert half == int(32 * partial)
