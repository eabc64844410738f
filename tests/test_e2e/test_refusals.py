"""Launches that must end with one clear line, and launches that must fall back to stock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import servers
import torch
from recorder import TOKENS, Recorder, variant
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

# Put on PYTHONPATH as ``sitecustomize``, this changes one module of the package as soon as it has been executed.
CHANGES = """
import functools
import sys
from importlib.machinery import PathFinder
{change}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""

# The contract asks SGLang for a symbol that it lacks, as a later release might.
BROKEN = """
def change(contract):
    gone = contract.Row("{symbol}", "call", (), "start", "show a broken contract", "never")
    contract.ROWS += (gone,)
"""

IN_EVERY_PROCESS = "sglang.srt.server_args.gone"
"""Found by the launcher, whose module it is missing from."""

IN_WORKERS = "sglang.srt.speculative.eagle_worker_v2.gone"
"""Found when a worker imports this module, with hooks in place by then."""

# The capture hands out its first two states in each other's place, as a fault of ours would.
SWAPPED = """
def change(capture):
    hand_out = capture._hand_out
    def swap_and_hand_out(stack, plan, states):
        hand_out(stack, plan, states)
        forward = stack.forward
        @functools.wraps(forward)
        def swapped(*args, **kwargs):
            hidden_states, (first, second, *others) = forward(*args, **kwargs)
            return hidden_states, [second, first, *others]
        stack.forward = swapped
    capture._hand_out = swap_and_hand_out
"""


def changed(folder: Path, module: str, change: str) -> dict[str, str]:
    """Give the environment in which a module of the package is changed."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CHANGES.format(module=module, change=change))
    return {"PYTHONPATH": str(folder)}


def broken(folder: Path, symbol: str) -> dict[str, str]:
    """Give the environment in which SGLang lacks a symbol of the contract."""
    return changed(folder / "broken", "sglang_eagle3_ext.host.contract", BROKEN.format(symbol=symbol))


def lines_of(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("sglang-eagle3: ")]


# ---- launches that must end ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A launch that must end, and what its line must name.

    Attributes:
        named: parts of the line.
        draft: makes the draft out of the demo's, at a path; the demo's own where there is none.
        words: changes the arguments; gets the draft, too.
        command: which of SGLang's two commands; none: the first, in a fork of an interpreter that has imported it.
        broken: whether the contract is.
        problems: how many problems there are, a line each.
    """

    named: tuple[str, ...]
    draft: Callable[[Path, Path], Path] | None = None
    words: Callable[[list[str], Path], list[str]] | None = None
    command: tuple[str, ...] | None = None
    broken: bool = False
    problems: int = 1


def declaring(**ext: object) -> Callable[[Path, Path], Path]:
    return lambda draft, to: variant(draft, to, {"eagle3_ext": ext})


def saying(**config: object) -> Callable[[Path, Path], Path]:
    return lambda draft, to: variant(draft, to, config)


def truncated(draft: Path, to: Path) -> Path:
    broken = variant(draft, to, {})
    weights = (draft / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-1000])
    return broken


def narrow_fc(draft: Path, to: Path) -> Path:
    broken = variant(draft, to, {})
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, broken / "model.safetensors")
    return broken


def without_numbers(draft: Path, to: Path) -> Path:
    broken = variant(draft, to, {})
    tensors = load_file(draft / "model.safetensors")
    for name in ("fc.weight", "norm.weight"):
        tensors[name].view(-1)[7] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    return broken


def whole_model(words: list[str], draft: Path) -> list[str]:
    return [words[words.index("--model-path") + 1] if w == str(draft) else w for w in words]


def with_algorithm(name: str) -> Callable[[list[str], Path], list[str]]:
    return lambda words, draft: [name if w == "EAGLE3" else w for w in words]


def adding(*more: str) -> Callable[[list[str], Path], list[str]]:
    return lambda words, draft: [*words, *more]


def without_draft(words: list[str], draft: Path) -> list[str]:
    return [w for w in words if w not in ("--speculative-draft-model-path", str(draft))]


