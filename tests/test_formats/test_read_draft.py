"""``formats.read_draft`` on whole checkpoints of each dialect; the expected facts are written out by hand."""

import dataclasses
import json

import pytest
import torch
from checkpoints import DELETE, pickle, shard, write_draft, write_target
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.deepseek import DeepseekConfig
from sglang_eagle3_ext.formats.flat import FlatConfig, NestedConfig
from sglang_eagle3_ext.formats.reading import LayerConfig
from sglang_eagle3_ext.formats.speculators import SpeculatorsConfig, VerifierConfig
from sglang_eagle3_ext.spec import Attention, Norms, Rope, Source, TargetFacts, TensorInfo, Vocab


def codes(spec, severity=None):
    return [f.code for f in spec.findings if severity in (None, f.severity)]


def test_flat_layout(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "specforge"))
    assert (spec.format, spec.architecture) == ("eagle", "LlamaForCausalLMEagle3")
    assert (spec.sources, spec.order, spec.layer_ids) == (None, "ascending", "stock")
    assert (spec.num_sources, spec.target_hidden_size, spec.hidden_size, spec.fc_in) == (3, 32, 32, 96)
    assert spec.norms == Norms("none", "pre_norm", "pre_norm", True)
    assert spec.attention == Attention("gqa", 1, 4, 2, 12)
    assert spec.rope == Rope(10000.0)
    assert spec.vocab == Vocab(96, 37, "offset")
    assert (spec.embed, spec.lm_head) == ("target", "own")
    assert (spec.intermediate_size, spec.rms_norm_eps, spec.max_position_embeddings) == (40, 1e-5, 512)
    assert (spec.dtype, spec.hidden_act, spec.producer, spec.has_eagle3_ext) == ("float32", "silu", None, False)
    assert spec.findings == ()
    assert spec.missing == spec.unconsumed == ()
    assert spec.stock.differences == ()
    assert spec.weights["midlayer.self_attn.q_proj.weight"] == "layers.0.self_attn.q_proj.weight"
    assert spec.weights["t2d"] == "t2d"
    assert spec.tensors["fc.weight"] == TensorInfo((32, 96), "F32", "model.safetensors")


def test_layout_of_the_eagle_repository(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "eagle"))
    assert (spec.format, spec.architecture) == ("eagle", "LlamaForCausalLM")
    assert spec.rope.theta == 10000.0
    assert spec.origins["rope_theta"] == "default"
    assert spec.findings == ()
    assert not spec.stock.loads


def test_speculators(tmp_path):
    write_draft(
        tmp_path,
        "speculators",
        layers=2,
        config_changes={
            "eagle_aux_hidden_state_layer_ids": [2, 4, 8],
            "norm_before_residual": True,
            "transformer_layer_config.model_type": "qwen3",
        },
        tensor_changes={f"layers.{i}.self_attn.{p}_norm.weight": torch.ones(12) for i in range(2) for p in "qk"},
    )
    spec = formats.read_draft(tmp_path)
    assert (spec.format, spec.architecture) == ("speculators", "Eagle3Speculator")
    assert spec.sources == tuple(Source("id", i, f"id {i}") for i in (2, 4, 8))
    assert (spec.layer_ids, spec.order, spec.producer) == ("boundary", "ascending", "speculators")
    assert spec.norms == Norms("none", "post_norm", "pre_norm", True)
    assert spec.attention == Attention("gqa", 2, 4, 2, 12, qk_norm=True)
    assert spec.rope == Rope(500000.0)
    assert (spec.embed, spec.lm_head) == ("own", "own")
    assert spec.verifier.name == "a/target"
    assert spec.verifier.architectures == ("LlamaForCausalLM",)
    assert spec.findings == ()
    assert spec.origins["sources"] == spec.origins["residual"] == "config"


def test_speculators_leaves_the_tensors_of_the_verifier_out(tmp_path):
    write_draft(tmp_path, "speculators", tensor_changes={"verifier_norm.weight": torch.ones(32)})
    spec = formats.read_draft(tmp_path)
    assert spec.weights["verifier_norm.weight"] == "ignored/verifier_norm.weight"
    assert spec.findings == ()


