"""The norms of the PyTorch twins against SGLang's own RMSNorm, to the bit."""

from __future__ import annotations

import pytest
import torch
from sglang_eagle3_ext.kernels.norm_concat import norm_concat_torch

pytestmark = pytest.mark.host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 33, 576, 4096])
def test_norm_concat_gives_the_bits_of_stock(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    from sglang.srt.layers.layernorm import RMSNorm

    g = torch.Generator().manual_seed(width)
    norms = [RMSNorm(width, eps=1e-5) for _ in range(2)]
    for norm in norms:
        norm.weight.data = (1 + 0.3 * torch.randn(width, generator=g)).to(dtype)
    embeds, hidden = (torch.randn(7, width, generator=g).mul(scale).to(dtype) for scale in (0.02, 30.0))
    expected = torch.cat([norms[0].forward_native(embeds), norms[1].forward_native(hidden)], dim=-1)
    cat, _ = norm_concat_torch(
        hidden, embeds, embed_norm_weight=norms[0].weight, hidden_norm_weight=norms[1].weight, eps=1e-5
    )
    assert torch.equal(cat, expected)
