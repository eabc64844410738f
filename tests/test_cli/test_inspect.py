"""``sglang-eagle3 inspect`` from the outside: keys, exit codes, what is printed where."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from checkpoints import DELETE, write_draft, write_target
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import cli

# From the published interface, not from the code.
KEYS = [
    "format",
    "architecture",
    "sources",
    "boundaries",
    "order",
    "sources_from",
    "num_sources",
    "target_hidden_size",
    "hidden_size",
    "fc_in",
    "norms",
    "attention",
    "rope",
    "vocab",
    "embed",
    "lm_head",
    "origins",
    "findings",
    "unconsumed_tensors",
    "missing_tensors",
    "stock",
]
NESTED = {
    "norms": {"fc_norm", "norm_before_fc", "residual", "recurrent_state", "final_norm"},
    "attention": {
        "kind",
        "num_layers",
        "heads",
        "kv_heads",
        "head_dim",
        "qk_norm",
        "qkv_bias",
        "sliding_window",
        "latent",
    },
    "rope": {"theta", "scaling", "interleaved"},
    "vocab": {"target", "draft", "map"},
    "stock": {"starts", "serves_same", "boundaries", "ids", "differences"},
}
SOURCES = {"eagle3_ext": {"sources": ["layer5", "embed", "last"]}}
AS_STOCK = {"eagle3_ext": {"sources": ["layer1", "layer3", "layer4"]}}
PLAIN = {"architectures": ["LlamaForCausalLM"]}


def run(capsys, *argv):
    code = cli.main(["inspect", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys, *argv):
    code, out, err = run(capsys, *argv, "--json")
    assert err == ""
    return code, json.loads(out)


def test_json_has_exactly_the_published_keys(tmp_path, capsys):
    code, result = as_json(capsys, write_draft(tmp_path))
    assert code == 0
    assert list(result) == KEYS
    assert {key: set(result[key]) for key in NESTED} == NESTED


def test_json_values(tmp_path, capsys):
    draft = write_draft(tmp_path / "draft", config_changes=SOURCES)
    code, result = as_json(capsys, draft, "--target", write_target(tmp_path / "target"))
    assert code == 0
    assert result["sources"] == ["layer5", "embed", "last"]
    assert result["boundaries"] == [6, 0, 8]
    assert (result["order"], result["sources_from"], result["num_sources"]) == ("as_listed", "eagle3_ext", 3)
    assert (result["target_hidden_size"], result["hidden_size"], result["fc_in"]) == (32, 32, 96)
    assert result["vocab"] == {"target": 96, "draft": 37, "map": "offset"}
    assert result["rope"] == {"theta": 10000.0, "scaling": None, "interleaved": False}
    assert result["norms"] == {
        "fc_norm": False,
        "norm_before_fc": False,
        "residual": "pre_norm",
        "recurrent_state": "pre_norm",
        "final_norm": True,
    }
    assert (result["attention"]["kind"], result["attention"]["latent"]) == ("gqa", None)
    assert result["origins"]["sources"] == "eagle3_ext"
    assert result["origins"]["boundaries"] == "eagle3_ext"
    assert (result["findings"], result["unconsumed_tensors"], result["missing_tensors"]) == ([], [], [])


def test_everything_stands_in_fc_column_order(tmp_path, capsys):
    ids = {"eagle_config.eagle_aux_hidden_state_layer_ids": [6, -1, 3]}
    target = write_target(tmp_path / "target")
    _, result = as_json(capsys, write_draft(tmp_path / "a", config_changes=ids), "--target", target)
    assert (result["sources"], result["boundaries"]) == (["embed", "layer3", "layer6"], [0, 4, 7])
    ascending = {"eagle3_ext": {"sources": ["last", "layer3", "embed"], "order": "ascending"}}
    draft = write_draft(tmp_path / "b", config_changes=ascending)
    for more in ((), ("--target", target)):
        _, result = as_json(capsys, draft, *more)
        assert result["sources"] == ["embed", "layer3", "last"]


@pytest.mark.parametrize(
    ("config", "dialect", "sources"),
    [
        ({}, "specforge", None),
        ({"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "specforge", ["id 1", "id 3", "id 5"]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, "speculators", ["embed", "layer2", "layer4"]),
        (SOURCES, "specforge", ["layer5", "embed", "last"]),
    ],
)
def test_without_a_target_what_hangs_on_it_is_null(tmp_path, capsys, config, dialect, sources):
    code, result = as_json(capsys, write_draft(tmp_path, dialect, config_changes=config))
    assert code == 0
    assert result["boundaries"] is None
    assert result["sources"] == sources


def test_the_state_after_the_final_norm_is_a_word(tmp_path, capsys):
    draft = write_draft(tmp_path / "d", config_changes={"eagle3_ext": {"sources": ["embed", "layer3", "final_norm"]}})
    _, result = as_json(capsys, draft, "--target", write_target(tmp_path / "t"))
    assert result["boundaries"] == [0, 4, "final_norm"]


def test_a_draft_that_cannot_be_read_has_the_same_keys(tmp_path, capsys):
    code, result = as_json(capsys, tmp_path / "nothing")
    assert code == 1
    assert list(result) == KEYS
    assert [f["code"] for f in result["findings"]] == ["no_checkpoint"]
    assert set(result["findings"][0]) == {"severity", "code", "message"}
    assert all(result[key] is None for key in KEYS if key != "findings")


def test_a_target_that_cannot_be_read_leaves_the_draft_readable(tmp_path, capsys):
    code, result = as_json(capsys, write_draft(tmp_path / "d"), "--target", tmp_path / "nothing")
    assert code == 1
    assert result["fc_in"] == 96
    assert result["boundaries"] is None
    assert [f["code"] for f in result["findings"]] == ["no_checkpoint"]


def test_errors_make_exit_code_1_and_name_the_tensors(tmp_path, capsys):
    draft = write_draft(tmp_path, tensor_changes={"norm.weight": None, "mask_hidden": torch.ones(3)})
    code, result = as_json(capsys, draft)
    assert code == 1
    assert result["unconsumed_tensors"] == ["mask_hidden"]
    assert result["missing_tensors"] == ["norm.weight"]


def test_warnings_do_not(tmp_path, capsys):
    draft = write_draft(tmp_path / "d", config_changes={"num_hidden_layers": 3})
    code, result = as_json(capsys, draft, "--target", write_target(tmp_path / "t"))
    assert code == 0
    assert [f["severity"] for f in result["findings"]] == ["warning", "warning"]


def test_strict_needs_no_target(tmp_path, capsys):
    draft = write_draft(tmp_path, config_changes={"norm_output": True})
    assert as_json(capsys, draft)[0] == 0
    assert as_json(capsys, draft, "--override", '{"strict": true}')[0] == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_override(tmp_path, capsys, wrapped):
    override = {"sources": ["embed", "layer3", "layer5"]}
    text = json.dumps({"eagle3_ext": override} if wrapped else override)
    _, result = as_json(capsys, write_draft(tmp_path, config_changes=SOURCES), "--override", text)
    assert (result["sources"], result["sources_from"]) == (override["sources"], "override")


@pytest.mark.parametrize("text", ["[", "[1]", "3"])
def test_override_that_is_no_object(tmp_path, capsys, text):
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(tmp_path), "--override", text])
    assert "argument --override: " in capsys.readouterr().err


def test_errors_of_reading_go_to_stderr(tmp_path, capsys):
    code, out, err = run(capsys, tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert err.startswith("sglang-eagle3: ")
    assert "no such folder" in err


def test_text_says_what_from_where(tmp_path, capsys):
    draft = write_draft(tmp_path / "d", config_changes=SOURCES)
    code, out, _ = run(capsys, draft, "--target", write_target(tmp_path / "t"))
    lines = {line.split("  ")[1]: line.split() for line in out.splitlines() if line.startswith("  ")}
    assert code == 0
    assert lines["fc <-"][-1] == "eagle3_ext"
    assert "layer 5 output | embedding | layer 7 output (last)" in out
    assert lines["boundaries"][1:] == ["6,", "0,", "8"]
    assert lines["SGLang ids"][2:] == ["not", "expressible"]
    assert lines["vLLM ids"][2:5] == ["6,", "0,", "8"]
    assert "(to be listed as 0, 6, 8, and it concatenates in ascending order, whatever its list says)" in out
    assert lines["hidden_states"][1:] == ["6,", "0,", "none"]
    assert lines["rope theta"][2:] == ["10000", "config"]
    assert "stock SGLang would serve another draft:\n  stock feeds fc with [layer 1 output | " in out
    assert out.rstrip().endswith("can be served")


def test_text_of_a_draft_that_cannot_be_served(tmp_path, capsys):
    code, out, _ = run(capsys, write_draft(tmp_path, tensor_changes={"norm.weight": None, "x": torch.ones(1)}))
    assert code == 1
    assert "error    unconsumed_tensor\n" in out
    assert out.rstrip().endswith("cannot be served: 2 errors")


def test_text_without_a_target(tmp_path, capsys):
    draft = write_draft(tmp_path / "a draft")
    code, out, _ = run(capsys, draft)
    assert code == 0
    assert "unknown without --target" in out
    assert "warning  no_sources_declared\n" in out
    assert f"sglang-eagle3 probe '{draft}' --target TARGET" in out
    assert "no_sources_declared" not in run(capsys, write_draft(tmp_path / "told", config_changes=SOURCES))[1]
    assert run(capsys, draft, "--override", '{"strict": true}')[0] == 1


def test_ids_that_an_engine_wants_in_another_order_are_said(tmp_path, capsys):
    # Without 1 in the first place this class takes ids for boundaries.
    target = write_target(tmp_path / "t", config_changes={"architectures": ["DeepseekV3ForCausalLM"]})
    for sources, ids in (
        (["embed", "layer0", "layer4"], "0, 1, 5"),
        (["layer0", "layer2", "layer4"], "1, 3, 5 (to be listed as 3, 5, 1)"),
    ):
        draft = write_draft(tmp_path / "d", config_changes={"eagle3_ext": {"sources": sources}})
        lines = [line.split("  ", 2) for line in run(capsys, draft, "--target", target)[1].splitlines()]
        assert [line[2].strip() for line in lines if line[1:2] == ["SGLang ids"]] == [ids]


@pytest.mark.parametrize(
    ("changes", "architecture", "starts", "same", "boundaries", "ids", "words"),
    [
        (SOURCES, "LlamaForCausalLM", True, False, [2, 4, 5], None, "stock feeds fc with"),
        (AS_STOCK, "LlamaForCausalLM", True, True, [2, 4, 5], [1, 3, 4], None),
        ({"draft_vocab_size": DELETE}, "LlamaForCausalLM", False, False, [2, 4, 5], [1, 3, 4], "stock stops without"),
        ({}, "OtherForCausalLM", False, False, None, None, "stock refuses to start, since it has no EAGLE-3 capture"),
        ({"max_position_embeddings": 64}, "LlamaForCausalLM", False, False, [2, 4, 5], [1, 3, 4], "stock stops, since"),
        (PLAIN, "LlamaForCausalLM", False, False, None, [1, 3, 4], "plain language model"),
    ],
)  # fmt: skip
def test_what_stock_makes_of_it(tmp_path, capsys, changes, architecture, starts, same, boundaries, ids, words):
    draft = write_draft(tmp_path / "d", config_changes=changes)
    target = write_target(tmp_path / "t", config_changes={"architectures": [architecture]})
    _, result = as_json(capsys, draft, "--target", target)
    stock = result["stock"]
    assert (stock["starts"], stock["serves_same"]) == (starts, same)
    assert (stock["boundaries"], stock["ids"]) == (boundaries, ids)
    assert words is None or any(words in sentence for sentence in stock["differences"])
    _, alone = as_json(capsys, draft)
    assert alone["stock"]["serves_same"] is alone["stock"]["boundaries"] is alone["stock"]["ids"] is None
    assert alone["stock"]["starts"] is (False if words == "plain language model" else None)
    _, text, _ = run(capsys, draft, "--target", target)
    assert ("stock SGLang cannot serve this draft:" in text) is not starts


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_draft_and_target_in_each_other_s_place(tmp_path, capsys, more):
    draft, target = write_draft(tmp_path / "d"), write_target(tmp_path / "t")
    code, out, err = run(capsys, target, "--target", draft, *more)
    assert code == 1
    said = out if more else err
    if more:
        assert [f["code"] for f in json.loads(out)["findings"]] == ["dialect_unknown", "target_is_draft"]
    assert f"{target}/config.json: describes a whole language model, got LlamaForCausalLM of 8 layers" in said
    assert f"{draft}/config.json: is an EAGLE-3 draft, got it as the target" in said
    assert said.count("swap them") == 2


def test_a_whole_model_on_the_hub_is_not_fetched_as_a_draft(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    target = write_target(tmp_path / "t")
    (target / "model.safetensors").unlink()
    asked = []

    def snapshot_download(repo, *, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert run(capsys, "some/target")[0] == 1
    assert asked == [["*.json"]]


def test_an_override_is_named_as_it_was_given(tmp_path, capsys):
    code, _, err = run(capsys, write_draft(tmp_path), "--override", '{"order": "random", "sorces": []}')
    assert code == 1
    assert '--override.order: got "random"; expected one of as_listed, ascending.' in err
    assert "--override.sorces: unknown key" in err
    assert "--json-model-override-args" not in err


def test_everything_that_is_wrong_stands_in_one_report(tmp_path, capsys):
    draft = write_draft(
        tmp_path / "d",
        config_changes={"hidden_size": "32", "rms_norm_eps": [], "eagle3_ext": {"order": 1, "strict": "no"}},
        tensor_changes={"mask_hidden": torch.ones(3), "lm_head.weight": torch.ones(36, 32)},
    )
    code, result = as_json(capsys, draft, "--target", tmp_path / "nothing")
    assert code == 1
    codes = sorted(f["code"] for f in result["findings"])
    assert codes == [
        "config_type", "config_type", "eagle3_ext", "eagle3_ext", "no_checkpoint", "tensor_shape", "unconsumed_tensor",
    ]  # fmt: skip


def test_trace(tmp_path, capsys):
    draft = write_draft(
        tmp_path / "d",
        layers=2,
        config_changes=SOURCES
        | {"fc_norm": True, "norm_before_residual": True, "eagle3_ext.recurrent_state": "post_norm"},
        tensor_changes={f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)},
    )
    _, out, _ = run(capsys, draft, "--target", write_target(tmp_path / "t"), "--trace")
    trace = out[out.index("feature pass") :].splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in trace[1:-1]]
    shapes = {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}
    assert shapes["layer 5 output -> fc_norm"] == ("[T, M]", "[T, 32]")
    assert shapes["concatenate"] == ("[T, L*M]", "[T, 96]")
    assert shapes["layer 0: state -> hidden_norm (residual: after it)"] == ("[T, E]", "[T, 32]")
    assert shapes["layer 0: concatenate"] == ("[T, 2*E]", "[T, 64]")
    assert shapes["layer 0: q_proj -> rope"] == ("[T, HQ*D]", "[T, 48]")
    assert shapes["layer 0: k_proj -> rope, v_proj"] == ("[T, HKV*D]", "[T, 24]")
    assert shapes["layer 1: input_layernorm"] == ("[T, E]", "[T, 32]")
    assert shapes["layer 1: post_attention_layernorm -> gate, up"] == ("[T, I]", "[T, 40]")
    assert shapes["head (own)"] == ("[T, V]", "[T, 37]")
    assert "target id = draft id + d2t[draft id]" in out
    assert trace[-1] == "recurrent pass: the same from the state after the final norm; fc does not run"


def test_an_mla_draft(tmp_path, capsys):
    draft = write_draft(tmp_path / "d", "deepseek")
    target = write_target(tmp_path / "t")
    code, result = as_json(capsys, draft, "--target", target)
    assert code == 0
    assert (result["format"], result["attention"]["kind"]) == ("deepseek", "mla")
    assert (result["attention"]["kv_heads"], result["attention"]["head_dim"]) == (4, 12)
    assert result["attention"]["latent"] == {
        "q_lora_rank": 14,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    assert result["rope"]["interleaved"] is True
    assert result["origins"]["kv_lora_rank"] == "config"
    _, out, _ = run(capsys, draft, "--target", target, "--trace")
    lines = {line[2:].split("  ")[0]: line.split()[-2:] for line in out.splitlines() if line.startswith("  ")}
    assert "4 of 8 + 4 rotated, values of 6" in out
    assert (lines["query latent"], lines["key/value latent"]) == (["14", "config"], ["16", "config"])
    assert lines["rotated together"] == ["neighbours", "default"]
    trace = [re.split(r"\s{2,}", line.strip()) for line in out[out.index("feature pass") :].splitlines()]
    steps = {row[0]: row[-1] for row in trace}
    assert steps["q_a_proj -> q_a_layernorm"] == "[T, 14]"
    assert steps["q_b_proj -> rope on R of D"] == "[T, 48]"
    assert steps["kv_a_proj_with_mqa: latent -> kv_a_layernorm"] == "[T, 16]"
    assert steps["kv_a_proj_with_mqa: key of all heads -> rope"] == "[T, 4]"
    assert (steps["kv_b_proj: keys"], steps["kv_b_proj: values"]) == ("[T, 32]", "[T, 24]")
    assert (steps["attention"], steps["o_proj + residual"]) == ("[T, 24]", "[T, 32]")


def test_trace_and_json_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(tmp_path), "--json", "--trace"])


# --weights


def test_weights_finds_what_is_no_number(tmp_path, capsys):
    draft = write_draft(tmp_path)
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"][3, 5] = float("nan")
    tensors["norm.weight"][:2] = float("inf")
    save_file(tensors, draft / "model.safetensors")
    assert as_json(capsys, draft)[0] == 0
    code, result = as_json(capsys, draft, "--weights")
    assert code == 1
    odd = [f["message"] for f in result["findings"] if f["code"] == "not_finite"]
    messages = {message.split("model.safetensors:")[1].split(" values")[0] for message in odd}
    assert messages == {"fc.weight: got 1", "norm.weight: got 2"}
    assert {f["code"] for f in result["findings"]} == {"not_finite", "no_sources_declared"}


def test_weights_of_another_rank_are_an_error_and_no_crash(tmp_path, capsys):
    draft = write_draft(tmp_path, tensor_changes={"lm_head.weight": torch.ones(37)})
    code, result = as_json(capsys, draft, "--weights")
    assert code == 1
    assert "tensor_shape" in {f["code"] for f in result["findings"]}


@pytest.mark.parametrize("changed", [0, 3])
def test_weights_compares_the_embeddings(tmp_path, capsys, changed):
    target = write_target(tmp_path / "t")
    own = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    own[:changed] += 1
    draft = write_draft(tmp_path / "d", "speculators", tensor_changes={"embed_tokens.weight": own})
    _, result = as_json(capsys, draft, "--weights", "--target", target)
    found = {f["code"]: f["message"] for f in result["findings"]}
    if changed:
        assert "differs from the target's embedding in 3 of 96 rows" in found["embedding_is_own"]
    else:
        assert "is equal to the target's embedding" in found["embedding_is_copy"]


def test_broken_weights_of_the_target_are_a_finding_like_any_other(tmp_path, capsys):
    target = write_target(tmp_path / "t")
    (target / "model.safetensors").write_bytes(b"")
    embed = torch.full((96, 32), float("nan"))
    draft = write_draft(tmp_path / "d", "speculators", tensor_changes={"embed_tokens.weight": embed})
    code, result = as_json(capsys, draft, "--weights", "--target", target)
    assert code == 1
    errors = [f["code"] for f in result["findings"] if f["severity"] == "error"]
    assert sorted(errors) == ["not_finite", "weights_unreadable"]


def test_a_boundary_below_the_first_is_an_error_and_no_boundary(tmp_path, capsys):
    changes = {
        "eagle_config.eagle_aux_hidden_state_layer_ids": [-1, 3, 5],
        "eagle3_ext": {"layer_ids": "boundary"},
    }
    draft, target = write_draft(tmp_path / "d", config_changes=changes), write_target(tmp_path / "t")
    code, result = as_json(capsys, draft, "--target", target)
    assert (code, result["boundaries"]) == (1, None)


def test_a_broken_target_hides_nothing_of_the_draft(tmp_path, capsys):
    draft = write_draft(tmp_path / "d", config_changes={"hidden_act": "gelu"})
    code, _, err = run(capsys, draft, "--target", tmp_path / "nowhere")
    assert code == 1
    assert "hidden_act: got" in err
    assert "nowhere: no such folder" in err


def test_weights_says_when_it_cannot_compare(tmp_path, capsys):
    target = write_target(tmp_path / "t", hidden=16)
    draft = write_draft(tmp_path / "d", "speculators")
    _, result = as_json(capsys, draft, "--weights", "--target", target)
    assert "embedding_not_compared" in [f["code"] for f in result["findings"]]


@pytest.mark.parametrize("left", ["nothing", "index"])
def test_a_target_on_the_hub_is_read_at_its_revision_and_its_weights_are_not_fetched(
    tmp_path, capsys, monkeypatch, left
):
    import huggingface_hub

    target = write_target(tmp_path / "t")
    (target / "model.safetensors").unlink()
    if left == "index":
        index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    asked = []

    def snapshot_download(repo, *, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    draft = write_draft(tmp_path / "d", "speculators")
    code, result = as_json(
        capsys, draft, "--weights", "--target", "some/target", "--target-revision", "v7", "--revision", "v1"
    )
    assert code == 0
    assert set(map(str, asked)) == {str(("some/target", "v7", ["*.json"]))}
    found = {f["code"]: f for f in result["findings"]}
    assert found["embedding_not_compared"]["severity"] == "info"
    assert "got no weights of some/target on this machine" in found["embedding_not_compared"]["message"]


# The process


def start(*argv, **keywords):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "sglang_eagle3_ext.cli", *map(str, argv)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, **keywords)


def test_a_reader_that_leaves_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    process = start("inspect", write_draft(tmp_path), stdout=write)
    os.close(write)
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_disk_behind_stdout_is_said(tmp_path):
    command = [sys.executable, "-m", "sglang_eagle3_ext.cli", "inspect", write_draft(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("sglang-eagle3: a file or the output: got No space left on device; expected a place ")
    assert done.stderr.count("\n") == 1


def test_a_closed_stdout_is_no_traceback(tmp_path):
    words = [sys.executable, "-m", "sglang_eagle3_ext.cli", "inspect", str(write_draft(tmp_path))]
    done = subprocess.run(["sh", "-c", f"{shlex.join(words)} >&-"], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_whose_name_is_no_text(tmp_path):
    try:
        draft = write_draft(tmp_path / "draft").rename(tmp_path / os.fsdecode(b"draft\xff"))
    except OSError:
        pytest.skip("this file system takes text only")
    command = [sys.executable, "-m", "sglang_eagle3_ext.cli", "inspect", draft]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(os.fsencode(draft))


def test_interruption(monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.formats, "read_draft", interrupt)
    assert cli.main(["inspect", str(tmp_path)]) == 130


def test_doctor_is_only_imported_when_called(monkeypatch):
    import types

    called = []
    doctor = types.SimpleNamespace(run=lambda as_json: called.append(as_json) or 1)
    monkeypatch.setitem(sys.modules, "sglang_eagle3_ext.host.doctor", doctor)
    monkeypatch.setattr("sglang_eagle3_ext.host.doctor", doctor, raising=False)
    assert cli.main(["doctor", "--json"]) == 1
    assert called == [True]


def test_version(capsys):
    from sglang_eagle3_ext import __version__

    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_last_is_the_depth_of_the_target(tmp_path, capsys):
    target = write_target(tmp_path / "t", num_layers=12)
    _, result = as_json(capsys, write_draft(tmp_path / "d", config_changes=SOURCES), "--target", target)
    assert result["boundaries"][-1] == 12


def test_a_look_at_headers_does_not_wait_for_torch(tmp_path):
    draft, target = write_draft(tmp_path / "d"), write_target(tmp_path / "t")
    code = (
        "import sys; from sglang_eagle3_ext import cli; "
        f"cli.main(['inspect', {str(draft)!r}, '--target', {str(target)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
