"""``sglang-eagle3 serve`` from the outside: what it prints and becomes, against commands written by hand."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise

import pytest
from checkpoints import DELETE, write_draft, write_target

from sglang_eagle3_ext.host import serve

GPU = serve.Machine(has_accelerator=True, is_sm100=False)
BLACKWELL = serve.Machine(has_accelerator=True, is_sm100=True)
LAPTOP = serve.Machine(has_accelerator=False, is_sm100=False)

SOURCES = {"eagle3_ext": {"sources": ["embed", "layer3", "last"]}}
SPECULATION = {
    "--speculative-num-steps": "3",
    "--speculative-eagle-topk": "1",
    "--speculative-num-draft-tokens": "4",
}
MLA = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 8}
DSA = {"architectures": ["DeepseekV32ForCausalLM"], "kv_lora_rank": 8, "index_topk": 16}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Put a GPU into this machine and nothing into its environment; returns the way to change that."""
    for name in ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE", "EAGLE3_EXT"):
        monkeypatch.delenv(name, raising=False)

    def become(kind):
        monkeypatch.setattr(serve, "find_machine", lambda: kind)

    become(GPU)
    return become


@pytest.fixture
def started(monkeypatch):
    """Collect what would have been started."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def pair(tmp_path):
    return write_draft(tmp_path / "draft", config_changes=SOURCES), write_target(tmp_path / "target")


def run(*argv):
    parser = argparse.ArgumentParser(prog="sglang-eagle3")
    serve.add_command(parser.add_subparsers(required=True))
    args = parser.parse_args(["serve", *map(str, argv)])
    return args.command(args)


def printed(capsys, *argv):
    """Run with ``--print``; return (variables, words behind the module's name), as a shell would read them."""
    assert run(*argv) == 0
    out = capsys.readouterr().out
    words = shlex.split(out.replace(" \\\n", " "))
    start = words.index("sglang.launch_server") + 1
    assert words[start - 3 : start - 1] == [sys.executable, "-m"]
    return dict(word.split("=", 1) for word in words[: start - 3]), words[start:]


def values(words):
    """Read ``--flag value`` pairs as SGLang does: the last one counts."""
    return {flag: value for flag, value in pairwise(words) if flag.startswith("--")}


def refused(capsys, started, *argv):
    """Run; return what was said on stderr when nothing was started."""
    assert run(*argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert started == []
    return err


# ---- the command --------------------------------------------------------------------------------------------


def test_the_whole_command(pair, capsys):
    draft, target = pair
    variables, words = printed(capsys, draft, target, "--tp", "2", "--port", "30000", "--print")
    assert variables == {}
    assert words == [
        *("--model-path", str(target)),
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--tp", "2", "--port", "30000"),
    ]


def test_print_writes_the_command_alone_to_stdout_one_flag_a_line(pair, capsys, started):
    draft, target = pair
    assert run(draft, target, "--print", "--trust-remote-code") == 0
    out, err = capsys.readouterr()
    assert started == []
    lines = [line.removesuffix(" \\").strip() for line in out.splitlines()]
    assert lines[0] == f"{sys.executable} -m sglang.launch_server"
    assert lines[1] == f"--model-path {target}"
    assert lines[-1] == "--trust-remote-code"
    assert all(line.startswith("--") for line in lines[1:])
    # Every added flag has its reason; nothing is said of the user's.
    for line in lines[1:-1]:
        assert f"  {line} " in err
    assert "--trust-remote-code" not in err
    assert "embedding | layer 3 output | layer 7 output (last)" in err


def test_a_shell_reads_the_printed_command_as_it_was_meant(tmp_path, capsys, machine):
    machine(LAPTOP)
    draft = write_draft(tmp_path / "a draft's", config_changes=SOURCES)
    target = write_target(tmp_path / "$HOME target")
    override = '{"eagle3_ext": {"strict": false}}'
    assert run(draft, target, "--print", "--json-model-override-args", override, "--served-model-name", "a b") == 0
    script = f'launch() {{ printf \'%s\\n\' "$SGLANG_PLATFORM" "$@"; }}\n{capsys.readouterr().out}'
    script = script.replace(f"{shlex.quote(sys.executable)} -m", "launch -m")
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[0] == "eagle3_ext"
    flags = values(words)
    assert flags["--speculative-draft-model-path"] == str(draft)
    assert flags["--model-path"] == str(target)
    assert words[-4:] == ["--json-model-override-args", override, "--served-model-name", "a b"]


def test_the_server_replaces_the_process(pair, capsys, started, machine, monkeypatch):
    machine(LAPTOP)
    monkeypatch.setenv("KEPT", "yes")
    draft, target = pair
    assert run(draft, target, "--port", "1") == 0
    ((file, argv, environment),) = started
    out = capsys.readouterr().out
    assert shlex.split(out.replace(" \\\n", " ")) == ["SGLANG_PLATFORM=eagle3_ext", *argv]
    assert file == argv[0] == sys.executable
    assert argv[-2:] == ["--port", "1"]
    assert environment["SGLANG_PLATFORM"] == "eagle3_ext"
    assert environment["KEPT"] == "yes"


# ---- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "before_target", "before_flags", "last"])
def test_print_is_recognised_wherever_it_stands(pair, capsys, started, place):
    words = [*map(str, pair), "--port", "1"]
    words.insert({"first": 0, "before_target": 1, "before_flags": 2, "last": 4}[place], "--print")
    _, got = printed(capsys, *words)
    assert started == []
    assert got[-2:] == ["--port", "1"]
    assert "--print" not in got


def test_behind_two_dashes_nothing_is_ours(pair, capsys, started):
    behind = ["--print", "--draft-revision", "x"]
    assert run(*pair, "--port", "1", "--", *behind) == 0
    ((_, argv, _),) = started
    assert argv[-5:] == ["--port", "1", *behind]
    assert "--" not in argv


def test_flags_behind_two_dashes_still_win(pair, capsys):
    _, words = printed(capsys, *pair, "--print", "--", "--speculative-num-steps", "5")
    assert words.count("--speculative-num-steps") == 1
    assert values(words)["--speculative-num-draft-tokens"] == "6"


def test_unknown_flags_keep_order_and_spelling(pair, capsys):
    theirs = ["--future-flag=a=b", "-1", "--list", "x", "y z", "--list", "", "--prin", "{'q': \"d\"}"]
    _, words = printed(capsys, *pair, "--print", *theirs)
    assert words[-len(theirs) :] == theirs


def test_help_is_ours(pair, capsys, started):
    assert run(*pair, "--help") == 0
    assert "serve DRAFT [TARGET] [SGLang flags] [--print]" in capsys.readouterr().out
    assert started == []


@pytest.mark.parametrize("words", [[], ["--print"], ["--", "draft"]])
def test_a_draft_is_needed(capsys, words):
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    assert exit_.value.code == 2
    assert "DRAFT is missing" in capsys.readouterr().err


# ---- which target, which revision ---------------------------------------------------------------------------


def test_the_target_that_the_draft_records(tmp_path, capsys):
    target = write_target(tmp_path / "target")
    draft = write_draft(
        tmp_path / "draft",
        "speculators",
        config_changes={**SOURCES, "speculators_config.verifier.name_or_path": str(target)},
    )
    _, words = printed(capsys, draft, "--print", "--port", "1")
    assert values(words)["--model-path"] == str(target)


def test_the_argument_wins_over_the_record(tmp_path, capsys):
    draft = write_draft(tmp_path / "draft", "speculators", config_changes=SOURCES)
    target = write_target(tmp_path / "target")
    _, words = printed(capsys, draft, target, "--print")
    assert values(words)["--model-path"] == str(target)


@pytest.mark.parametrize("flag", ["--model-path", "--model"])
def test_sglangs_own_flag_names_the_target_too(pair, capsys, flag):
    draft, target = pair
    _, words = printed(capsys, draft, "--print", f"{flag}={target}")
    assert words[-1] == f"{flag}={target}"
    assert "--model-path" not in words


def test_no_target_and_no_record(pair, capsys, started):
    err = refused(capsys, started, pair[0])
    assert err.startswith("sglang-eagle3: TARGET: got none")
    assert "records none" in err


def test_a_record_that_is_not_here_is_named(tmp_path, capsys, started):
    record = str(tmp_path / "on the trainer's disk")
    draft = write_draft(
        tmp_path / "draft",
        "speculators",
        config_changes={**SOURCES, "speculators_config.verifier.name_or_path": record},
    )
    err = refused(capsys, started, draft)
    assert f"TARGET: got none, and {record}, which {draft}/config.json records" in err
    assert "serve DRAFT TARGET" in err


def test_a_record_of_the_class_alone(tmp_path, capsys, started):
    changes = {**SOURCES, "speculators_config.verifier.name_or_path": DELETE}
    draft = write_draft(tmp_path / "draft", "speculators", config_changes=changes)
    assert "records only its class, LlamaForCausalLM," in refused(capsys, started, draft)


def test_revisions_reach_the_reader_and_the_server(pair, capsys, monkeypatch):
    seen = {}
    read_draft, read_target = serve.formats.read_draft, serve.formats.read_target

    def spy_draft(path, *, override=None, revision=None):
        seen["draft"] = revision
        return read_draft(path, override=override, revision=revision)

    def spy_target(path, *, revision=None):
        seen["target"] = revision
        return read_target(path, revision=revision)

    monkeypatch.setattr(serve.formats, "read_draft", spy_draft)
    monkeypatch.setattr(serve.formats, "read_target", spy_target)
    _, ours = printed(capsys, *pair, "--draft-revision", "d1", "--target-revision", "t1", "--print")
    assert (values(ours)["--speculative-draft-model-revision"], values(ours)["--revision"]) == ("d1", "t1")
    assert "--draft-revision" not in ours
    assert seen == {"draft": "d1", "target": "t1"}
    theirs = ["--revision", "t2", "--speculative-draft-model-revision", "d2"]
    _, words = printed(capsys, *pair, "--print", *theirs)
    assert words[-4:] == theirs
    assert words.count("--revision") == words.count("--speculative-draft-model-revision") == 1
    assert seen == {"draft": "d2", "target": "t2"}


# ---- speculation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "steps", "topk", "tokens"),
    [
        ({}, 3, 1, 4),
        ({"num-steps": 5}, 5, 1, 6),
        ({"num-draft-tokens": 3}, 2, 1, 3),
        ({"eagle-topk": 1}, 3, 1, 4),
        ({"num-steps": 2, "eagle-topk": 1}, 2, 1, 3),
        ({"eagle-topk": 1, "num-draft-tokens": 7}, 6, 1, 7),
        ({"num-steps": 2, "num-draft-tokens": 3}, 2, 1, 3),
        ({"eagle-topk": 4}, 3, 4, 8),
        ({"num-steps": 1, "eagle-topk": 2}, 1, 2, 3),  # a root and its two children
        ({"num-steps": 9, "eagle-topk": 2}, 9, 2, 10),  # at least as many as the tree is deep
        ({"eagle-topk": 2, "num-draft-tokens": 15}, 4, 2, 15),
        ({"eagle-topk": 2, "num-draft-tokens": 10**15}, 250_000_000_000_001, 2, 10**15),  # and at once
        ({"eagle-topk": 2, "num-draft-tokens": 16}, 5, 2, 16),  # 1 + 2 + 3 * 4 = 15 nodes after four steps
        ({"num-steps": 5, "eagle-topk": 4, "num-draft-tokens": 8}, 5, 4, 8),
        ({"num-steps": 3, "num-draft-tokens": 9}, 3, 1, 9),  # the user's; SGLang itself corrects it
    ],
)
def test_speculation_is_completed(pair, capsys, given, steps, topk, tokens):
    theirs = [word for name, value in given.items() for word in (f"--speculative-{name}", str(value))]
    _, words = printed(capsys, *pair, "--print", *theirs)
    got = values(words)
    assert got["--speculative-num-steps"] == str(steps)
    assert got["--speculative-eagle-topk"] == str(topk)
    assert got["--speculative-num-draft-tokens"] == str(tokens)
    assert all(words.count(name) == 1 for name in SPECULATION)
    assert words[len(words) - len(theirs) :] == theirs


def test_adaptive_speculation_is_left_to_sglang(pair, capsys):
    _, words = printed(capsys, *pair, "--print", "--speculative-adaptive")
    assert not SPECULATION.keys() & set(words)


def test_the_users_config_file_wins(pair, capsys, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("speculative-num-steps: 5\nenable-metrics: true\nmodel-path: " + json.dumps(str(pair[1])))
    _, words = printed(capsys, pair[0], "--print", "--config", file)
    assert words[-2:] == ["--config", str(file)]
    got = values(words)
    assert not {"--model-path", "--speculative-num-steps"} & set(got)
    assert got["--speculative-num-draft-tokens"] == "6"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model-pa", "x"], "--model-pa: got an abbreviation of --model-path; expected that flag in full"),
        (["--model-pa=x"], "--model-pa: got an abbreviation of --model-path;"),
        (["--speculative-num-st", "5"], "--speculative-num-st: got an abbreviation of --speculative-num-steps;"),
        (["--", "--speculative-adapt"], "--speculative-adapt: got an abbreviation of --speculative-adaptive;"),
        (["--config", "FILE"], "--speculative-draft-model-pa: got an abbreviation of --speculative-draft-model-path;"),
        (["--config=FILE"], "--config: got --config="),
        (["--model-path=x"], "--model-path: got x, and TARGET is "),
        (["--model", "x"], "--model-path: got x, and TARGET is "),
        (["--speculative-draft-model=x"], "--speculative-draft-model-path: got x, and DRAFT is "),
        (["--speculative-draft-model-path", "x"], "--speculative-draft-model-path: got x, and DRAFT is "),
    ],
)
def test_no_spelling_of_a_flag_wins_in_silence(pair, capsys, started, tmp_path, words, message):
    file = tmp_path / "server.yaml"
    file.write_text("speculative-draft-model-pa: x\n" if words == ["--config", "FILE"] else "")
    err = refused(capsys, started, *pair, *(word.replace("FILE", str(file)) for word in words))
    assert err.startswith(f"sglang-eagle3: {message}")
    assert err.count("\n") == 1