BEYOND = declaring(sources=["embed", "layer3", "layer31"])
EAGLE3 = "Serve it with --speculative-algorithm EAGLE3."
REFUSALS = {
    "source beyond the target": Refusal(("layer31", "30"), BEYOND),
    "source beyond the target, serve": Refusal(("layer31", "30"), BEYOND, command=servers.SERVE),
    "unknown source": Refusal(("layer fifteen",), declaring(sources=["embed", "layer3", "layer fifteen"])),
    "unknown key": Refusal(("eagle3_ext.source",), declaring(source=["embed", "layer3", "layer15"])),
    "fc of the wrong width": Refusal(("1727",), narrow_fc),
    "truncated file": Refusal(("model.safetensors",), truncated, command=servers.LAUNCH),
    "values that are no numbers": Refusal(("fc.weight", "norm.weight", "1 value"), without_numbers, problems=2),
    "the target as the draft": Refusal(("whole language model", "LlamaForCausalLM", "30"), words=whole_model),
    "vocabulary of another target": Refusal(("t2d", "50000", "49152"), saying(vocab_size=50000), problems=2),
    "width of another target": Refusal(("640", "576"), saying(target_hidden_size=640), problems=3),
    "missing folder": Refusal(("nowhere",), lambda draft, to: to.parent / "nowhere"),
    "EAGLE": Refusal(("got EAGLE ", EAGLE3), words=with_algorithm("EAGLE")),
    "NEXTN": Refusal((EAGLE3,), words=with_algorithm("NEXTN")),
    "STANDALONE": Refusal(("got STANDALONE ", EAGLE3), words=with_algorithm("STANDALONE")),
    "no draft": Refusal(("--speculative-draft-model-path: got none",), words=without_draft),
    "adjusted draft tokens under strict": Refusal(
        ("got 7", "draft tokens 4"),
        declaring(sources=["embed", "layer3", "layer15"], strict=True),
        lambda words, draft: [*words[:-1], "7"],
    ),
    "pipeline parallelism": Refusal(("--pipeline-parallel-size: got 2",), words=adding("--pp-size", "2")),
    "attention data parallelism": Refusal(
        ("--attn-dp-size: got 2",), words=adding("--tp-size", "2", "--attn-dp-size", "2")
    ),
    "two-batch overlap": Refusal(("--enable-two-batch-overlap: got it",), words=adding("--enable-two-batch-overlap")),
    "multiplexed prefill": Refusal(("--enable-pdmux: got it",), words=adding("--enable-pdmux")),
    "broken contract": Refusal((IN_EVERY_PROCESS, "sglang-eagle3 doctor"), command=servers.LAUNCH, broken=True),
}


@pytest.fixture(scope="module")
def ends(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and stderr of every launch above."""
    folder = tmp_path_factory.mktemp("refused")

    def words_of(name: str) -> list[str]:
        case = REFUSALS[name]
        served = draft if case.draft is None else case.draft(draft, folder / name.replace(" ", "_"))
        words = servers.arguments(target, served, *servers.CHAIN)
        return words if case.words is None else case.words(words, served)

    got = {}
    with servers.warm(folder) as launch:
        for name, case in REFUSALS.items():
            if case.command is None:
                got[name] = launch(words_of(name))
            else:
                env = broken(folder, IN_EVERY_PROCESS) if case.broken else None
                got[name] = servers.run_to_exit(words_of(name), command=case.command, env=env, cwd=folder)
    return got


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_with_a_clear_line_for_each_problem(ends: dict[str, tuple[int, str]], name: str) -> None:
    code, error = ends[name]
    assert code == 1, error[-2000:]
    assert "Traceback" not in error
    lines = lines_of(error)
    # A broken contract is told by every process that looked; the launch ends with the last line.
    assert REFUSALS[name].broken or len(lines) == REFUSALS[name].problems, lines
    assert all(part in " ".join(lines) for part in REFUSALS[name].named), lines


def test_states_in_each_others_place_stop_the_server(target: Path, draft: Path, tmp_path: Path) -> None:
    """The proof at start, on a real server: nothing else would tell."""
    words = servers.arguments(target, draft, *servers.CHAIN)
    env = changed(tmp_path, "sglang_eagle3_ext.host.capture", SWAPPED)
    code, error = servers.run_to_exit(words, command=servers.LAUNCH, env=env, cwd=tmp_path)
    assert code != 0
    assert "embedding (boundary 0): got layer 3 output;" in error
    assert "layer 3 output (boundary 4): got embedding;" in error
    assert "ready to roll" not in error


def test_a_contract_that_breaks_in_a_worker_stops_a_server_with_a_declared_draft(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    words = servers.arguments(target, draft, *servers.CHAIN)
    code, error = servers.run_to_exit(words, command=servers.LAUNCH, env=broken(tmp_path, IN_WORKERS), cwd=tmp_path)
    assert code != 0
    assert f"{draft}: declares its assembly in eagle3_ext, which stock SGLang does not read" in error
    assert f"{IN_WORKERS}: not found" in error
    assert "ready to roll" not in error


# ---- launches that must fall back to stock ------------------------------------------------------------------


@pytest.mark.parametrize("symbol", [IN_EVERY_PROCESS, IN_WORKERS])
def test_broken_contract_leaves_other_drafts_to_stock(
    answers: Recorder,
    prompts: list[list[int]],
    target: Path,
    stock_draft: Path,
    tmp_path: Path,
    symbol: str,
) -> None:
    log = tmp_path / "fallback.log"
    with servers.serve(
        log, servers.arguments(target, stock_draft, *servers.CHAIN), env=broken(tmp_path, symbol)
    ) as server:
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
