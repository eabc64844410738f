"""The comparison without its servers: settings, what each row serves, re-saved drafts, figures and tables."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import DELETE, write_draft, write_target
from safetensors.torch import load_file

from sglang_eagle3_ext import assembly, cli, formats, reference
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import bench, report, variants
from sglang_eagle3_ext.host.measure import Answer, Record
from sglang_eagle3_ext.spec import AssemblyPlan

DECLARED = ["embed", "layer3", "layer5"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def declared_draft(tmp_path: Path, sources: list[str] | None = DECLARED, **changes: Any) -> Path:
    config = {"eagle_config": DELETE, "eagle3_ext": {"sources": sources}} | changes.pop("config_changes", {})
    return write_draft(tmp_path / "draft", config_changes=config, num_sources=len(sources or ()), **changes)


def plan_of(draft: Path, target: Path) -> AssemblyPlan:
    plan = assembly.plan(formats.read_draft(draft), formats.read_target(target))
    assembly.check(plan)
    return plan


@pytest.fixture
def settings(tmp_path: Path, target: Path) -> bench.Settings:
    return bench.Settings(draft=str(tmp_path / "draft"), target=str(target), out=tmp_path / "out")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_has_accelerator", lambda: False)


# ---- re-saved drafts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["none", "per_source", "concatenation"])
def test_a_resaved_draft_is_the_same_draft(tmp_path: Path, target: Path, norms: str):
    width = 32
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "none": {},
        "per_source": {f"fc_norm.{i}.weight": torch.rand(width, generator=generator) for i in range(3)},
        "concatenation": {"input_norm.weight": torch.rand(3 * width, generator=generator)},
    }[norms]
    flag = {"none": {}, "per_source": {"fc_norm": True}, "concatenation": {"norm_before_fc": True}}[norms]
    draft = declared_draft(tmp_path, config_changes=flag, tensor_changes=tensors)
    plan = plan_of(draft, target)
    order = variants.other_order(plan)
    assert order == (2, 0, 1)
    copy = variants.resave(plan, tmp_path / "out" / "permuted", order)

    told = plan_of(copy, target)
    assert told.boundaries == (6, 0, 4)
    assert told.capture == plan.capture
    assert told.spec.norms == plan.spec.norms
    states = torch.randn(5, 3, width, generator=generator)
    one, other = reference.load(draft, target=target), reference.load(copy, target=target)
    torch.testing.assert_close(
        other.project(states[:, list(order)].flatten(1)), one.project(states.flatten(1)), rtol=0, atol=1e-5
    )
    before, after = load_file(draft / "model.safetensors"), load_file(copy / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"fc.weight", *tensors}


@pytest.mark.parametrize(
    ("sources", "order"),
    [
        (["embed", "layer3", "layer5"], (2, 0, 1)),
        (["layer3", "layer5", "embed"], (1, 2, 0)),  # one turn would be ascending
        (["layer5", "embed"], (1, 0)),
        (["layer3"], None),
    ],
)
def test_the_other_order_is_not_ascending_where_it_need_not_be(
    tmp_path: Path, target: Path, sources: list[str], order: tuple[int, ...] | None
):
    assert variants.other_order(plan_of(declared_draft(tmp_path, sources), target)) == order


def test_a_failure_leaves_nothing_behind_and_keeps_what_was_there(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_of(declared_draft(tmp_path), target)
    folder = variants.resave(plan, tmp_path / "out" / "permuted", (2, 0, 1))
    (folder / "note").write_text("mine")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match="no space"):
            variants.resave(plan, folder, (2, 0, 1))
    assert [p.name for p in folder.parent.iterdir()] == ["permuted"]
    variants.resave(plan, folder, (2, 0, 1))
    assert sorted(p.name for p in folder.parent.iterdir()) == ["permuted", "permuted.1"]
    assert (folder.parent / "permuted.1" / "note").read_text() == "mine"


def test_backups_count_up(tmp_path: Path):
    for number in range(3):
        file = tmp_path / "bench.json"
        assert bool(variants.set_aside(file)) == (number > 0)
        file.write_text(str(number))
    names = ("bench.json", "bench.1.json", "bench.2.json")
    assert [(tmp_path / name).read_text() for name in names] == ["2", "0", "1"]


# ---- what each row serves ---------------------------------------------------------------------------------


def served(settings: bench.Settings, plan: AssemblyPlan) -> tuple[dict[str, Any], dict[str, str]]:
    servers, left_out = bench.make_servers(settings, plan)
    return {server.name: server for server in servers}, left_out


def draft_of(server: Any) -> Path:
    return Path(server.command[server.command.index("--speculative-draft-model-path") + 1])


def test_every_row_gets_its_draft_and_its_switch(tmp_path: Path, target: Path, settings: bench.Settings):
    draft = declared_draft(tmp_path)
    servers, left_out = served(settings, plan_of(draft, target))
    assert left_out == {}
    assert list(servers) == list(report.LABELS)
    assert not any("speculative" in word for word in servers["baseline"].command)
    assert {n for n, s in servers.items() if s.environment.get("EAGLE3_EXT") == "off"} == {
        "stock",
        "stock_ids",
        "stock_permuted",
    }
    assert draft_of(servers["stock"]) == draft_of(servers["ours"]) == draft
    assert draft_of(servers["stock_permuted"]) == draft_of(servers["ours_permuted"])

    told = plan_of(draft_of(servers["stock_ids"]), target)
    assert told.equals_stock
    assert told.stock_boundaries == (0, 4, 6)
    permuted = plan_of(draft_of(servers["stock_permuted"]), target)
    assert permuted.boundaries == (6, 0, 4)
    assert permuted.stock_boundaries == (0, 4, 6)  # the right states in the wrong order: the best it can say


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        (["layer5", "embed", "layer3"], "in this order on LlamaForCausalLM"),
        (["embed", "layer3", "last"], "at all on LlamaForCausalLM"),
    ],
)
def test_ids_that_stock_cannot_be_told_leave_the_row_out(
    tmp_path: Path, target: Path, settings: bench.Settings, sources: list[str], reason: str
):
    servers, left_out = served(settings, plan_of(declared_draft(tmp_path, sources), target))
    assert "stock_ids" not in servers
    assert left_out["stock_ids"].endswith(reason)
    assert not (settings.out / "drafts" / "stock_ids").exists()
    assert ("stock_permuted" in left_out) == ("last" in sources)


def test_a_draft_that_stock_computes_otherwise_leaves_the_row_out(
    tmp_path: Path, target: Path, settings: bench.Settings
):
    draft = declared_draft(tmp_path, config_changes={"norm_before_residual": True})
    servers, left_out = served(settings, plan_of(draft, target))
    assert "stock_ids" not in servers
    assert "hidden_norm" in left_out["stock_ids"]
    assert not (settings.out / "drafts" / "stock_ids").exists()


def test_a_draft_that_stock_cannot_read_has_no_row_of_stock(tmp_path: Path, target: Path, settings: bench.Settings):
    draft = write_draft(tmp_path / "draft", "speculators", config_changes={"eagle3_ext": {"sources": DECLARED}})
    servers, left_out = served(settings, plan_of(draft, target))
    assert list(servers) == ["baseline", "ours", "ours_permuted"]
    assert all(reason for reason in left_out.values())
    assert plan_of(draft_of(servers["ours_permuted"]), target).boundaries == (6, 0, 4)


def test_a_draft_at_which_stock_stops_has_no_row_of_stock(tmp_path: Path, target: Path, settings: bench.Settings):
    draft = declared_draft(tmp_path, config_changes={"draft_vocab_size": DELETE})
    servers, left_out = served(settings, plan_of(draft, target))
    assert list(servers) == ["baseline", "ours", "ours_permuted"]
    assert "stock stops without the key draft_vocab_size" in left_out["stock"]


def test_draft_and_target_in_each_other_s_place(tmp_path: Path, target: Path, settings: bench.Settings):
    swapped = replace(settings, draft=str(target), target=str(declared_draft(tmp_path)))
    with pytest.raises(CheckpointError) as raised:
        bench.compare(swapped, {}, tmp_path / "bench.json")
    assert str(raised.value).count("swap them") == 2


def test_a_draft_that_stock_reads_right_is_not_served_by_it_twice(
    tmp_path: Path, target: Path, settings: bench.Settings
):
    ids = {"eagle_config.use_aux_hidden_state": True, "eagle_config.eagle_aux_hidden_state_layer_ids": [-1, 3, 5]}
    draft = write_draft(tmp_path / "draft", config_changes=ids)
    _, left_out = served(settings, plan_of(draft, target))
    assert "stock reads this draft right" in left_out["stock_ids"]


def test_flags_given_win_over_flags_set(settings: bench.Settings):
    given = ("--attention-backend=eagle3_cpu", "--max-total-tokens", "99", "--device", "cpu")
    flags, environment = bench.server_flags(replace(settings, flags=given, concurrency=7))
    assert flags[: len(given)] == list(given)
    assert flags.count("--max-total-tokens") == 1
    assert flags[flags.index("--max-running-requests") + 1] == "7"
    assert environment["SGLANG_PLATFORM"] == "eagle3_ext"


def test_only_our_cpu_backend_asks_for_our_platform(settings: bench.Settings):
    flags, environment = bench.server_flags(settings)
    assert flags[:4] == ["--device", "cpu", "--attention-backend", "eagle3_cpu"]
    assert environment == {"SGLANG_PLATFORM": "eagle3_ext"}
    for given in (("--device", "cuda"), ("--device", "cpu", "--attention-backend", "torch_native")):
        flags, environment = bench.server_flags(replace(settings, flags=given))
        assert "eagle3_cpu" not in flags
        assert environment == {}


@pytest.mark.parametrize(
    ("flags", "config", "dtype"),
    [
        (("--dtype", "half"), {}, "float16"),
        (("--dtype=float32",), {}, "float32"),
        ((), {"torch_dtype": "bfloat16"}, "bfloat16"),
        ((), {"torch_dtype": DELETE, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ((), {"torch_dtype": "float32"}, "float16"),
        ((), {"torch_dtype": "float32", "model_type": "gemma2"}, "bfloat16"),
    ],
)
def test_the_served_type_is_the_one_sglang_settles(
    tmp_path: Path, flags: tuple[str, ...], config: dict[str, Any], dtype: str
):
    target = write_target(tmp_path / "other", config_changes={"dtype": DELETE, **config})
    settings = bench.Settings(draft="d", target=str(target), out=tmp_path, flags=flags)
    assert bench.served_dtype(settings) == dtype


# ---- settings and prompts ---------------------------------------------------------------------------------


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang-eagle3")
    bench.add_command(parser.add_subparsers(required=True))
    return parser.parse_args(["bench", *words])


def test_words_after_the_dashes_are_for_sglang():
    args = parse("D", "T", "--rounds", "7", "--", "--dtype", "float32", "--", "x")
    assert (args.draft, args.target, args.rounds) == ("D", "T", 7)
    assert args.flags == ["--dtype", "float32", "--", "x"]
    assert args.command is bench.run
    assert parse("D", "T").flags == []


def test_defaults_of_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "_missing_packages", lambda: iter(()))
    settings = bench.read_settings(parse("D", "T", "--steps", "5"))
    assert settings.rows == tuple(report.LABELS)
    assert (settings.rounds, settings.tokens, settings.concurrency) == (5, 64, 1)
    assert (settings.steps, settings.topk, settings.draft_tokens) == (5, 1, 6)
    assert len(settings.prompts) == len({prompt.text for prompt in settings.prompts}) == 12


def test_everything_that_is_wrong_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "prompts.json"
    file.write_text('{"a": ["x", 3, {"prompt": ""}], "b": "text"}')
    words = ["--rows", "stock,stock,theirs", "--rounds", "0", "--prompts", str(file), "--", "--port=1", "--dtype", "x"]
    assert bench.run(parse("D", "T", *words)) == 1
    lines = capsys.readouterr().err.splitlines()
    starts = ("sglang: not", "openai: not", "tqdm: not", f"{file}:a[1]", f"{file}:a[2]", f"{file}:b:")
    starts += ("--rows: got stock,stock,theirs", "--rounds: got 0", "--: got --port;")
    assert len(lines) == len(starts)
    assert all(line.startswith(f"sglang-eagle3: {start}") for line, start in zip(lines, starts, strict=True))


@pytest.mark.parametrize(
    "spell", ["{} x", "{}=x", "{:.12} x", "{:.12}=x"], ids=["space", "sign", "short", "short_sign"]
)
@pytest.mark.parametrize("name", bench._OURS_TO_SET)
def test_flags_that_the_comparison_sets_are_refused(settings: bench.Settings, name: str, spell: str):
    words = spell.format(name).split()
    with pytest.raises(bench.BenchError, match=r"does not set itself\. Leave it out; DRAFT, TARGET, ") as caught:
        replace(settings, flags=("--tp-size", "2", *words))
    assert str(caught.value).startswith(f"--: got {words[0].partition('=')[0]}; expected ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-total", "9"), "--max-total: got an abbreviation of --max-total-tokens; expected that flag in full"),
        (("--dev=cpu",), "--dev: got an abbreviation of --device;"),
        (("--config", "x.yaml"), "--: got --config; expected every flag on the command line"),
    ],
)
def test_flags_that_the_comparison_would_overlook_are_refused(
    settings: bench.Settings, words: tuple[str, ...], message: str
):
    with pytest.raises(bench.BenchError) as caught:
        replace(settings, flags=words)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_of_two_flags_the_last_one_counts(settings: bench.Settings):
    given = ("--device", "cpu", "--device=cuda")
    assert bench.server_flags(replace(settings, flags=given)) == (
        [*given, *bench.server_flags(replace(settings, flags=("--device", "cuda")))[0][2:]],
        {},
    )


@pytest.mark.parametrize("text", ['["\\ud83d"]', "[" * 100_000], ids=["surrogate", "nested"])
def test_prompts_that_no_request_can_carry(tmp_path: Path, text: str):
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(bench.BenchError, match="cannot be read"):
        bench.read_prompts(file)


def test_results_that_cannot_be_written_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench, "_missing_packages", lambda: iter(()))
    monkeypatch.setattr(bench, "busy", lambda machine: None)
    monkeypatch.setattr(bench, "compare", lambda *_: pytest.fail("started"))
    (tmp_path / "file").write_text("")
    assert bench.run(parse("D", "T", "--out", str(tmp_path / "file"))) == 1
    assert "--out: got" in capsys.readouterr().err


def test_prompts_with_and_without_groups(tmp_path: Path):
    file = tmp_path / "prompts.json"
    file.write_text('["one", "two"]')
    assert bench.read_prompts(file) == (bench.Prompt("one"), bench.Prompt("two"))
    file.write_text('{"seen": ["one"], "unseen": [{"topic": "t", "prompt": "two"}]}')
    assert bench.read_prompts(file) == (bench.Prompt("one", "seen"), bench.Prompt("two", "unseen"))


def test_the_callers_switches_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "off")
    (line,) = [x for x in bench.leave_out_environment(("EAGLE3_EXT",)) if "KERNELS" in x]
    assert line == "(leaving EAGLE3_EXT_KERNELS=off of the environment out of the comparison)"
    assert bench.leave_out_environment(("EAGLE3_EXT",)) == []


# ---- figures ----------------------------------------------------------------------------------------------


def answer(question: int, round: int, tokens: tuple[int, ...], verify_steps: int | None) -> Answer:
    histogram = (verify_steps,) if verify_steps else ()
    return Answer(question, round, (7,), tokens, verify_steps, histogram)


@pytest.fixture
def records() -> dict[str, Record]:
    def record(seconds: list[float], *steps: int | None) -> Record:
        return Record([answer(q, r, (1, 2, 3, 4), steps[q]) for r in range(2) for q in range(2)], seconds)

    return {"baseline": record([2.0, 1.0], None, None), "ours": record([1.0, 0.8], 2, 4)}


def test_ratios_are_taken_round_by_round():
    found = bench.ratios({"baseline": [10.0, 8.0, 9.0], "ours": [15.0, 16.0, 9.0]})
    assert found["ours"]["rounds"] == [1.5, 2.0, 1.0]
    assert found["ours"]["of_medians"] == pytest.approx(15 / 9)
    assert (found["ours"]["median"], found["ours"]["min"], found["ours"]["max"]) == (1.5, 1.0, 2.0)
    assert found["baseline"]["rounds"] == [1.0, 1.0, 1.0]


def test_each_group_has_its_accept_lengths(records: dict[str, Record]):
    prompts = (bench.Prompt("a", "seen"), bench.Prompt("b", "unseen"))
    assert bench.groups(records, prompts) == {
        "seen": {"prompts": 1, "spec_accept_length": {"baseline": None, "ours": 2.0}},
        "unseen": {"prompts": 1, "spec_accept_length": {"baseline": None, "ours": 1.0}},
    }
    assert bench.groups(records, (bench.Prompt("a"), bench.Prompt("b"))) == {}


@pytest.fixture
def result(tmp_path: Path, target: Path, records: dict[str, Record], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A whole comparison in which only the servers are make-believe; one answer of ours differs."""
    ours = records["ours"]
    ours.answers[3] = answer(1, 1, (1, 2, 9, 4), 4)
    declared_draft(tmp_path)
    monkeypatch.setattr(bench, "running", lambda servers, at_once: _Nothing())
    monkeypatch.setattr(bench, "measure", lambda *args: records)
    settings = bench.Settings(
        draft=str(tmp_path / "draft"),
        target=str(target),
        out=tmp_path,
        rows=("baseline", "ours"),
        prompts=(bench.Prompt("a", "seen"), bench.Prompt("b", "unseen")),
        rounds=2,
        flags=("--dtype", "float32"),
    )
    (tmp_path / "bench.json").write_text("mine")
    machine = {"cpu": "A CPU", "cores": 7, "load_before": 0.5}
    seen: list[list[str]] = []
    found = bench.compare(settings, machine, tmp_path / "bench.json", lambda s: seen.append([x.name for x in s]))
    assert seen == [["baseline", "ours"]]
    return found


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