def test_ids_in_eagle_config(tmp_path):
    spec = formats.read_draft(
        write_draft(tmp_path, config_changes={"eagle_config.eagle_aux_hidden_state_layer_ids": [-1, 3, 6]})
    )
    assert [s.index for s in spec.sources] == [-1, 3, 6]
    assert spec.stock.ids == (-1, 3, 6)
    assert (spec.layer_ids, spec.origins["sources"], spec.origins["layer_ids"]) == ("stock", "config", "default")


@pytest.mark.parametrize("both", [False, True])
def test_ids_at_the_top_level_are_read(tmp_path, both):
    ids = "eagle_aux_hidden_state_layer_ids"
    changes = {ids: [-1, 3, 6]} | ({f"eagle_config.{ids}": [-1, 3, 6]} if both else {})
    spec = formats.read_draft(write_draft(tmp_path, config_changes=changes))
    assert [s.index for s in spec.sources] == [-1, 3, 6]
    assert spec.origins["sources"] == "config"
    assert "ids_disagree" not in codes(spec)
    assert ("top_level_ids" in codes(spec)) is not both


def test_draft_without_fc(tmp_path):
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            config_changes={"eagle_config.use_aux_hidden_state": False},
            tensor_changes={"fc.weight": None},
        )
    )
    assert (spec.num_sources, spec.fc_in) == (0, None)
    assert spec.sources == (Source("final_norm", None, "final_norm"),)
    assert not spec.stock.uses_aux
    assert spec.findings == ()


def test_draft_without_fc_may_declare_its_only_source(tmp_path):
    write_draft(
        tmp_path,
        config_changes={"eagle_config.use_aux_hidden_state": False},
        tensor_changes={"fc.weight": None},
    )
    undeclared = formats.read_draft(tmp_path)
    spec = formats.read_draft(tmp_path, override={"sources": ["final_norm"]})
    assert (spec.num_sources, spec.fc_in, spec.sources) == (0, None, undeclared.sources)
    assert spec.origins["sources"] == "override"
    assert (spec.findings, spec.missing) == ((), ())
    # Any other state would need fc.
    assert formats.read_draft(tmp_path, override={"sources": ["last"]}).missing == ("fc.weight",)


def test_target_of_another_width(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, target_hidden=20, num_sources=5))
    assert (spec.num_sources, spec.target_hidden_size, spec.fc_in) == (5, 20, 100)
    assert spec.origins["target_hidden_size"] == "config"
    assert spec.embed == "own"
    assert spec.findings == ()


def test_width_of_the_target_is_read_off_fc(tmp_path):
    write_draft(tmp_path, target_hidden=20, num_sources=5, config_changes={"target_hidden_size": DELETE})
    spec = formats.read_draft(tmp_path, override={"sources": [f"layer{k}" for k in range(5)]})
    assert (spec.num_sources, spec.target_hidden_size) == (5, 20)
    assert spec.origins["target_hidden_size"] == "weights"
    assert codes(spec) == []


def test_single_source_keeps_its_fc(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, num_sources=1), override={"sources": ["last"]})
    assert (spec.num_sources, spec.fc_in) == (1, 32)
    assert codes(spec) == []


@pytest.mark.parametrize("names", ["fc_norm.{}.weight", "aux_norm_{}.weight"])
def test_norm_per_source(tmp_path, names):
    spelled = ("low", "mid", "high") if "aux" in names else (0, 1, 2)
    flag = "use_aux_norm" if "aux" in names else "fc_norm"
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            config_changes={flag: True},
            tensor_changes={names.format(i): torch.ones(32) for i in spelled},
        )
    )
    assert spec.norms.around_fc == "per_source"
    assert [spec.weights[names.format(i)] for i in spelled] == [f"fc_norm.{i}.weight" for i in range(3)]
    assert spec.findings == ()
    assert spec.stock.differences == ()


@pytest.mark.parametrize("key", ["norm_before_fc", "eagle_config.norm_before_fc"])
def test_norm_over_the_concatenation(tmp_path, key):
    spec = formats.read_draft(
        write_draft(tmp_path, config_changes={key: True}, tensor_changes={"input_norm.weight": torch.ones(96)})
    )
    assert spec.norms.around_fc == "concatenation"
    assert spec.findings == ()
    assert spec.stock.differences == ()


