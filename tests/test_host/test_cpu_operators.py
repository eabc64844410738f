"""The CPU platform's operators and packed layers inside SGLang's own modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.host

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_norms_compute_the_same_bits_as_sglang(dtype: torch.dtype, rows: int) -> None:
    from sglang.srt.layers.layernorm import RMSNorm

    from sglang_eagle3_ext.host.cpu.operators import forward_rms_norm

    norm = RMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, rows, 96).to(dtype).unbind(0)
    assert torch.equal(forward_rms_norm(norm, x), norm.forward_native(x))
    for ours, theirs in zip(forward_rms_norm(norm, x, residual), norm.forward_native(x, residual), strict=True):
        assert torch.equal(ours, theirs)


def test_norms_of_other_kinds_are_left_to_sglang() -> None:
    from sglang.srt.layers.layernorm import RMSNorm

    from sglang_eagle3_ext.host.cpu.operators import forward_rms_norm

    x, residual = torch.randn(2, 3, 8).to(torch.bfloat16).unbind(0)
    for special in (
        {"var_hidden_size": 4},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
    ):
        norm = RMSNorm(8, **special).to(torch.bfloat16)
        ours, theirs = forward_rms_norm(norm, x, residual), norm.forward_native(x, residual)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True)), special
    with pytest.raises(ValueError, match="hidden_size"):
        forward_rms_norm(RMSNorm(8), torch.randn(2, 9))


@DTYPES
@pytest.mark.parametrize("rows", [1, 5])
def test_activation_computes_the_same_bits_as_sglang(dtype: torch.dtype, rows: int) -> None:
    from sglang.srt.layers.activation import SiluAndMul

    from sglang_eagle3_ext.host.cpu.operators import forward_silu_and_mul

    x = torch.randn(rows, 26).to(dtype)
    given = x.clone()
    act = SiluAndMul()
    assert torch.equal(forward_silu_and_mul(act, x), act.forward_native(x))
    assert torch.equal(x, given)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rotations without the fall-back kernel that SGLang fetches from vLLM on unknown devices."""
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setattr(base, "_is_cpu", True)


def rotary(dtype: torch.dtype, **changes: Any) -> Any:
    """Make a rotation of heads of 16."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    settings = {"rotary_dim": 16, "is_neox_style": True} | changes
    return RotaryEmbedding(16, max_position_embeddings=64, base=10000, dtype=dtype, **settings)


@DTYPES
def test_rotation_follows_positions_that_advance_in_place(dtype: torch.dtype) -> None:
    from sglang_eagle3_ext.host.cpu.operators import forward_rotary

    rope = rotary(dtype)
    positions = torch.tensor([3, 9])
    tolerance = 1e-6 if dtype == torch.float32 else 4e-2
    for _ in range(3):
        qkv = torch.randn(2, 80).to(dtype)
        query, key = qkv[:, :48], qkv[:, 48:64]
        ours = forward_rotary(rope, positions, query, key)
        theirs = rope.forward_native(positions, query, key)
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a.float(), b.float(), atol=tolerance)
        positions.add_(1)


@pytest.mark.parametrize("special", [{"rotary_dim": 8}, {"is_neox_style": False}], ids=str)
def test_rotations_of_other_kinds_are_left_to_sglang(special: dict[str, Any]) -> None:
    from sglang_eagle3_ext.host.cpu.operators import forward_rotary

    rope = rotary(torch.float32, **special)
    query, key = torch.randn(2, 48), torch.randn(2, 16)
    ours = forward_rotary(rope, torch.tensor([1, 5]), query, key)
    assert all(map(torch.equal, ours, rope.forward_native(torch.tensor([1, 5]), query, key)))


class Model(torch.nn.Module):
    """A plain layer as SGLang makes them, a draft's ``fc``, and embeddings tied to the head or not."""

    def __init__(self, *, tied: bool, fp32_logits: bool = False) -> None:
        from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.weight = torch.nn.Parameter(torch.randn(6, 8).bfloat16().float(), requires_grad=False)
        self.layer.quant_method = UnquantizedLinearMethod()
        self.fc = torch.nn.Linear(24, 8)
        self.embed_tokens = torch.nn.Module()
        self.embed_tokens.weight = torch.nn.Parameter(torch.randn(11, 8), requires_grad=False)
        self.embed_tokens.quant_method = UnquantizedEmbeddingMethod()
        self.norm = torch.nn.LayerNorm(8)
        if tied:
            self.lm_head = self.embed_tokens
        self.logits_processor = SimpleNamespace(use_fp32_lm_head=fp32_logits)


def test_a_model_is_packed_in_place() -> None:
    from sglang_eagle3_ext.host.cpu.linear_methods import (
        PackedEmbeddingMethod,
        PackedLinear,
        PackedLinearMethod,
        pack_model,
    )

    model = Model(tied=True)
    names = [name for name, _ in model.named_parameters()]
    before = torch.nn.functional.linear(torch.ones(3, 24), model.fc.weight, model.fc.bias)
    pack_model(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model.layer.quant_method, PackedLinearMethod)
    assert isinstance(model.lm_head.quant_method, PackedEmbeddingMethod)
    assert isinstance(model.fc, PackedLinear)
    assert isinstance(model.fc, torch.nn.Linear)
    assert torch.allclose(model.fc(torch.ones(3, 24)), before, atol=1e-6)
    tokens = torch.tensor([4, 0])
    looked_up = model.lm_head.quant_method.embedding(model.lm_head, tokens)
    assert torch.equal(looked_up, model.embed_tokens.weight[tokens])
    pack_model(model)  # a second call finds nothing left to pack
    assert type(model.fc) is PackedLinear


def test_embeddings_that_are_no_head_and_float32_heads_stay() -> None:
    from sglang_eagle3_ext.host.cpu.linear_methods import PackedEmbeddingMethod, pack_model

    for model in (Model(tied=False), Model(tied=True, fp32_logits=True)):
        pack_model(model)
        assert not isinstance(model.embed_tokens.quant_method, PackedEmbeddingMethod)


def test_packed_layers_follow_their_weights() -> None:
    """A weight put in place of another, and values loaded into the same weight, both show."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from sglang_eagle3_ext.host.cpu.linear_methods import pack_model

    model = Model(tied=True)
    pack_model(model)
    x = torch.randn(4, 8)
    layer = model.layer

    def served() -> torch.Tensor:
        return layer.quant_method.apply(layer, x, None)

    assert torch.allclose(served(), x @ layer.weight.T, atol=1e-6)
    layer.weight = torch.nn.Parameter(torch.randn(6, 8), requires_grad=False)
    assert torch.allclose(served(), x @ layer.weight.T, atol=1e-6)
    layer.weight.data.copy_(torch.randn(6, 8).bfloat16())
    model.fc.weight.data.mul_(2)
    DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    assert torch.allclose(served(), x @ layer.weight.T, atol=1e-6)
    wide = torch.randn(2, 24)
    expected = torch.nn.functional.linear(wide, model.fc.weight, model.fc.bias)
    assert torch.allclose(model.fc(wide), expected, atol=1e-6)


def test_more_axes_than_two() -> None:
    from sglang_eagle3_ext.host.cpu.linear_methods import pack_model

    model = Model(tied=True)
    pack_model(model)
    x = torch.randn(2, 3, 8)
    y = model.layer.quant_method.apply(model.layer, x)
    assert torch.allclose(y, x @ model.layer.weight.T, atol=1e-6)
