"""What ``make gpu`` does that needs no GPU: the order of its shapes, its rows, its file, what it makes of failures."""

from __future__ import annotations

import datetime
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from interpreter import interpret
from sglang_eagle3_ext.kernels import split_merge, tree_verify_gqa, tree_verify_mla

from benchmarks import bench_tree_verify_gqa, bench_tree_verify_mla, gpu, kernel_bench
from benchmarks.bench_tree_verify_mla import parts
from benchmarks.kernel_bench import Call, Peer, Prepared, progress

interpret(split_merge, tree_verify_gqa, tree_verify_mla)

CPU = torch.device("cpu")
WITHOUT_TIMES = {"copy_gbps": None, "matmul_tflops": None}


def test_every_operator_has_its_turn_and_every_shape_one() -> None:
    shapes = {op: list(bench.SHAPES) for op, bench in gpu.benchmarks_of(gpu.OPERATORS).items()}
    order = list(gpu.in_turn(shapes))
    assert {op for op, _ in order[: len(shapes)]} == set(gpu.OPERATORS)
    assert sorted(order) == sorted((op, name) for op, names in shapes.items() for name in names)


def test_what_exceeds_the_memory_is_left_out_and_no_fault() -> None:
    """Where PyTorch's own attention does not fit; of a kernel of ours it is one."""

    def too_large() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    truth = torch.zeros(3, dtype=torch.float64)
    rows, problems = gpu.run_shape(
        "op", "name", Prepared({"torch": too_large, "ours": too_large}, truth, 0), 0, WITHOUT_TIMES
    )
    assert problems == []
    assert [(row["provider"], row["skipped"]) for row in rows] == [("all", kernel_bench.TOO_LARGE)]
    fits = {"torch": lambda: torch.zeros(3), "ours": too_large}
    rows, problems = gpu.run_shape("op", "name", Prepared(fits, truth, 0), 0, WITHOUT_TIMES)
    assert [row["skipped"] for row in rows[1:]] == ["OutOfMemoryError"]
    assert len(problems) == 1


def test_a_large_batch_is_read_in_parts() -> None:
    whole = list(range(32))
    assert [whole[some] for some in parts(32, 2**17)] == [whole[at : at + 8] for at in (0, 8, 16, 24)]
    assert [whole[some] for some in parts(32, 1024)] == [whole]
    assert [whole[:3][some] for some in parts(3, 2**21)] == [[0], [1], [2]]


def test_progress_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(progress([1, 2], 2, "some")) == [1, 2]
    monkeypatch.setitem(sys.modules, "tqdm", None)  # importing it raises
    items = iter([1, 2])
    assert progress(items, 2, "some") is items


def test_an_early_end_leaves_shapes_from_the_whole_list() -> None:
    assert [name for _, name in gpu.in_turn({"op": list("abcdefgh")})] == list("aecgbfdh")
    assert sorted(name for _, name in gpu.in_turn({"op": list("abcde")})) == list("abcde")


def test_an_earlier_result_stays(tmp_path: Path) -> None:
    day = datetime.date(2026, 11, 30)
    names = []
    for _ in range(3):
        path = gpu.destination(tmp_path, "NVIDIA H200", day)
        path.write_text("{}")
        names.append(path.name)
    assert names == [f"gpu-nvidia-h200-2026-11-30{suffix}.json" for suffix in ("", "-2", "-3")]


@pytest.mark.parametrize(("nbytes", "flops", "share"), [(4_000_000, 0, 0.1), (4_000_000, 4 * 10**9, 0.5), (0, 0, 0.0)])
def test_the_roofline_is_the_higher_of_bytes_and_products(nbytes: int, flops: int, share: float) -> None:
    # 4 MB at 4000 GB/s are 1 us, 4 GFLOP at 800 TFLOP/s are 5 us.
    assert gpu.of_roofline({"p50_us": 10.0}, nbytes, flops, 4000.0, 800.0) == share


@pytest.mark.parametrize("bench", [bench_tree_verify_gqa, bench_tree_verify_mla], ids=["gqa", "mla"])
def test_the_shape_of_the_smoke_test_is_computed_right_by_all(bench: ModuleType) -> None:
    prepared = bench.prepare(bench.SMOKE, CPU, torch.bfloat16)
    rows, problems = gpu.run_shape("op", "smoke", prepared, 0, WITHOUT_TIMES)
    assert not problems
    assert [row["provider"] for row in rows] == ["torch", "ours", "ours, plan and mask included", *prepared.peers]
    assert all(row["max_err"] <= row["budget"] for row in rows[:3])
    assert prepared.peers
    assert {row["skipped"] for row in rows[3:]} == {"no CUDA device"}