def test_biases(tmp_path):
    biases = {f"midlayer.self_attn.{p}_proj.bias": torch.ones(48 if p == "q" else 24) for p in "qkv"}
    biases |= {"midlayer.self_attn.o_proj.bias": torch.ones(32), "fc.bias": torch.ones(32)}
    biases |= {f"midlayer.mlp.{p}_proj.bias": torch.ones(32 if p == "down" else 40) for p in ("gate", "up", "down")}
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            config_changes={"attention_bias": True, "mlp_bias": True, "bias": True},
            tensor_changes=biases,
        )
    )
    assert (spec.attention.qkv_bias, spec.attention.o_bias, spec.mlp_bias, spec.fc_bias) == (True,) * 4
    assert spec.findings == ()
    assert spec.stock.differences == ("stock drops the biases of q, k and v", "stock drops the biases of the MLP")


def test_later_layers_may_call_their_norm_hidden_norm(tmp_path):
    write_draft(
        tmp_path / "a",
        layers=2,
        tensor_changes={"layers.1.input_layernorm.weight": None, "layers.1.hidden_norm.weight": torch.ones(32)},
    )
    spec = formats.read_draft(tmp_path / "a")
    assert spec.weights["layers.1.hidden_norm.weight"] == "layers.1.input_layernorm.weight"
    assert spec.findings == ()
    assert spec.stock.differences == ()
    other = formats.read_draft(write_draft(tmp_path / "b", layers=2))
    assert other.findings == ()
    assert other.stock.differences == ("stock does not apply input_layernorm in layer 1",)


def test_rotary_tables_are_left_out(tmp_path):
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    spec = formats.read_draft(write_draft(tmp_path, tensor_changes={name: torch.ones(6)}))
    assert spec.weights[name] == f"ignored/{name}"
    assert spec.unconsumed == ()
    assert spec.findings == ()


@pytest.mark.parametrize("vocab_size", [None, 96])
def test_full_vocabulary_borrows_the_head_of_the_target(tmp_path, vocab_size):
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            draft_vocab=96,
            config_changes={"draft_vocab_size": vocab_size},
            tensor_changes={"lm_head.weight": None},
        )
    )
    assert (spec.vocab, spec.lm_head) == (Vocab(96, 96, "none"), "target")
    assert codes(spec) == ["head_from_target"]
    # Stock borrows the head only where the key is null.
    assert bool(spec.stock.differences) == (vocab_size is not None)


def test_tied_head(tmp_path):
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            draft_vocab=96,
            config_changes={"tie_word_embeddings": True},
            tensor_changes={"lm_head.weight": None},
        )
    )
    assert spec.lm_head == "tied"
    assert spec.origins["lm_head"] == "config"
    # Nothing is stored to tie to: the head is the target's embedding.
    assert spec.embed == "target"
    assert not {"lm_head.weight", "embed_tokens.weight"} & {*spec.weights.values(), *spec.missing}
    assert codes(spec) == []


def test_head_tied_to_an_embedding_of_its_own(tmp_path):
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            draft_vocab=96,
            config_changes={"tie_word_embeddings": True},
            tensor_changes={"lm_head.weight": None, "embed_tokens.weight": torch.ones(96, 32)},
        )
    )
    assert (spec.lm_head, spec.embed) == ("tied", "own")
    assert codes(spec) == []


def test_tied_head_without_an_embedding_of_its_width(tmp_path):
    spec = formats.read_draft(
        write_draft(
            tmp_path,
            target_hidden=20,
            draft_vocab=96,
            config_changes={"tie_word_embeddings": True},
            tensor_changes={"lm_head.weight": None, "embed_tokens.weight": None},
        )
    )
    assert (spec.lm_head, spec.embed) == ("tied", "own")
    assert (codes(spec), spec.missing) == (["missing_tensor"], ("embed_tokens.weight",))


def test_sizes_that_only_the_weights_tell(tmp_path):
    deleted = ("hidden_size", "intermediate_size", "num_key_value_heads", "draft_vocab_size", "vocab_size")
    spec = formats.read_draft(write_draft(tmp_path, config_changes=dict.fromkeys(deleted, DELETE)))
    assert (spec.hidden_size, spec.intermediate_size, spec.attention.kv_heads) == (32, 40, 2)
    assert spec.vocab == Vocab(96, 37, "offset")
    assert all(spec.origins[key] == "weights" for key in ("hidden_size", "intermediate_size", "kv_heads"))
    assert codes(spec, "error") == []