def test_dates_in_the_config_file_are_sglangs_business(pair, capsys, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("json-model-override-args: {released: 2026-01-01}")
    printed(capsys, *pair, "--print", "--config", file)


# ---- quantisation and attention of the draft ----------------------------------------------------------------

QUANTISATION = "--speculative-draft-model-quantization"
ATTENTION = "--speculative-draft-attention-backend"


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ({}, [], None),
        ({}, ["--quantization", "fp8"], "unquant"),
        ({}, ["--quantization", "unquant"], None),
        ({"quantization_config": {"quant_method": "fp8"}}, [], "unquant"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, [], "unquant"),
        ({"quantization_config": {"quant_method": "fp8"}}, [QUANTISATION, "fp8"], "fp8"),
    ],
)
def test_a_targets_quantisation_stays_away_from_the_draft(tmp_path, capsys, config, flags, expected):
    draft = write_draft(tmp_path / "draft", config_changes=SOURCES)
    _, words = printed(capsys, draft, write_target(tmp_path / "target", config_changes=config), "--print", *flags)
    assert values(words).get(QUANTISATION) == expected
    assert words.count(QUANTISATION) == (expected is not None)


def test_a_quantisation_in_a_file_of_its_own(pair, capsys):
    draft, target = pair
    (target / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert run(draft, target, "--print") == 0
    out, err = capsys.readouterr()
    assert f"{QUANTISATION} unquant" in out
    assert "the target is quantised (hf_quant_config.json)" in err


@pytest.mark.parametrize(
    ("config", "kind", "flags", "expected"),
    [
        ({}, GPU, [], None),
        ({}, BLACKWELL, [], None),
        (MLA, GPU, [], None),
        (MLA, BLACKWELL, [], "triton"),
        (MLA, BLACKWELL, ["--attention-backend", "flashinfer"], None),
        (MLA, BLACKWELL, [ATTENTION, "flashinfer"], "flashinfer"),
        (MLA, GPU, ["--attention-backend", "flashmla"], "triton"),
        (MLA, GPU, ["--prefill-attention-backend", "fa3", "--decode-attention-backend", "flashmla"], "triton"),
        (DSA, GPU, [], "triton"),
        (DSA, LAPTOP, [], None),
    ],
)
def test_the_draft_gets_a_backend_where_the_targets_cannot_serve_it(
    tmp_path, capsys, machine, config, kind, flags, expected
):
    machine(kind)
    draft = write_draft(tmp_path / "draft", config_changes=SOURCES)
    _, words = printed(capsys, draft, write_target(tmp_path / "target", config_changes=config), "--print", *flags)
    assert values(words).get(ATTENTION) == expected


# ---- a machine without a GPU --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "flags", "environment", "variables", "device", "backend"),
    [
        (LAPTOP, [], {}, {"SGLANG_PLATFORM": "eagle3_ext"}, "cpu", "eagle3_cpu"),
        (LAPTOP, ["--device", "cpu"], {}, {"SGLANG_PLATFORM": "eagle3_ext"}, "cpu", "eagle3_cpu"),
        (LAPTOP, ["--attention-backend", "torch_native"], {}, {"SGLANG_PLATFORM": "eagle3_ext"}, "cpu", "torch_native"),
        (LAPTOP, ["--device", "npu"], {}, {}, "npu", None),
        (LAPTOP, [], {"SGLANG_USE_CPU_ENGINE": "1"}, {}, None, None),
        (GPU, [], {}, {}, None, None),
        (
            GPU,
            ["--device", "cpu"],
            {},
            {"SGLANG_PLATFORM": "eagle3_ext", "CUDA_VISIBLE_DEVICES": ""},
            "cpu",
            "eagle3_cpu",
        ),
        (
            GPU,
            [],
            {"SGLANG_PLATFORM": "eagle3_ext"},
            {"SGLANG_PLATFORM": "eagle3_ext", "CUDA_VISIBLE_DEVICES": ""},
            "cpu",
            "eagle3_cpu",
        ),
    ],
)
def test_the_cpu_platform(pair, capsys, machine, monkeypatch, kind, flags, environment, variables, device, backend):
    machine(kind)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    got, words = printed(capsys, *pair, "--print", *flags)
    assert got == variables
    assert values(words).get("--device") == device
    assert values(words).get("--attention-backend") == backend
    assert all(words.count(name) <= 1 for name in ("--device", "--attention-backend"))


