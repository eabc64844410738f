"""``capture_hf`` against hooks on every layer, and ``load`` against a draft built in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference_drafts import make_spec, random_inputs, random_tensors
from safetensors.torch import save_file

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.reference import ReferenceDraft, capture_hf, load
from sglang_eagle3_ext.spec import Attention, Vocab

transformers = pytest.importorskip("transformers", reason="capture_hf runs transformers' models")


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=12,
        intermediate_size=20,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        num_hidden_layers=5,
        vocab_size=50,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3
    return model


def test_boundaries_are_the_streams_between_layers(target) -> None:
    tokens = torch.tensor([3, 14, 15, 9, 26])
    seen: dict[object, torch.Tensor] = {}
    decoder = target.model
    handles = [
        decoder.embed_tokens.register_forward_hook(lambda m, a, out: seen.__setitem__(0, out[0])),
        decoder.norm.register_forward_hook(lambda m, a, out: seen.__setitem__("final_norm", out[0])),
    ]
    for i, layer in enumerate(decoder.layers):

        def keep(module, args, out, i=i):
            seen[i + 1] = (out[0] if isinstance(out, tuple) else out)[0]

        handles.append(layer.register_forward_hook(keep))
    order = [5, 0, 3, "final_norm", 1]
    features = capture_hf(target, tokens, order)
    for handle in handles:
        handle.remove()
    assert features.shape == (5, 5 * 12)
    for block, boundary in zip(features.split(12, dim=-1), order, strict=True):
        assert torch.equal(block, seen[boundary])
    assert not torch.equal(features[:, :12], features[:, 36:48]), "boundary n comes before the final norm"
    assert (features.requires_grad, features.is_inference()) == (False, False)
    assert not decoder.norm._forward_pre_hooks


def test_captures_from_a_folder(target, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    tokens = [3, 14, 15]
    torch.testing.assert_close(capture_hf(tmp_path, tokens, [2]), capture_hf(target, tokens, [2]))


def test_a_target_out_of_a_folder_keeps_its_cap_of_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.Gemma2Config(
        **sizes, head_dim=4, num_hidden_layers=3, vocab_size=50, attn_logit_softcapping=0.05, query_pre_attn_scalar=1
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3
    model.save_pretrained(tmp_path)
    tokens = [3, 14, 15, 9]
    captured = capture_hf(tmp_path, tokens, [2])
    model.set_attn_implementation("eager")
    torch.testing.assert_close(captured, capture_hf(model, tokens, [2]))
    model.set_attn_implementation("sdpa")  # has no cap: another state, so the case can tell
    assert (captured - capture_hf(model, tokens, [2])).abs().max() > 1e-3


@pytest.mark.parametrize("boundaries", [[6], [-1], []])
def test_refuses_boundaries_that_are_not_there(target, boundaries: list[int]) -> None:
    with pytest.raises(ValueError, match=r"boundaries: got .*each in 0\.\.5 or 'final_norm'"):
        capture_hf(target, [1, 2], boundaries)


CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "vocab_size": 50,
    "draft_vocab_size": 20,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "eagle3_ext": {"sources": ["embed", "layer1", "layer3"]},
}


def write_draft(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name.replace("layers.0.", "midlayer."): t if name == "d2t" else t.float() for name, t in tensors.items()}
    save_file(stored, folder / "model.safetensors")


def same(a: ReferenceDraft, b: ReferenceDraft) -> bool:
    features, sequence = random_inputs(a.spec, 9)
    steps = [d.feature_pass(d.project(features), sequence)[0] for d in (a, b)]
    return torch.equal(steps[0].logits, steps[1].logits)


def test_loads_a_draft_and_what_it_borrows(target, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "target", max_shard_size="5KB")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    spec = make_spec(embed="target")
    tensors = random_tensors(spec)
    write_draft(tmp_path / "draft", CONFIG, tensors)
    embed = target.model.embed_tokens.weight.data
    expected = ReferenceDraft(spec, {n: t.float() if n != "d2t" else t for n, t in tensors.items()}, embed=embed)
    loaded = load(tmp_path / "draft", target=tmp_path / "target")
    assert loaded.spec.embed == "target"
    assert same(loaded, expected)
    assert same(load(loaded.spec, embed=embed), expected)
    with pytest.raises(CheckpointError, match="embed_tokens.weight: got nothing; expected the target's"):
        load(tmp_path / "draft")


def test_an_override_reaches_the_draft(tmp_path: Path) -> None:
    tensors = random_tensors(make_spec())
    write_draft(
        tmp_path / "draft", CONFIG | {"eagle3_ext": {"sources": ["embed", "layer1", "layer3"], "embed": "own"}}, tensors
    )
    plain = load(tmp_path / "draft")
    changed = load(tmp_path / "draft", override={"residual": "post_norm"})
    assert changed.spec.norms.residual == "post_norm"
    assert not same(plain, changed)


def test_a_broken_checkpoint_is_told_in_full(tmp_path: Path) -> None:
    tensors = random_tensors(make_spec(embed="target"))
    del tensors["norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(19, 12)
    write_draft(tmp_path / "draft", CONFIG, tensors)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "draft")
    assert len(error.value.findings) >= 2
    assert "norm.weight" in str(error.value)
    assert "lm_head.weight" in str(error.value)


def test_borrows_a_tied_targets_embedding_as_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=12, intermediate_size=8, num_attention_heads=3, num_hidden_layers=1, vocab_size=50
    )
    config.tie_word_embeddings = True
    tied = transformers.LlamaForCausalLM(config)
    tied.save_pretrained(tmp_path / "target")
    spec = make_spec(
        embed="target", lm_head="target", vocab=Vocab(50, 50, "none"), attention=Attention("gqa", 1, 6, 2, 4)
    )
    write_draft(tmp_path / "draft", CONFIG | {"draft_vocab_size": None}, random_tensors(spec))
    loaded = load(tmp_path / "draft", target=tmp_path / "target")
    assert loaded.spec.lm_head == "target"
    assert torch.equal(loaded.head, tied.model.embed_tokens.weight.data)