@pytest.mark.parametrize(
    ("deleted", "head_dim", "origin"),
    [((), 12, "config"), (("head_dim",), 12, "weights"), (("head_dim",), 8, "default")],
)
def test_heads(tmp_path, deleted, head_dim, origin):
    path = write_draft(tmp_path, kv_heads=1, head_dim=head_dim, config_changes=dict.fromkeys(deleted, DELETE))
    spec = formats.read_draft(path)
    assert spec.attention == Attention("gqa", 1, 4, 1, head_dim)
    assert spec.origins["head_dim"] == origin
    assert spec.findings == ()


@pytest.mark.parametrize(
    ("model_type", "max_positions", "eps"),
    [("llama", 2048, 1e-6), ("qwen3", 32768, 1e-6), ("phi3", 4096, 1e-5), ("something_new", 2048, 1e-6)],
)
def test_keys_left_out_take_what_transformers_fills_in(tmp_path, model_type, max_positions, eps):
    left_out = dict.fromkeys(("max_position_embeddings", "rms_norm_eps", "hidden_act"), DELETE)
    spec = formats.read_draft(write_draft(tmp_path, config_changes={"model_type": model_type, **left_out}))
    assert (spec.max_position_embeddings, spec.rms_norm_eps, spec.hidden_act) == (max_positions, eps, "silu")
    assert spec.origins["rms_norm_eps"] == "default"


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    from sglang_eagle3_ext.formats.reading import _MODEL_DEFAULTS

    for model_type, defaults in _MODEL_DEFAULTS.items():
        config = transformers.AutoConfig.for_model(model_type)
        theirs = {key: getattr(config, key, None) or config.rope_parameters["rope_theta"] for key in defaults}
        assert theirs == defaults, model_type


def test_llama4_text_has_its_own_key_for_the_mlp(tmp_path):
    changes = {"model_type": "llama4_text", "intermediate_size_mlp": 40, "intermediate_size": 11}
    spec = formats.read_draft(write_draft(tmp_path, config_changes=changes))
    assert spec.intermediate_size == 40
    assert spec.findings == ()


def test_absolute_map(tmp_path):
    path = write_draft(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + torch.arange(37)
    save_file(tensors, path / "model.safetensors")
    spec = formats.read_draft(path, override={"vocab_map": "absolute"})
    assert spec.vocab.map == "absolute"
    assert spec.origins["vocab_map"] == "override"
    assert codes(spec) == []


# How the files lie


def test_pickled_weights_read_the_same(tmp_path):
    pickled, other = write_draft(tmp_path / "a"), write_draft(tmp_path / "b")
    pickle(pickled)
    tensors = load_file(other / "model.safetensors")
    spec, expected = formats.read_draft(pickled), formats.read_draft(other)
    assert {n: (t.shape, t.dtype) for n, t in spec.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.tensors.items()
    }
    same = ("path", "sources_place", "tensors")
    assert dataclasses.replace(spec, **{f: getattr(expected, f) for f in same}) == expected
    loaded = dict(formats.read_tensors(spec))
    assert set(loaded) == set(spec.weights.values())
    assert torch.equal(loaded["fc.weight"], tensors["fc.weight"])


def test_pickles_of_the_older_container_are_read(tmp_path):
    path = write_draft(tmp_path)
    pickle(path, _use_new_zipfile_serialization=False)
    assert formats.read_draft(path).findings == ()


def test_shards(tmp_path):
    path = write_draft(tmp_path)
    tensors = load_file(path / "model.safetensors")
    weight_map = shard(path)
    spec = formats.read_draft(path)
    assert spec.findings == ()
    assert {name: info.file for name, info in spec.tensors.items()} == weight_map
    loaded = dict(formats.read_tensors(spec, ["d2t", "norm.weight"]))
    assert set(loaded) == {"d2t", "norm.weight"}
    assert torch.equal(loaded["d2t"], tensors["d2t"])


def test_shard_that_the_index_does_not_name(tmp_path):
    path = write_draft(tmp_path)
    shard(path)
    save_file({"stray": torch.ones(1)}, path / "model-9.safetensors")
    spec = formats.read_draft(path)
    assert codes(spec) == ["shard_unlisted"]
    assert "stray" not in spec.tensors


def test_index_that_names_what_no_shard_has(tmp_path):
    path = write_draft(tmp_path)
    weight_map = shard(path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"layers.7.up": "model-0.safetensors"}}))
    spec = formats.read_draft(path)
    assert codes(spec) == ["index_disagrees"]
    assert "layers.7.up" in spec.findings[0].message