# ---- what is refused ----------------------------------------------------------------------------------------


def test_every_problem_is_said_and_nothing_started(tmp_path, capsys, started):
    draft = write_draft(tmp_path / "draft", config_changes={"eagle3_ext": {"sources": ["embed", "layer3", "layer99"]}})
    target = write_target(tmp_path / "target", config_changes={"vocab_size": 80})
    err = refused(
        capsys, started, draft, target, "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "0",
        "--model-path", "other", "--speculative-draft-model-path", "another",
    )  # fmt: skip
    assert "--speculative-algorithm: got EAGLE" in err
    assert "--speculative-num-steps: got 0" in err
    assert "--model-path: got other" in err
    assert "--speculative-draft-model-path: got another" in err
    assert "layer99" in err
    assert "80" in err
    assert all(line.startswith(("sglang-eagle3: ", "warning  ")) for line in err.splitlines())


def test_print_refuses_too(pair, capsys, started):
    draft, target = pair
    assert "--speculative-eagle-topk: got 0" in refused(
        capsys, started, draft, target, "--print", "--speculative-eagle-topk", "0"
    )


def test_a_draft_and_a_target_that_are_not_there(tmp_path, capsys, started):
    err = refused(capsys, started, tmp_path / "no draft", tmp_path / "no target")
    assert "no draft" in err
    assert "no target" in err


