"""``configure`` and ``export``: what is written, what is kept byte for byte, and when nothing is written.

The oracles are the parser of the standard library, the reader, and ``reference.ReferenceDraft``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DELETE, LATENT, write_draft, write_target
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import assembly, resave
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.formats import read_draft, read_target, read_tensors
from sglang_eagle3_ext.reference import ReferenceDraft

SHUFFLED = {"eagle3_ext": {"sources": ["layer5", "embed", "layer2"]}}


def run(*argv: object) -> int:
    """Run one of the two commands as the command line does."""
    parser = argparse.ArgumentParser()
    resave.add_command(parser.add_subparsers(required=True))
    args = parser.parse_args(list(map(str, argv)))
    return args.command(args)


def tree(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- configure ------------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


def test_configure_declares_sources_and_keeps_the_rest(draft: Path, target: Path, capsys):
    old = tree(draft)
    os.chmod(draft / "config.json", 0o640)
    assert run("configure", draft, "--set", "sources=embed,layer2,layer5", "--target", target) == 0
    new = tree(draft)
    assert new.pop("config.json.bak") == old["config.json"]
    config = json.loads(new.pop("config.json"))
    assert config.pop("eagle3_ext") == {"sources": ["embed", "layer2", "layer5"]}
    # Plain ids of a Llama are outputs, and the embedding the output of layer -1.
    assert config.pop("eagle_config") == {
        "eagle_aux_hidden_state_layer_ids": [-1, 2, 5],
        "use_aux_hidden_state": True,
    }
    assert config == json.loads(old.pop("config.json"))
    assert new == old
    assert stat.S_IMODE((draft / "config.json").stat().st_mode) == 0o640
    plan = assembly.plan(read_draft(draft), read_target(target))
    assert plan.boundaries == plan.stock_boundaries == (0, 3, 6)
    assert "config.json.bak" in capsys.readouterr().out


def test_backups_are_never_overwritten_and_no_change_makes_none(draft: Path):
    for value in ("true", "false", "true"):
        assert run("configure", draft, "--set", f"strict={value}", "--set", "sources=embed,layer2,layer5") == 0
    assert run("configure", draft, "--set", "strict=true") == 0
    assert sorted(p.name for p in draft.glob("*.bak*")) == ["config.json.bak", "config.json.bak1", "config.json.bak2"]
    assert "eagle3_ext" not in (draft / "config.json.bak").read_text()
    assert json.loads((draft / "config.json.bak2").read_text())["eagle3_ext"]["strict"] is False


def test_a_change_by_somebody_else_is_not_lost(draft: Path, monkeypatch):
    file, judge = draft / "config.json", resave._judge
    theirs = file.read_bytes() + b"\n"

    def meanwhile(*args: Any) -> Any:
        file.write_bytes(theirs)
        return judge(*args)

    monkeypatch.setattr(resave, "_judge", meanwhile)
    with pytest.raises(CheckpointError, match="another content than a moment ago"):
        run("configure", draft, "--set", "strict=false")
    assert file.read_bytes() == theirs
    assert sorted(path.name for path in draft.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("out", ["n" * 300, "~nobody-of-that-name/out", "a\0b"], ids=["long", "home", "nul"])
def test_a_name_that_cannot_be_a_folder_is_refused(draft: Path, out: str):
    with pytest.raises(UnsupportedError, match="cannot be written"):
        run("configure", draft, "--set", "strict=false", "--out", out)


def test_unset_gives_back_the_very_bytes(draft: Path):
    old = (draft / "config.json").read_bytes()
    assert run("configure", draft, "--set", "sources=embed,layer2,layer5", "--set", "rope_theta=1e6") == 0
    assert run("configure", draft, "--unset", "rope_theta") == 0
    assert json.loads((draft / "config.json").read_text())["eagle3_ext"] == {"sources": ["embed", "layer2", "layer5"]}
    assert run("configure", draft, "--unset", "sources") == 0
    assert (draft / "config.json").read_bytes() == old


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(
            ["--set", "sourcse=embed", "--set", "norms=some", "--set", "producer=me"],
            ["sourcse", "norms", "producer"],
            id="unknown-key-and-values",
        ),
        pytest.param(["--set", "sources=embed,layer2"], ["fc.weight", "3 sources"], id="too-few-sources"),
        pytest.param(["--set", "sources=embed,lay2,layer"], ["'lay2'", "'layer'"], id="grammar"),
        pytest.param(
            ["--set", "strict=true", "--set", "strict=true", "--unset", "order"],
            ["--set strict", "--unset order"],
            id="twice-and-absent",
        ),
        pytest.param([], ["--set"], id="nothing"),
        pytest.param(["--set", "rope_theta=NaN"], ["rope_theta"], id="nan"),
        pytest.param(["--set", 'rope_scaling={"factor": 1e999}'], ["rope_scaling"], id="infinity"),
        pytest.param(["--set", "strict=" + "[" * 100_000], ["strict"], id="nested-without-end"),
        pytest.param(["--set", "strict=true", "--out", ""], ["--out: got an empty name"], id="empty-out"),
    ],
)
def test_errors_are_reported_together_and_write_nothing(draft: Path, argv: list[str], words: list[str]):
    old = tree(draft)
    with pytest.raises(CheckpointError) as error:
        run("configure", draft, *argv)
    assert all(word in str(error.value) for word in words)
    assert "sglang-eagle3-" not in str(error.value)
    assert tree(draft) == old


@pytest.mark.parametrize("command", ["configure", "export"])
def test_a_wrong_key_does_not_hide_a_wrong_target(tmp_path: Path, capsys, command: str):
    draft = write_draft(tmp_path / "draft", config_changes={"eagle3_ext": {"sorces": []}})
    served = write_target(tmp_path / "served", hidden=48, vocab=97)
    words = {
        "configure": ["--set", "recurrent_state=pre_norm", "--print"],
        "export": ["--for", "stock", "--out", tmp_path / "out"],
    }
    with pytest.raises(CheckpointError) as raised:
        run(command, draft, "--target", served, *words[command])
    assert [f.code for f in raised.value.findings] == ["eagle3_ext", "target_width", "vocab_size"]
    assert all(str(draft) in f.message or str(served) in f.message for f in raised.value.findings)


def test_a_source_that_the_target_lacks_writes_nothing(draft: Path, target: Path):
    old = tree(draft)
    with pytest.raises(CheckpointError, match="layer31"):
        run("configure", draft, "--set", "sources=embed,layer3,layer31", "--target", target)
    assert tree(draft) == old


@pytest.mark.parametrize(
    ("changes", "sources", "reason"),
    [
        ({}, "layer5,embed,layer2", "ascending"),
        ({}, "embed,layer2,last", "cannot capture"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}, "embed,layer2,layer5", "disagree"),
        ({"architectures": ["LlamaForCausalLM"]}, "embed,layer2,layer5", "plain language model"),
    ],
)
def test_ids_for_stock_are_left_out_with_a_reason(tmp_path: Path, target: Path, capsys, changes, sources, reason):
    draft = write_draft(tmp_path / "draft", config_changes=changes)
    assert run("configure", draft, "--set", f"sources={sources}", "--target", target) == 0
    assert "eagle_config" not in json.loads((draft / "config.json").read_text())
    assert reason in next(line for line in capsys.readouterr().err.splitlines() if "not written" in line)


def test_never_through_a_link_and_never_into_a_cache_or_a_read_only_file(tmp_path: Path, draft: Path):
    blob = tmp_path / "blob"
    (draft / "config.json").rename(blob)
    (draft / "config.json").symlink_to(blob)
    old = blob.read_bytes()
    with pytest.raises(CheckpointError, match="is a link.*--out"):
        run("configure", draft, "--set", "strict=true", "--set", "sources=embed,layer2,layer5")
    (draft / "config.json").unlink()
    (draft / "config.json").write_bytes(old)
    os.chmod(draft / "config.json", 0o444)
    with pytest.raises(CheckpointError, match="read-only.*--out"):
        run("configure", draft, "--set", "sources=embed,layer2,layer5")
    cached = write_draft(tmp_path / "models--a--draft" / "snapshots" / "0123")
    with pytest.raises(CheckpointError, match="Hub cache.*--out"):
        run("configure", cached, "--set", "sources=embed,layer2,layer5")
    assert blob.read_bytes() == (draft / "config.json").read_bytes() == old
    assert not list(tmp_path.rglob("*.bak*"))


def test_out_writes_a_whole_copy_and_leaves_the_original(tmp_path: Path, draft: Path):
    (draft / "README.md").write_text("a draft")
    (draft / "logs").mkdir()
    (draft / "logs" / "train.txt").write_text("loss")
    blob = tmp_path / "blob"
    (draft / "model.safetensors").rename(blob)
    (draft / "model.safetensors").symlink_to(blob)
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    (elsewhere / "vocab.txt").write_text("a b")
    (draft / "tokenizer").symlink_to(elsewhere)
    (draft / "logs" / "back").symlink_to(draft)  # a circle
    old, out = tree(draft), tmp_path / "new" / "copy"
    assert run("configure", draft, "--set", "sources=embed,layer2,layer5", "--out", out) == 0
    new = tree(out)
    assert json.loads(new.pop("config.json"))["eagle3_ext"] == {"sources": ["embed", "layer2", "layer5"]}
    assert new.pop("tokenizer/vocab.txt") == b"a b"
    assert tree(draft) == old
    del old["config.json"]
    assert new == old
    assert not (out / "model.safetensors").is_symlink()
    assert os.listdir(out.parent) == ["copy"]
    for refused in (out, draft / "inner", out / "config.json"):
        with pytest.raises(CheckpointError, match="--out"):
            run("configure", draft, "--set", "strict=true", "--set", "sources=embed,layer2,layer5", "--out", refused)


def test_links_are_followed_wherever_they_lead_or_named(tmp_path: Path, draft: Path, capsys):
    shared = tmp_path / "shared"
    (shared / "inner").mkdir(parents=True)
    (shared / "inner" / "vocab.txt").write_text("a b")
    for name in ("first", "second"):
        (draft / name).symlink_to(shared)
    (shared / "inner" / "up").symlink_to(shared)
    argv = ["configure", draft, "--set", "sources=embed,layer2,layer5", "--out"]
    assert run(*argv, tmp_path / "copy") == 0
    copied = {name for name in tree(tmp_path / "copy") if name.endswith("vocab.txt")}
    assert copied == {"first/inner/vocab.txt", "second/inner/vocab.txt"}
    said = capsys.readouterr().err
    assert all(
        f"{draft}/{name}/inner/up: leads back to a folder that it lies in" in said for name in ("first", "second")
    )
    (draft / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(UnsupportedError, match="gone, which leads nowhere; expected"):
        run(*argv, tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["copy", "draft", "shared"]


def test_print_prints_the_new_config_alone_and_writes_nothing(draft: Path, capsys):
    old = tree(draft)
    assert run("configure", draft, "--set", "sources=embed,layer2,layer5", "--print") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["eagle3_ext"] == {"sources": ["embed", "layer2", "layer5"]}
    assert out.startswith(old["config.json"].decode().rstrip("}\n"))
    assert '+  "sources": [' in err
    assert tree(draft) == old


# ---- export ---------------------------------------------------------------------------------------------


def opened(folder: Path) -> ReferenceDraft:
    spec = read_draft(folder)
    embed = torch.randn(96, 32, generator=torch.Generator().manual_seed(7))
    head = torch.randn(96, 32, generator=torch.Generator().manual_seed(8)) if spec.lm_head == "target" else None
    return ReferenceDraft(spec, dict(read_tensors(spec)), embed=embed, lm_head=head, dtype=torch.float64)


def assert_same_draft(original: Path, exported: Path, target: Path) -> None:
    """Feed both with the same states of the target, each in its own columns, and compare what they compute."""
    facts = read_target(target)
    before, after = opened(original), opened(exported)
    plans = [assembly.plan(read_draft(folder), facts) for folder in (original, exported)]
    assert plans[1].boundaries == plans[0].capture
    assert not [f for f in plans[1].findings if f.severity != "info"]
    generator = torch.Generator().manual_seed(3)
    states = {b: torch.randn(9, 32, generator=generator, dtype=torch.float64) for b in plans[0].capture}
    tokens = torch.randint(96, (9,), generator=generator)
    steps = []
    for reference, plan in zip((before, after), plans, strict=True):
        features = torch.cat([states[b] for b in plan.boundaries], dim=-1)
        step, cache = reference.feature_pass(reference.project(features), tokens)
        steps += [step.logits, step.state]
        steps.append(reference.propose_chain(features, tokens, 4))
    torch.testing.assert_close(steps[0], steps[3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(steps[1], steps[4], rtol=1e-12, atol=1e-12)
    assert torch.equal(steps[2], steps[5])


def norms(**sizes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {f"{name}.weight": 1 + torch.rand(size, generator=generator) for name, size in sizes.items()}


PER_SOURCE = {f"fc_norm.{i}.weight": 1 + torch.rand(32, generator=torch.Generator().manual_seed(i)) for i in range(3)}
ABSOLUTE = torch.randperm(96, generator=torch.Generator().manual_seed(1))[:37].sort().values
ONE_TO_ONE = {"lm_head.weight": None, "d2t": None, "t2d": None}

FOR_STOCK: list[Any] = [
    pytest.param({"config_changes": SHUFFLED}, id="permuted"),
    pytest.param(
        {"config_changes": {**SHUFFLED, "fc_norm": True}, "tensor_changes": PER_SOURCE}, id="permuted-per-source-norms"
    ),
    pytest.param(
        {
            "config_changes": {**SHUFFLED, "eagle_config": {"norm_before_fc": True}},
            "tensor_changes": norms(input_norm=96),
        },
        id="permuted-concatenation-norm",
    ),
    pytest.param(
        {"dialect": "eagle", "config_changes": {"eagle3_ext": {"sources": ["layer3", "layer1", "embed"]}}}, id="renamed"
    ),
    pytest.param(
        {"dialect": "speculators", "tensor_changes": {"embed_tokens.weight": None}, "config_changes": SHUFFLED},
        id="speculators",
    ),
    pytest.param(
        {
            "config_changes": {
                "eagle3_ext": {**SHUFFLED["eagle3_ext"], "vocab_map": "absolute", "rope_theta": 5e5, "strict": True},
                "eagle_config": None,
            },
            "tensor_changes": {"d2t": ABSOLUTE, "t2d": None},
        },
        id="absolute-map-and-rope",
    ),
    pytest.param(
        {
            "config_changes": {
                "eagle3_ext": {**SHUFFLED["eagle3_ext"], "recurrent_state": "post_norm", "embed": "target"},
                "num_aux_hidden_states": 2,
                "num_hidden_layers": 30,
                "target_hidden_size": None,
            },
            "tensor_changes": {"embed_tokens.weight": torch.zeros(96, 32)},
        },
        id="what-stock-misreads",
    ),
    pytest.param(
        {"config_changes": {**SHUFFLED, "draft_vocab_size": 96}, "tensor_changes": ONE_TO_ONE, "draft_vocab": 96}
        | {"tensor_changes": {"lm_head.weight": None}},
        id="head-of-the-target",
    ),
    pytest.param({"config_changes": SHUFFLED, "layers": 2}, id="two-layers"),
    pytest.param(
        {"config_changes": {**SHUFFLED, "rope_scaling": {"type": "dynamic", "factor": 2.0}}}, id="dynamic-rope"
    ),
    pytest.param(
        {"config_changes": {**SHUFFLED, "rope_parameters": {"rope_type": "linear", "factor": 2}}}, id="linear-rope"
    ),
    pytest.param(
        {
            "config_changes": {"eagle_config": {"use_aux_hidden_state": False}},
            "tensor_changes": {"fc.weight": None},
        },
        id="without-fc",
    ),
    pytest.param({"dialect": "deepseek", "config_changes": SHUFFLED}, id="latent"),
    pytest.param(
        {
            "dialect": "deepseek",
            "config_changes": {
                **SHUFFLED,
                **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), DELETE),
                "architectures": ["DeepSeekForCausalLMEagle3"],
                "fc_norm": True,
                "bias": True,
            },
            "tensor_changes": {**PER_SOURCE, "fc.bias": torch.ones(32)},
        },
        id="latent-told-by-tensors-with-norms-and-bias",
    ),
]


@pytest.mark.parametrize("draft_args", FOR_STOCK)
def test_export_for_stock_computes_the_same(tmp_path: Path, target: Path, draft_args: dict[str, Any]):
    draft, out = write_draft(tmp_path / "draft", **draft_args), tmp_path / "out"
    old = tree(draft)
    assert run("export", draft, "--for", "stock", "--target", target, "--out", out) == 0
    assert tree(draft) == old
    assert sorted(os.listdir(tmp_path)) == ["draft", "out", "target"]
    assert_same_draft(draft, out, target)
    # Without what this package alone reads, the reader must still find nothing that stock does otherwise.
    config = json.loads((out / "config.json").read_text())
    del config["eagle3_ext"]
    (out / "config.json").write_text(json.dumps(config))
    plan = assembly.plan(read_draft(out), read_target(target))
    assert plan.differences == ()


def test_columns_and_norms_are_moved_bit_for_bit_and_the_rest_not_at_all(tmp_path: Path, target: Path):
    draft = write_draft(
        tmp_path / "draft",
        dtype=torch.bfloat16,
        config_changes={**SHUFFLED, "fc_norm": True},
        tensor_changes={name: tensor.bfloat16() for name, tensor in PER_SOURCE.items()},
    )
    assert run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out") == 0
    old, new = load_file(draft / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    # Trained on layer 5 | embedding | layer 2, captured as embedding | layer 2 | layer 5.
    first, second, third = old.pop("fc.weight").split(32, dim=1)
    assert torch.equal(new.pop("fc.weight"), torch.cat([second, third, first], dim=1))
    for i, j in enumerate((1, 2, 0)):
        assert torch.equal(new.pop(f"fc_norm.{i}.weight"), old.pop(f"fc_norm.{j}.weight"))
    assert {name.replace("midlayer", "layers.0") for name in old} == set(new)
    assert all(torch.equal(new[name.replace("midlayer", "layers.0")], tensor) for name, tensor in old.items())


@pytest.mark.parametrize("kind", ["sharded", "bin"])
def test_shards_and_pickles_become_one_file(tmp_path: Path, target: Path, kind: str):
    draft = write_draft(tmp_path / "draft", config_changes=SHUFFLED)
    (draft / "README.md").write_text("a draft")
    tensors = load_file(draft / "model.safetensors")
    (draft / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(tensors, draft / "pytorch_model.bin")
    else:
        names = sorted(tensors)
        weight_map = {}
        for i, part in enumerate((names[:5], names[5:])):
            save_file({name: tensors[name] for name in part}, draft / f"model-{i}.safetensors")
            weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
        (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", "model.safetensors"]
    assert len({stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}) == 1
    assert_same_draft(draft, tmp_path / "out", target)


@pytest.mark.parametrize(
    "draft_args",
    [
        pytest.param({"config_changes": SHUFFLED}, id="permuted"),
        pytest.param(
            {
                "dialect": "speculators",
                "config_changes": {
                    "eagle3_ext": {"sources": ["last", "embed", "layer2"]},
                    "norm_before_residual": True,
                },
                "tensor_changes": {"embed_tokens.weight": None},
            },
            id="post-norm-residual-and-last-boundary",
        ),
    ],
)
def test_export_for_vllm_writes_boundaries_where_it_looks(tmp_path: Path, target: Path, draft_args: dict[str, Any]):
    draft, out = write_draft(tmp_path / "draft", **draft_args), tmp_path / "out"
    assert run("export", draft, "--for", "vllm", "--target", target, "--out", out) == 0
    assert_same_draft(draft, out, target)
    config = json.loads((out / "config.json").read_text())
    plan = assembly.plan(read_draft(draft), read_target(target))
    assert config["eagle_aux_hidden_state_layer_ids"] == sorted(plan.boundaries, key=int)
    assert "eagle_aux_hidden_state_layer_ids" not in config.get("eagle_config", {})
    assert config.get("norm_before_residual", False) is (plan.spec.norms.residual == "post_norm")


QK_NORM = {"midlayer.self_attn.q_norm.weight": torch.ones(12), "midlayer.self_attn.k_norm.weight": torch.ones(12)}


@pytest.mark.parametrize(
    ("engine", "draft_args", "reasons"),
    [
        pytest.param(
            "stock",
            {
                "config_changes": {"eagle3_ext": {"sources": ["final_norm", "embed", "last"], "residual": "post_norm"}},
                "tensor_changes": {**QK_NORM, "embed_tokens.weight": torch.ones(96, 32)},
            },
            ["final norm", "before hidden_norm", "q and k norms", "embed=target"],
            id="stock-many",
        ),
        pytest.param(
            "stock",
            {"num_sources": 1, "config_changes": {"eagle3_ext": {"sources": ["layer3"]}}},
            ["skips fc"],
            id="stock-one-source",
        ),
        pytest.param(
            "vllm",
            {
                "num_sources": 4,
                "config_changes": {
                    "eagle3_ext": {"sources": ["final_norm", "embed", "layer1", "layer2"]},
                    "norm_output": True,
                    "norm_before_fc": True,
                },
                "tensor_changes": norms(input_norm=128),
            },
            ["after the final norm", "3 sources, not 4", "no norm around fc", "recycles"],
            id="vllm-many",
        ),
    ],
)
def test_a_no_names_every_reason_and_writes_nothing(tmp_path: Path, target: Path, engine, draft_args, reasons):
    draft = write_draft(tmp_path / "draft", **draft_args)
    with pytest.raises(UnsupportedError) as error:
        run("export", draft, "--for", engine, "--target", target, "--out", tmp_path / "out")
    assert all(reason in str(error.value) for reason in reasons)
    assert sorted(os.listdir(tmp_path)) == ["draft", "target"]


@pytest.mark.parametrize(
    ("engine", "draft_args", "reasons"),
    [
        pytest.param(
            "stock",
            {
                "layers": 2,
                "latent": LATENT | {"q_lora_rank": None},
                "config_changes": {**SHUFFLED, "rope_interleave": False, "norm_before_fc": True},
                "tensor_changes": norms(input_norm=96),
            },
            ["one layer only, not of 2", "q_lora_rank", "no norm over the concatenation in an MLA", "not its halves"],
            id="stock",
        ),
        pytest.param("vllm", {"config_changes": SHUFFLED}, ["classes of its own for latent attention"], id="vllm"),
    ],
)
def test_a_no_to_latent_attention_names_every_reason(tmp_path: Path, target: Path, engine, draft_args, reasons):
    draft = write_draft(tmp_path / "draft", "deepseek", **draft_args)
    with pytest.raises(UnsupportedError) as error:
        run("export", draft, "--for", engine, "--target", target, "--out", tmp_path / "out")
    assert all(reason in str(error.value) for reason in reasons)
    assert sorted(os.listdir(tmp_path)) == ["draft", "target"]


def test_a_target_without_capture_in_stock_is_a_reason(tmp_path: Path):
    target = write_target(tmp_path / "target", config_changes={"architectures": ["OtherForCausalLM"]})
    draft = write_draft(tmp_path / "draft", config_changes=SHUFFLED)
    with pytest.raises(UnsupportedError, match="OtherForCausalLM"):
        run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out")


def test_ids_that_stay_behind_are_said(draft: Path, target: Path, capsys):
    assert run("configure", draft, "--set", "sources=embed,layer2,layer5", "--target", target) == 0
    capsys.readouterr()
    assert run("configure", draft, "--set", "sources=embed,layer3,layer5") == 0
    said = capsys.readouterr().err
    assert "eagle_config.eagle_aux_hidden_state_layer_ids: still holds [-1, 2, 5], by which stock SGLang would" in said


def test_ids_mean_the_same_on_a_class_that_reads_them_otherwise(tmp_path: Path):
    # A DeepSeek-like class adds one to all ids when the first is 1, and takes them as boundaries otherwise.
    target = write_target(tmp_path / "target", config_changes={"architectures": ["DeepseekV3ForCausalLM"]})
    sources = {"eagle3_ext": {"sources": ["layer5", "layer0", "layer2"]}}
    draft = write_draft(tmp_path / "draft", config_changes={**sources, "eagle_config": DELETE})
    assert run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out") == 0
    plan = assembly.plan(read_draft(tmp_path / "out"), read_target(target))
    assert plan.boundaries == plan.stock_boundaries == (1, 3, 6)


# ---- killed ---------------------------------------------------------------------------------------------


def test_what_was_measured_goes_along_from_every_dialect(tmp_path: Path, target: Path):
    expected = {"accept_length": 2.0, "accept_per_position": [0.7], "steps": 1, "topk": 1, "draft_tokens": 2}
    ext = {"sources": ["embed", "layer2", "layer5"], "expected": expected, "strict": True}
    draft = write_draft(tmp_path / "draft", "speculators", config_changes={"eagle3_ext": ext})
    assert run("export", draft, "--for", "vllm", "--target", target, "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["eagle3_ext"] == ext


@pytest.mark.parametrize("engine", ["stock", "vllm"])
def test_a_window_that_training_did_not_read_stays_behind(tmp_path: Path, target: Path, engine: str):
    ext = {"sources": ["embed", "layer2", "layer5"]} | ({"embed": "target"} if engine == "stock" else {})
    draft = write_draft(tmp_path / "draft", "automodel", config_changes={"eagle3_ext": ext})
    assert run("export", draft, "--for", engine, "--target", target, "--out", tmp_path / "out") == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert not {"sliding_window", "layer_types"} & set(config)
    assert read_draft(tmp_path / "out").attention.sliding_window is None


def killed(work: Callable[[], object]) -> bool:
    """Run in a process of its own, and say whether it was killed there."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def kill_self(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_before_the_last_step_changes_nothing(tmp_path: Path, draft: Path, target: Path, monkeypatch):
    old = tree(draft)
    sources = ["--set", "sources=embed,layer2,layer5"]
    monkeypatch.setattr(os, "replace", kill_self)
    monkeypatch.setattr(os, "rename", kill_self)
    assert killed(lambda: run("configure", draft, *sources))
    assert (draft / "config.json").read_bytes() == old["config.json"] == (draft / "config.json.bak").read_bytes()
    assert killed(lambda: run("configure", draft, *sources, "--out", tmp_path / "copy"))
    assert killed(lambda: run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out"))
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_leaves_no_trace(tmp_path: Path, target: Path, monkeypatch):
    draft = write_draft(tmp_path / "draft", config_changes=SHUFFLED)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(resave, "_verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["draft", "target"]


@pytest.mark.parametrize(
    ("command", "signum"),
    [("export", signal.SIGTERM), ("configure", signal.SIGTERM), ("configure", signal.SIGHUP)],
    ids=["export-term", "configure-term", "configure-hup"],
)
def test_a_signal_leaves_no_trace(tmp_path: Path, target: Path, command: str, signum: signal.Signals):
    """The whole program is told to stop while a copy is half written."""
    draft, out = write_draft(tmp_path / "draft", config_changes=SHUFFLED), tmp_path / "out"
    argv = {
        "export": ["export", str(draft), "--for", "stock", "--target", str(target), "--out", str(out)],
        "configure": ["configure", str(draft), "--set", "strict=false", "--out", str(out)],
    }[command]
    code = f"""
import os, signal, time
from sglang_eagle3_ext import cli, resave
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup these tests inherit that it is ignored
def stopped(*_):
    assert any(name.startswith(".out.") for name in os.listdir({str(tmp_path)!r}))
    os.kill(os.getpid(), {int(signum)})
    time.sleep(60)
resave._copy = stopped
cli.main({argv!r})
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signum, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["draft", "target"]


def test_an_unfaithful_copy_is_not_kept(tmp_path: Path, target: Path, monkeypatch):
    draft = write_draft(tmp_path / "draft", config_changes=SHUFFLED)
    monkeypatch.setattr(resave, "_source", lambda boundary: f"layer{boundary}")
    with pytest.raises(UnsupportedError, match="boundaries"):
        run("export", draft, "--for", "stock", "--target", target, "--out", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["draft", "target"]