def test_tensor_in_two_files(tmp_path):
    path = write_draft(tmp_path)
    save_file({"fc.weight": torch.ones(32, 96)}, path / "model-2.safetensors")
    assert "tensor_twice" in codes(formats.read_draft(path), "error")


# What cannot be read at all


def broken(path, text):
    (path / "config.json").write_text(text)


FATAL = {
    "config absent": (lambda p: (p / "config.json").unlink(), "config_unreadable", r"config\.json: no such file"),
    "config cut": (lambda p: broken(p, '{"a": '), "config_unreadable", "expected JSON"),
    "config is a list": (lambda p: broken(p, "[]"), "config_unreadable", "got list; expected a JSON object"),
    "config of wrong types": (
        lambda p: broken(p, json.dumps(json.loads((p / "config.json").read_text()) | {"hidden_size": "32"})),
        "config_type",
        r'config\.json:hidden_size: got "32"; expected an integer or null\. Correct the value\.',
    ),
    "weights absent": (lambda p: (p / "model.safetensors").unlink(), "no_weights", "no \\*.safetensors"),
    "weights cut": (
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-1]),
        "weights_unreadable",
        "expected a whole safetensors file",
    ),
    "weights empty": (
        lambda p: (p / "model.safetensors").write_bytes(b""),
        "weights_unreadable",
        "expected a whole safetensors file",
    ),
    "shard absent": (
        lambda p: (shard(p), (p / "model-1.safetensors").unlink()),
        "shard_absent",
        r"names model-1\.safetensors, which the folder lacks",
    ),
    "index broken": (
        lambda p: (p / "model.safetensors.index.json").write_text("{}"),
        "index_unreadable",
        "weight_map: got null",
    ),
    "config nested without end": (
        lambda p: broken(p, '{"a":' * 100_000),
        "config_unreadable",
        "recursion",
    ),
    "half a surrogate pair": (
        lambda p: broken(p, '{"a": "\\ud83d"}'),
        "config_unreadable",
        "surrogates not allowed",
    ),
    "shard of a name too long": (
        lambda p: (p / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": f"{'s' * 300}.safetensors"}})
        ),
        "shard_absent",
        "which the folder lacks",
    ),
    "no heads": (
        lambda p: broken(
            p,
            json.dumps(
                {
                    k: v
                    for k, v in json.loads((p / "config.json").read_text()).items()
                    if k not in ("num_attention_heads", "head_dim")
                }
            ),
        ),
        "config_incomplete",
        "num_attention_heads: got nothing, and no tensor that tells it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FATAL)
def test_says_why_it_cannot_read(tmp_path, case):
    damage, code, phrase = FATAL[case]
    path = write_draft(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError, match=phrase) as raised:
        formats.read_draft(path)
    assert [f.code for f in raised.value.findings if f.severity == "error"] == [code]


def test_a_pickle_that_is_no_state_dict_is_refused(tmp_path):
    path = write_draft(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save([torch.ones(2)], path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="expected a mapping from names to tensors"):
        formats.read_draft(path)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ({1: torch.ones(2)}, "got 1 "),
        ({"state_dict": {}}, "got 'state_dict' .dict"),
        ({"fc.weight": torch.eye(2).to_sparse()}, "got 'fc.weight' .torch.sparse_coo"),
        ({"fc.weight": torch.ones(2, device="meta")}, "got 'fc.weight' .*meta"),
    ],
    ids=["name", "nested", "sparse", "meta"],
)
def test_a_pickle_names_the_entry_that_is_no_tensor(tmp_path, content, got):
    path = write_draft(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save(content, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=got):
        formats.read_draft(path)


def test_a_layer_far_beyond_the_others_sizes_nothing(tmp_path):
    path = write_draft(tmp_path, tensor_changes={"layers.999999999999.mlp.up_proj.weight": torch.ones(2)})
    spec = formats.read_draft(path)
    assert spec.attention.num_layers == 1
    assert "unconsumed_tensor" in codes(spec, "error")


class Harmful:
    def __reduce__(self):
        return print, ("ran",)


def test_a_pickle_is_never_executed(tmp_path, capsys):
    path = write_draft(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"fc.weight": Harmful()}, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read"):
        formats.read_draft(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["", "n" * 300, "~nobody-of-that-name/draft"], ids=["empty", "long", "home"])
def test_names_that_cannot_be_a_folder(name):
    with pytest.raises(CheckpointError, match="expected a checkpoint folder or a Hub id"):
        formats.read_draft(name)


def test_a_folder_that_may_not_be_listed_is_not_said_to_be_empty(tmp_path, monkeypatch):
    path = write_draft(tmp_path)
    # By hand, since root may read everything.
    monkeypatch.setattr("os.access", lambda place, mode: str(place) != str(path))
    with pytest.raises(CheckpointError, match="got .*Permission denied"):
        formats.read_draft(path)


def test_weights_that_may_not_be_read_are_not_said_to_be_absent(tmp_path, monkeypatch):
    path = write_draft(tmp_path)

    def refuse(file, mode):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("sglang_eagle3_ext.formats.folder.open", refuse, raising=False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read, got Permission denied; expected"):
        formats.read_draft(path)


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such folder"):
        formats.read_draft(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        formats.read_draft(tmp_path / "file")


def test_hub_id_is_looked_up_in_the_cache_when_offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        formats.read_draft("nobody/no-such-draft")


def test_hub_snapshot_is_fetched_with_the_revision_and_only_what_is_needed(tmp_path, monkeypatch):
    import huggingface_hub

    path = write_draft(tmp_path / "snapshot")
    asked = {}

    def snapshot_download(repo, **keywords):
        asked.update(keywords, repo=repo)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    spec = formats.read_draft("someone/draft", revision="v2")
    assert spec.path == str(path)
    assert asked == {
        "repo": "someone/draft",
        "revision": "v2",
        "allow_patterns": ["*.json", "*.safetensors", "pytorch_model*.bin"],
    }


@pytest.mark.parametrize(
    ("architecture", "tensors", "phrase"),
    [
        ("Qwen3ForCausalLM", {}, r"eagle: config\.json:architectures is \['Qwen3ForCausalLM'\]"),
        ("LlamaForCausalLM", {"fc.weight": None}, "a plain language model, not a draft"),
        ("LlamaForCausalLM", {"midlayer.self_attn.q_proj.weight": torch.ones(48, 32)}, "an EAGLE-1 draft"),
    ],
)
def test_every_dialect_says_why_it_refuses(tmp_path, architecture, tensors, phrase):
    write_draft(tmp_path, config_changes={"architectures": [architecture]}, tensor_changes=tensors)
    with pytest.raises(CheckpointError, match=phrase) as raised:
        formats.read_draft(tmp_path)
    assert all(f"{name}: " in str(raised.value) for name in formats.READERS)
    assert [f.code for f in raised.value.findings] == ["dialect_unknown"]


def test_other_speculators_are_refused(tmp_path):
    write_draft(tmp_path, "speculators", config_changes={"speculators_model_type": "eagle"})
    with pytest.raises(CheckpointError, match="speculators_model_type is 'eagle', not 'eagle3'"):
        formats.read_draft(tmp_path)


def test_two_dialects_that_claim_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(formats.READERS, "another", formats.READERS["eagle"])
    with pytest.raises(CheckpointError, match="eagle and another claim it; expected exactly one") as raised:
        formats.read_draft(write_draft(tmp_path))
    assert [f.code for f in raised.value.findings] == ["dialect_ambiguous"]


# All wrong values at once

STRUCTS = {
    "specforge": {"": (FlatConfig, {"eagle_config"}), "eagle_config": (NestedConfig, set())},
    "deepseek": {"": (DeepseekConfig, set())},
    "speculators": {
        "": (SpeculatorsConfig, {"speculators_model_type", "transformer_layer_config", "speculators_config"}),
        "transformer_layer_config": (LayerConfig, {"tie_word_embeddings"}),
        "speculators_config.verifier": (VerifierConfig, set()),
    },
}


@pytest.mark.parametrize("dialect", STRUCTS)
def test_every_wrong_type_of_a_config_is_named_in_one_report(tmp_path, dialect):
    """No key of any struct takes a list of a list; what the config must have to be of its dialect stays."""
    places = [
        ".".join(filter(None, (place, key)))
        for place, (kind, kept) in STRUCTS[dialect].items()
        for key in kind.__struct_fields__
        if key not in kept | {"architectures"}
    ]
    # A tensor tells every size but the number of heads.
    told = [place for place in places if not place.endswith("num_attention_heads")]
    draft = write_draft(
        tmp_path, dialect, config_changes=dict.fromkeys(told, [[]]), tensor_changes={"stray": torch.ones(1)}
    )
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(draft)
    named = [
        f.message.partition("/config.json:")[2].partition(": got [[]]; expected ")[0]
        for f in raised.value.findings
        if f.code == "config_type"
    ]
    assert sorted(named) == sorted(told)
    assert "unconsumed_tensor" in {f.code for f in raised.value.findings}


def test_wrong_types_of_keys_that_nothing_else_tells_are_reported_once(tmp_path):
    draft = write_draft(tmp_path, config_changes={"num_attention_heads": "4", "head_dim": DELETE, "rms_norm_eps": "x"})
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(draft)
    assert [f.code for f in raised.value.findings] == ["config_type", "config_type"]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"architectures": "LlamaForCausalLMEagle3"}, 'got "LlamaForCausalLMEagle3"; expected a list of class names.'),
        ({"architectures": 3}, "got 3; expected a list of class names."),
        ({"architectures": [["LlamaForCausalLMEagle3"]]}, "expected a list of class names."),
    ],
)
def test_architectures_must_be_a_list(tmp_path, changes, wrong):
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(write_draft(tmp_path, config_changes=changes | {"rms_norm_eps": "x"}))
    assert f"{tmp_path}/config.json:architectures: got" in str(raised.value)
    assert wrong in str(raised.value)
    if changes["architectures"] == "LlamaForCausalLMEagle3":
        assert [f.code for f in raised.value.findings] == ["config_type", "config_type"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("torch_dtype", "bananas", "one of float64, float32, float16, bfloat16"),
        ("dtype", "torch.int8", "one of float64, float32, float16, bfloat16"),
        ("hidden_size", -32, "a positive integer"),
        ("vocab_size", 0, "a positive integer"),
        ("intermediate_size", -1, "a positive integer"),
        ("draft_vocab_size", 0, "an integer of at least 1"),
        ("target_hidden_size", -32, "an integer of at least 1"),
        ("num_aux_hidden_states", -3, "an integer of at least 0"),
        ("sliding_window", -8, "a positive number of tokens"),
    ],
)
def test_a_value_that_no_draft_can_have_is_an_error(tmp_path, key, value, expected):
    changes = {key: value} | ({"use_sliding_window": True} if key == "sliding_window" else {})
    spec = formats.read_draft(write_draft(tmp_path, config_changes=changes))
    (found,) = [f for f in spec.findings if f.code == "config_value"]
    assert found.severity == "error"
    assert f"config.json:{key}: got {value!r}; expected {expected}." in found.message