def test_the_file_holds_what_is_promised(tmp_path: Path, result: dict[str, Any]):
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert (tmp_path / "bench.1.json").read_text() == "mine"
    assert not list(tmp_path.glob("*.part"))
    assert written["schema"] == 1
    assert written.keys() >= {"machine", "versions", "settings", "runs", "ratios", "groups", "differences"}
    promised = "name tok_s tok_s_rounds spec_accept_length spec_accept_rate_per_position identical near_ties"
    assert all(run.keys() >= {*promised.split(), "prompts", "output_tokens"} for run in written["runs"])
    assert written["settings"]["dtype"] == "float32"
    (difference,) = written["differences"]
    assert (difference["name"], difference["question"], difference["position"]) == ("ours", 1, 2)
    assert difference["near_tie"] is False
    assert [run["near_ties"] for run in written["runs"]] == [None, 0]


def test_a_target_that_cannot_judge_loses_no_figure(
    tmp_path: Path, records: dict[str, Record], capsys: pytest.CaptureFixture[str]
):
    item = bench.near_ties.Disagreement("ours", 0, (1,), 0, 2, 3)
    settings = bench.Settings(draft="d", target=str(tmp_path), out=tmp_path)
    (found,) = bench._judge(settings, "bfloat16", [item])
    assert not found.is_near_tie
    assert "all count as failures" in capsys.readouterr().out


