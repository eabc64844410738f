"""Launches that must end with one clear line, and launches that must fall back to stock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import servers
import torch
from recorder import TOKENS, Recorder, variant
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

# Put on PYTHONPATH, this makes the contract ask SGLang for a symbol that it lacks, as a later release might.
BROKEN = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "sglang_eagle3_ext.host.contract":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            gone = module.Row("sglang.srt.server_args.gone", "call", (), "start", "show a broken contract", "never")
            module.ROWS += (gone,)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "sitecustomize.py").write_text(BROKEN)
    return {"PYTHONPATH": str(folder)}


def lines_of(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("sglang-eagle3: ")]


@pytest.mark.parametrize("command", [servers.LAUNCH, servers.SERVE], ids=["launch_server", "serve"])
def test_refuses_a_source_beyond_the_target(
    target: Path, draft: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    wrong = variant(draft, tmp_path / "wrong", {"eagle3_ext": {"sources": ["embed", "layer3", "layer31"]}})
    code, error = servers.run_to_exit(servers.arguments(target, wrong, *servers.CHAIN), command=command, cwd=tmp_path)
    assert code == 1
    assert len(lines_of(error)) == 1
    assert "layer31" in lines_of(error)[0]
    assert "30" in lines_of(error)[0]
    assert "Traceback" not in error


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "STANDALONE"])
def test_refuses_another_algorithm(target: Path, draft: Path, tmp_path: Path, algorithm: str) -> None:
    words = [algorithm if w == "EAGLE3" else w for w in servers.arguments(target, draft, *servers.CHAIN)]
    code, error = servers.run_to_exit(words, cwd=tmp_path)
    assert code == 1
    (line,) = lines_of(error)
    assert f"got {algorithm}" in line
    assert line.endswith("Serve it with --speculative-algorithm EAGLE3.")
    assert "Traceback" not in error


def without_draft(words: list[str], draft: Path) -> list[str]:
    return [w for w in words if w not in ("--speculative-draft-model-path", str(draft))]


def truncated(draft: Path, to: Path) -> Path:
    broken = variant(draft, to, {})
    weights = (draft / "model.safetensors").read_bytes()
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(weights[:-1000])
    return broken


def narrow_fc(draft: Path, to: Path) -> Path:
    broken = variant(draft, to, {})
    tensors = load_file(draft / "model.safetensors")
    (broken / "model.safetensors").unlink()
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, broken / "model.safetensors")
    return broken


BROKEN_DRAFTS = {
    "an unknown source": (
        lambda draft, to: variant(draft, to, {"eagle3_ext": {"sources": ["embed", "layer3", "layer fifteen"]}}),
        "layer fifteen",
    ),
    "an unknown key": (
        lambda draft, to: variant(draft, to, {"eagle3_ext": {"source": ["embed", "layer3", "layer15"]}}),
        "eagle3_ext.source",
    ),
    "fc of the wrong width": (narrow_fc, "1727"),
    "a truncated file": (truncated, "model.safetensors"),
    "a vocabulary of another target": (lambda draft, to: variant(draft, to, {"vocab_size": 50000}), "50000"),
    "the width of another target": (lambda draft, to: variant(draft, to, {"target_hidden_size": 640}), "640"),
    "a missing folder": (lambda draft, to: to, "missing"),
}


@pytest.mark.parametrize("case", BROKEN_DRAFTS)
def test_refuses_a_draft_with(target: Path, draft: Path, tmp_path: Path, case: str) -> None:
    make, named = BROKEN_DRAFTS[case]
    broken = make(draft, tmp_path / "missing")
    code, error = servers.run_to_exit(servers.arguments(target, broken, *servers.CHAIN), cwd=tmp_path)
    assert code == 1
    assert lines_of(error)
    assert named in lines_of(error)[0]
    assert "Traceback" not in error


def test_refuses_to_serve_without_a_draft(target: Path, draft: Path, tmp_path: Path) -> None:
    words = without_draft(servers.arguments(target, draft, *servers.CHAIN), draft)
    code, error = servers.run_to_exit(words, cwd=tmp_path)
    assert code == 1
    assert "--speculative-draft-model-path: got none" in lines_of(error)[0]
    assert "Traceback" not in error


def test_strict_refuses_adjusted_draft_tokens(target: Path, draft: Path, tmp_path: Path) -> None:
    sources = json.loads((draft / "config.json").read_text())["eagle3_ext"]
    strict = variant(draft, tmp_path / "strict", {"eagle3_ext": {**sources, "strict": True}})
    words = servers.arguments(target, strict, *servers.CHAIN[:-1], "7")
    code, error = servers.run_to_exit(words, cwd=tmp_path)
    assert code == 1
    assert "draft tokens 4" in lines_of(error)[0]
    assert "Traceback" not in error


def test_broken_contract_refuses_a_draft_that_declares_its_assembly(
    target: Path, draft: Path, tmp_path: Path, broken: dict[str, str]
) -> None:
    code, error = servers.run_to_exit(servers.arguments(target, draft, *servers.CHAIN), env=broken, cwd=tmp_path)
    assert code == 1
    assert "sglang.srt.server_args.gone" in lines_of(error)[-1]
    assert "sglang-eagle3 doctor" in lines_of(error)[-1]
    assert "Traceback" not in error


def test_broken_contract_leaves_other_drafts_to_stock(
    answers: Recorder,
    prompts: list[list[int]],
    target: Path,
    stock_draft: Path,
    tmp_path: Path,
    broken: dict[str, str],
) -> None:
    log = tmp_path / "fallback.log"
    with servers.serve(log, servers.arguments(target, stock_draft, *servers.CHAIN), env=broken) as server:
        got = [servers.complete(server, p, TOKENS) for p in prompts[:4]]
    assert got == answers("plugin_off")[:4]
    errors = [x for x in log.read_text().splitlines() if "sglang-eagle3-ext is not active" in x]
    assert errors
    assert all(x.endswith("run: sglang-eagle3 doctor") for x in errors)
    assert "fc <-" not in log.read_text()


def test_eagle1_draft_runs_stocks_class(
    answers: Recorder, prompts: list[list[int]], target: Path, tmp_path: Path
) -> None:
    width, inner = 576, 1536
    config = json.loads((target / "config.json").read_text())
    draft = tmp_path / "eagle1"
    draft.mkdir()
    (draft / "config.json").write_text(
        json.dumps(
            config
            # Stock cannot share the target's embedding with a draft whose own head is tied to it.
            | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
        )
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (width, 2 * width),
        "layers.0.self_attn.q_proj.weight": (width, width),
        "layers.0.self_attn.k_proj.weight": (192, width),
        "layers.0.self_attn.v_proj.weight": (192, width),
        "layers.0.self_attn.o_proj.weight": (width, width),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    save_file(
        {n: torch.randn(s, generator=generator) * 0.02 for n, s in shapes.items()},
        draft / "model.safetensors",
    )
    words = ["EAGLE" if w == "EAGLE3" else w for w in servers.arguments(target, draft, *servers.CHAIN)]
    log = tmp_path / "eagle1.log"
    with servers.serve(log, words) as server:
        got = [servers.complete(server, p, TOKENS) for p in prompts[:3]]
    assert [a.ids for a in got] == [a.ids[:TOKENS] for a in answers("baseline")[:3]]
    assert "type=LlamaForCausalLMEagle," in log.read_text()
    assert "fc <-" not in log.read_text()