@pytest.mark.parametrize("kernel", ["tree_verify_gqa", "tree_verify_mla"])
def test_the_benchmark_runs_as_a_program(tmp_path: Path, kernel: str) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.bench_{kernel}", "--smoke", "--out", str(out)]
    subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["provider"] for row in rows[:3]] == ["torch", "ours", "ours, plan and mask included"]
    assert all(row["max_err"] <= row["budget"] and row["p50_us"] is None for row in rows[:3])
    assert {row["skipped"] for row in rows[3:]} == {"no CUDA device"}


def test_a_wrong_or_broken_provider_costs_its_own_row_and_no_other() -> None:
    truth = torch.ones(3, dtype=torch.float64)

    def broken() -> torch.Tensor:
        raise ImportError("no such peer")

    providers: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: torch.ones(3),
        "wrong": lambda: torch.full((3,), 1.1),
        "broken": broken,
        "ours": lambda: torch.ones(3),
    }
    rows, problems = gpu.run_shape("op", "shape", Prepared(providers, truth, 1), 0, WITHOUT_TIMES)
    assert [row.get("skipped") for row in rows] == [None, "RuntimeError", "ImportError", None]
    assert len(problems) == 2
    assert "wrong" in problems[0]
    assert "no such peer" in problems[1]


def test_a_peer_that_fails_says_why_and_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, which is played here: the times are made up, the checks are not."""

    def absent() -> Call:
        raise ImportError("No module named 'peer'")

    monkeypatch.setattr(kernel_bench, "times_us", lambda call: (1.0, 2.0, 3.0))
    peers = {
        "right": Peer(lambda: lambda: torch.ones(3)),
        "wrong": Peer(lambda: lambda: torch.full((3,), 1.1)),
        "absent": Peer(absent),
        "compiling": Peer(absent, "module-1"),
        "broken compiler": Peer(absent, "module-2"),
        "compiled": Peer(lambda: lambda: torch.ones(3), "module-3"),
    }
    prepared = Prepared({"torch": lambda: torch.ones(3)}, torch.ones(3, dtype=torch.float64), 4000, peers)
    reasons = {"module-1": "module-1: still being compiled", "module-2": "OSError: nvcc"}
    about = {"copy_gbps": 4000.0, "matmul_tflops": 800.0}
    rows, problems = gpu.run_shape("op", "shape", prepared, 0, about, reasons.get)
    assert problems == []
    said = {row["provider"]: row.get("skipped") for row in rows}
    assert said.pop("wrong").startswith("RuntimeError: op, shape, wrong: got an error of 1.000e-01")
    assert said == {
        "torch": None,
        "right": None,
        "absent": "ImportError: No module named 'peer'",
        "compiling": "module-1: still being compiled",
        "broken compiler": "OSError: nvcc",
        "compiled": None,
    }
    assert [row["p50_us"] for row in rows if row.get("skipped") is None] == [2.0] * 3


def test_what_peers_compile_is_left_for_the_measurements_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("flashinfer", "flashinfer.xqa"):  # an import of them fails
        monkeypatch.setitem(sys.modules, name, None)
    shapes = {"one": bench_tree_verify_gqa.SMOKE, "same": bench_tree_verify_gqa.SMOKE._replace(batch=1)}
    monkeypatch.setattr(bench_tree_verify_gqa, "SHAPES", shapes)
    assert gpu.why_missing(tmp_path, "flashinfer_xqa-2-5") == "flashinfer_xqa-2-5: still being compiled"
    gpu.compile_peers(tmp_path, CPU)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flashinfer_prefill-32", "flashinfer_xqa-2-5"]
    assert "flashinfer" in (gpu.why_missing(tmp_path, "flashinfer_xqa-2-5") or "")
    (tmp_path / "flashinfer_xqa-2-5").write_text("")
    assert gpu.why_missing(tmp_path, "flashinfer_xqa-2-5") is None


def test_the_shapes_are_those_that_matter() -> None:
    """The contexts, batches, drafts and models of the issue that asked for these kernels."""
    gqa, mla = bench_tree_verify_gqa.SHAPES.values(), bench_tree_verify_mla.SHAPES.values()
    assert {(s.heads, s.kv_heads) for s in gqa} == {(32, 8), (16, 2)}
    for shapes in (gqa, mla):
        wanted = set(itertools.product((1024, 8192, 32768, 131072), (1, 8, 32), (8, 16, 64)))
        assert {(s.context, s.batch, s.num_draft) for s in shapes} >= wanted
        assert {(s.context, s.batch) for s in shapes if s.chain} == {(context, batch) for context, batch, _ in wanted}
    assert {(s.sources, s.width) for s in gpu.benchmarks_of(["fc_proj"])["fc_proj"].SHAPES.values()} >= {
        (3, 4096),
        (3, 7168),
    }


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the whole script run here, over the smoke shape of two operators, without times."""
    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None)
    # In the dtype of the smoke shape.
    here = {"cuda": cuda, "device": lambda name: CPU, "bfloat16": torch.float16}
    monkeypatch.setattr(gpu, "torch", SimpleNamespace(OutOfMemoryError=torch.OutOfMemoryError, **here))
    idle = SimpleNamespace(terminate=lambda: None)
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(Popen=lambda *args, **kwargs: idle))
    monkeypatch.setattr(gpu, "machine", lambda device: {"gpu": "NVIDIA H200", "copy_gbps": None})
    monkeypatch.setattr(gpu, "matmul_tflops", lambda device: 600.0)
    right = {"op": "tree_verify_gqa", "case": "ragged", "error": 1.0, "bar": 1.5, "problem": None, "skipped": None}
    monkeypatch.setattr(gpu, "run_checks", lambda device: iter([right]))
    for bench in (bench_tree_verify_gqa, bench_tree_verify_mla):
        monkeypatch.setattr(bench, "SHAPES", {"smoke": bench.SMOKE})
    monkeypatch.setattr(gpu, "OPERATORS", ("tree_verify_gqa", "tree_verify_mla"))