def test_both_tables_line_up_and_say_it_all(result: dict[str, Any]):
    for header, rows in (
        (report.HEADER, report.cells(result)),
        (report.detail_header(result), report.detail_cells(result)),
    ):
        table = report.text_table(header, rows).splitlines()
        assert len({len(line) for line in table}) == 1
        assert len(table) == 2 + len(result["runs"])
    ours = report.detail_cells(result)[1]
    assert ours[0] == report.LABELS["ours"]
    # 1.0 and 0.8 s against 2.0 and 1.0 s; 12 verify steps in 1.8 s against 16 tokens in 3 s
    assert ours[1] == "1.62x (1.25 to 2.00)"
    assert ours[3] == "0.80"
    assert ours[4:] == ("2.00", "1.00")
    assert report.cells(result)[1][-1] == "0 of 1 differing"


def test_what_was_measured_can_be_recorded_in_the_draft(tmp_path: Path, result: dict[str, Any]):
    command = bench.recording(result)
    assert command is not None
    program, *words = shlex.split(command)
    assert program == "sglang-eagle3"
    assert cli.main(words) == 0
    expected = formats.read_draft(tmp_path / "draft").expected
    ours = result["runs"][1]
    assert expected is not None
    assert expected.accept_length == pytest.approx(ours["spec_accept_length"], abs=1e-4)
    assert expected.accept_per_position == pytest.approx(ours["spec_accept_rate_per_position"], abs=1e-4)
    assert (expected.steps, expected.topk, expected.draft_tokens) == (3, 1, 4)
    assert expected.verify_steps == 6
    assert bench.recording(result | {"runs": result["runs"][:1]}) is None