def test_a_dtype_is_named_where_speculators_write_it(tmp_path):
    spec = formats.read_draft(write_draft(tmp_path, "speculators", config_changes={"torch_dtype": "bananas"}))
    assert [f.message.partition("; ")[0] for f in spec.findings if f.severity == "error"] == [
        f"{tmp_path}/config.json:torch_dtype: got 'bananas'"
    ]


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", -4), ("head_dim", 0)])
def test_heads_that_no_draft_can_have_are_an_error(tmp_path, key, value):
    spec = formats.read_draft(write_draft(tmp_path, config_changes={key: value}))
    assert [f.code for f in spec.findings] == ["config_value"]
    assert f"{key}: got {value}; expected a positive integer" in spec.findings[0].message
    # Everything else is checked with what the tensors tell.
    assert (spec.attention.heads, spec.attention.head_dim) == (4, 12)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [("half", "float16"), ("torch.bfloat16", "bfloat16"), ("float", "float32"), ("auto", "float32"), ("", "float32")],
)
def test_dtype_as_it_is_spelled(tmp_path, said, dtype):
    spec = formats.read_draft(write_draft(tmp_path, config_changes={"torch_dtype": said}))
    assert (spec.dtype, spec.findings) == (dtype, ())


def test_broken_weights_do_not_hide_what_is_wrong_in_eagle3_ext(tmp_path):
    draft = write_draft(tmp_path, config_changes={"eagle3_ext": {"sorces": []}})
    (draft / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as raised:
        formats.read_draft(draft)
    assert [f.code for f in raised.value.findings] == ["eagle3_ext", "weights_unreadable"]


def test_a_llama_with_fc_is_a_draft_however_deep_its_config_says_it_is(tmp_path):
    changes = {"num_hidden_layers": 40, "draft_vocab_size": DELETE}
    assert formats.read_draft(write_draft(tmp_path, "eagle", config_changes=changes)).format == "eagle"


# Targets


def test_target(tmp_path):
    facts = formats.read_target(write_target(tmp_path, num_layers=5))
    assert facts == TargetFacts(str(tmp_path), "LlamaForCausalLM", 5, 32, 96, facts.reading, context=512)
    assert facts.reading.ids == "output"


def test_target_inside_a_multimodal_wrapper(tmp_path):
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "hidden_size": 7,
        "text_config": {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = formats.read_target(tmp_path)
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (61, 7168, 163840)
    assert facts.reading.ids == "first_is_one"


def test_what_a_wrapper_leaves_to_its_class(tmp_path):
    """transformers writes no value of an inner config that its class has as a default; gemma-3-4b-it lacks three."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = formats.read_target(tmp_path)
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (34, 2560, 262208)
    config["model_type"] = "nobody_knows"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vocab_size: got nothing"):
        formats.read_target(tmp_path)


def test_layers_in_longcats_word(tmp_path):
    changes = {"num_hidden_layers": DELETE, "num_layers": 28}
    assert formats.read_target(write_target(tmp_path, config_changes=changes)).num_layers == 28


def test_all_that_is_wrong_with_a_target_is_said_at_once(tmp_path):
    changes = {"architectures": "LlamaForCausalLM", "hidden_size": "32", "vocab_size": 0, "num_hidden_layers": DELETE}
    with pytest.raises(CheckpointError) as raised:
        formats.read_target(write_target(tmp_path, config_changes=changes))
    assert {f.code for f in raised.value.findings} == {"target_unreadable"}
    said = [line.removeprefix(f"{tmp_path}/config.json:") for line in str(raised.value).splitlines()]
    assert said == [
        "num_hidden_layers: got nothing; expected an integer of at least 1. Correct the value.",
        'hidden_size: got "32"; expected an integer of at least 1. Correct the value.',
        "vocab_size: got 0; expected an integer of at least 1. Correct the value.",
        'architectures: got "LlamaForCausalLM"; expected a list with the class of the target. Correct the key.',
    ]


@pytest.mark.parametrize("names", [[["LlamaForCausalLM"]], [], 3, [None]])
def test_the_class_of_a_target_must_be_text(tmp_path, names):
    with pytest.raises(CheckpointError, match="architectures: got .*; expected a list with the class of the target"):
        formats.read_target(write_target(tmp_path, config_changes={"architectures": names}))
    with pytest.raises(CheckpointError, match="EAGLE-3 draft|a list of class names"):
        formats.read_draft(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "architectures"])
def test_target_that_lacks_a_key(tmp_path, key):
    write_target(tmp_path, config_changes={key: DELETE})
    with pytest.raises(CheckpointError, match=key) as raised:
        formats.read_target(tmp_path)
    assert [f.code for f in raised.value.findings] == ["target_unreadable"]


def test_an_identity_map_is_not_kept(tmp_path):
    spec = formats.read_draft(
        write_draft(tmp_path, draft_vocab=96, tensor_changes={"d2t": torch.zeros(96, dtype=torch.int64)})
    )
    assert (spec.vocab.map, spec.origins["vocab_map"]) == ("none", "weights")
    assert (spec.weights["d2t"], spec.missing, spec.unconsumed) == (f"{formats.IGNORED}d2t", (), ())
    assert "d2t" not in dict(formats.read_tensors(spec))


def test_an_empty_list_of_layer_types_says_nothing(tmp_path):
    asked = {"use_sliding_window": True, "sliding_window": 64, "layer_types": []}
    assert formats.read_draft(write_draft(tmp_path, config_changes=asked)).attention.sliding_window == 64


def test_a_window_that_nothing_sizes_is_none(tmp_path):
    asked = {"use_sliding_window": True}
    assert formats.read_draft(write_draft(tmp_path, config_changes=asked)).attention.sliding_window is None