def run_whole(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_whole_script_leaves_checks_rows_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_whole(monkeypatch, "--out", str(tmp_path)) == 0
    (file,) = tmp_path.glob("gpu-nvidia-h200-*.json")
    result = json.loads(file.read_text())
    assert {"git_sha", "versions", "date", "machine", "checks", "rows", "problems"} <= set(result)
    assert result["problems"] == []
    measured = [(row["op"], row["provider"]) for row in result["rows"] if not row.get("skipped")]
    assert measured == [
        (op, provider)
        for op in ("tree_verify_gqa", "tree_verify_mla")
        for provider in ("torch", "ours", "ours, plan and mask included")
    ]
    said = capsys.readouterr().out
    assert "1 checks, 0 failed, 0 left out" in said
    assert "of_roofline" in said


@pytest.mark.usefixtures("on_the_cpu")
def test_what_does_not_fit_the_time_is_named_and_a_wrong_result_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_whole(monkeypatch, "--minutes", "0", "--out", str(tmp_path / "late")) == 0
    (file,) = (tmp_path / "late").iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert [row["skipped"] for row in rows] == ["0.0 minutes were over"] * 2
    off = bench_tree_verify_gqa.tree_verify_gqa
    monkeypatch.setattr(bench_tree_verify_gqa, "tree_verify_gqa", lambda *a, **k: off(*a, **k).mul_(1.1))
    assert run_whole(monkeypatch, "--out", str(tmp_path / "wrong")) == 1
    (file,) = (tmp_path / "wrong").iterdir()
    problems = json.loads(file.read_text())["problems"]
    assert len(problems) == 2
    assert all("expected at most" in problem for problem in problems)


def test_it_needs_torch_and_triton_alone() -> None:
    """Peers are used where they are, and nothing else of this package's requirements is imported."""
    absent = (
        "flashinfer",
        "matplotlib",
        "msgspec",
        "openai",
        "psutil",
        "safetensors",
        "sglang",
        "tqdm",
        "transformers",
    )
    script = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import benchmarks.gpu as g; "
    script += "g.benchmarks_of(g.OPERATORS)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=120)


def test_the_readme_says_whether_there_are_figures_of_a_device() -> None:
    root = Path(__file__).parents[2]
    figures = list((root / "benchmarks" / "results").glob("gpu-*.json"))
    assert ("no figure from a device exists" in " ".join((root / "README.md").read_text().split())) is not bool(figures)


def test_repetitions_that_differ_are_counted() -> None:
    results = iter([torch.zeros(4), torch.zeros(4), torch.tensor([0.0, 1, 0, 1]), torch.zeros(4)])
    assert gpu.differences_in_repetitions(lambda: next(results), 3) == 2