def test_draft_and_target_in_each_other_s_place(pair, capsys, started):
    err = refused(capsys, started, *reversed(pair))
    assert "describes a whole language model, got LlamaForCausalLM of 8 layers as the draft" in err
    assert "is an EAGLE-3 draft, got it as the target" in err
    assert err.count("swap them") == 2


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"eagle3_ext": 3}', '{"eagle3_ext": {"sorces": []}}'])
def test_an_override_that_is_not_understood(pair, capsys, started, text):
    err = refused(capsys, started, *pair, "--json-model-override-args", text)
    assert err.startswith("sglang-eagle3: ")


def test_the_override_is_read_as_the_server_reads_it(pair, capsys):
    override = '{"eagle3_ext": {"sources": ["layer1", "layer2", "layer3"]}}'
    assert run(*pair, "--print", f"--json-model-override-args={override}") == 0
    assert "layer 1 output | layer 2 output | layer 3 output  (override)" in capsys.readouterr().err


def test_warnings_are_said_and_the_server_starts(tmp_path, capsys, started):
    draft, target = write_draft(tmp_path / "draft"), write_target(tmp_path / "target")
    assert run(draft, target) == 0
    assert "warning  no_sources_declared: " in capsys.readouterr().err
    assert len(started) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_PLUGINS", "other"), ("SGLANG_PLATFORM", "other"), ("EAGLE3_EXT_PROOF", "maybe")]
)
def test_an_environment_in_which_stock_would_serve(pair, capsys, started, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert name in refused(capsys, started, *pair)


def test_switched_off_is_said(pair, capsys, monkeypatch):
    monkeypatch.setenv("EAGLE3_EXT", "off")
    assert run(*pair, "--print") == 0
    assert "EAGLE3_EXT=off: stock reads the draft by its own rules. stock " in capsys.readouterr().err


def test_without_sglang(pair, capsys, started, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert "sglang: is not installed" in refused(capsys, started, *pair)
    assert run(*pair, "--print") == 0


@pytest.mark.host
def test_sglang_understands_every_added_flag(tmp_path, capsys):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    draft = write_draft(tmp_path / "draft", config_changes=SOURCES)
    quantised = {**DSA, "quantization_config": {"quant_method": "fp8"}}
    target = write_target(tmp_path / "target", config_changes=quantised)
    revisions = ["--draft-revision", "d", "--target-revision", "t"]
    _, words = printed(capsys, draft, target, *revisions, "--print", "--speculative-num-steps", "6")
    args = parser.parse_args(words)
    assert (args.model_path, args.revision) == (str(target), "t")
    assert (args.speculative_draft_model_path, args.speculative_draft_model_revision) == (str(draft), "d")
    assert (args.speculative_algorithm, args.speculative_eagle_topk) == ("EAGLE3", 1)
    assert args.speculative_draft_model_quantization == "unquant"
    assert args.speculative_draft_attention_backend == "triton"
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (6, 7)