def test_a_difference_is_described_by_what_was_weighed():
    near = {"name": "ours", "question": 3, "position": 6, "gap": 0.01, "rounding": 0.02, "near_tie": True}
    assert report.describe(near, "bfloat16") == (
        "ours, question 4, token 7: logits 0.010 apart in float32, bfloat16 moves one by up to 0.020: a near-tie"
    )
    assert report.describe(near | {"gap": None, "near_tie": False}, "float32").endswith("may differ in float32")


def test_the_exit_code_tells_of_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench, "_missing_packages", lambda: iter(()))
    monkeypatch.setattr(bench, "compare", lambda *args: result)
    words = ["D", "T", "--out", str(tmp_path / "new"), "--rounds", "2"]
    assert bench.run(parse(*words)) == 1
    shown = capsys.readouterr()
    assert "2 rounds are few" in shown.out
    assert "accept length, unseen" in shown.out
    assert "FAILED: ours, question 2, token 3: NOT a near-tie" in shown.err
    result["differences"] = []
    assert bench.run(parse(*words)) == 0


def test_picture_is_drawn_where_matplotlib_is(result: dict[str, Any], tmp_path: Path):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.png").write_text("mine")
    assert report.picture(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "bench.1.png").read_text() == "mine"


def test_near_ties_are_counted_by_question():
    def difference(name: str, question: int, near: bool) -> Any:
        return SimpleNamespace(name=name, question=question, is_near_tie=near)

    found = [difference("ours", 1, True), difference("ours", 1, True), difference("ours", 2, True)]
    assert bench.count_near_ties(found, "ours") == 2
    assert bench.count_near_ties([*found, difference("ours", 2, False)], "ours") == 1
    assert bench.count_near_ties(found, "stock") == 0
    assert bench.count_near_ties(found, "baseline") is None


def test_a_busy_machine_is_warned_about():
    assert bench.busy({"load_before": 1.2, "cores": 2})
    assert not bench.busy({"load_before": 1.2, "cores": 64})
    assert bench.machine_facts().keys() >= {"cpu", "cores", "memory_gib", "gpus", "load_before"}


def test_weights_are_hashed_whole_and_in_order(tmp_path: Path) -> None:
    whole, parts, pickled = (tmp_path / name for name in ("whole", "parts", "pickled"))
    for folder in (whole, parts, pickled):
        folder.mkdir()
    (whole / "model.safetensors").write_bytes(b"ab")
    (parts / "model-2.safetensors").write_bytes(b"b")
    (parts / "model-1.safetensors").write_bytes(b"a")
    (parts / "other.bin").write_bytes(b"c")  # which is not read beside safetensors
    (pickled / "pytorch_model.bin").write_bytes(b"ab")
    expected = hashlib.sha256(b"ab").hexdigest()
    assert [bench.weights_sha256(folder) for folder in (whole, parts, pickled)] == [expected] * 3
