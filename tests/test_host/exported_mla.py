"""MLA drafts that ``export --for stock`` wrote, in SGLang's own class for them, against the original in ours.

Run by ``test_runtimes.py`` in a process of its own, since SGLang's runtime belongs to one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import DELETE, write_target
from safetensors.torch import load_file

from sglang_eagle3_ext import cli
from tests.test_host.draft_model import LAYERS, PERMUTED, VOCAB, E, M, Target, Variant, norm, runtime, share, targets
from tests.test_host.mla_draft_model import mla, put_attention, run_served, serve

pytestmark = pytest.mark.host

__all__ = ["runtime", "targets"]
"""Fixtures that pytest finds here."""

ABSOLUTE = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:37].sort().values

DRAFTS = {
    "permuted": mla(ext=PERMUTED),
    "norms_per_source_and_post_norm_state": mla(
        config={"fc_norm": True, "norm_output": True},
        tensors={f"fc_norm.{i}.weight": norm(M, seed=i) for i in range(3)},
        ext={**PERMUTED, "producer": "torchspec"},
    ),
    "absolute_map_under_vllms_name": mla(
        config={"architectures": ["Eagle3DeepseekV3ForCausalLM"]},
        tensors={"d2t": ABSOLUTE, "t2d": None},
        ext={**PERMUTED, "vocab_map": "absolute"},
    ),
    "sizes_told_by_tensors": mla(
        config=dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), DELETE), ext=PERMUTED
    ),
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_stock_computes_what_was_trained(
    draft: Variant, targets: Callable[[int], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.models import kimi_k25_eagle3 as stock
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils.hf_transformers import config as parsing

    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "off")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    original, out = draft.at(tmp_path / "draft"), tmp_path / "out"
    target = write_target(tmp_path / "target", hidden=M, num_layers=LAYERS)
    assert cli.main(["export", str(original), "--for", "stock", "--target", str(target), "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [stock.Eagle3DeepseekV2ForCausalLM.__name__]

    served = serve(original, targets(M))
    assert served.plan.block_of != (0, 1, 2)
    theirs = stock.Eagle3DeepseekV2ForCausalLM(parsing.get_config(str(out), trust_remote_code=False))
    theirs.load_weights(load_file(out / "model.safetensors").items())
    current_platform.post_load_model(theirs)
    share(theirs, targets(M))
    put_attention(theirs)
    states = served.in_capture_order(served.features(9))
    for mine, his in zip(run_served(served.model, states), run_served(theirs.eval(), states), strict=True):
        assert torch.equal(mine[0], his[0])
        assert torch.equal(mine[1], his[1])
    assert torch.equal(theirs.hot_token_id, served.model.hot_token_id)
    assert theirs.model.fc.weight.shape == (E, 3 * M)
