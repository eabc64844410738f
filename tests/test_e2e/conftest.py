"""The demo pair, its variants, and each server's answers, made once for all end-to-end tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

import servers

ROOT = Path(__file__).parents[2]
TOKENS = 40
LOOKAHEAD = 3
"""Tokens that the run without speculation writes beyond an answer, so that the last verify step is known."""


@pytest.fixture(scope="session")
def target() -> Path:
    """The demo target, dequantised on first use."""
    folder = ROOT / ".demo" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, str(ROOT / "benchmarks/demo/target.py")], check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def draft() -> Path:
    """The demo draft as committed: it declares its sources, stock reads nothing of them."""
    return ROOT / "benchmarks" / "demo" / "draft"


def variant(source: Path, folder: Path, config: Mapping[str, object], order: Sequence[int] | None = None) -> Path:
    """Copy a draft with other config keys (``None`` drops one) and, optionally, its fc blocks in another order."""
    folder.mkdir()
    merged = json.loads((source / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}, indent=1))
    if order is None:
        shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")
        return folder
    tensors = load_file(source / "model.safetensors")
    blocks = tensors["fc.weight"].chunk(len(order), dim=1)
    tensors["fc.weight"] = torch.cat([blocks[i] for i in order], dim=1).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def permuted_draft(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft re-saved with its blocks as [layer15, embed, layer3], declared so."""
    return variant(
        draft,
        tmp_path_factory.mktemp("drafts") / "permuted",
        {"eagle3_ext": {"sources": ["layer15", "embed", "layer3"]}},
        order=(2, 0, 1),
    )


@pytest.fixture(scope="session")
def stock_draft(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft with the id list that stock reads right, and nothing of ours."""
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 3, 15]}
    return variant(draft, tmp_path_factory.mktemp("drafts") / "stock", {"eagle3_ext": None, "eagle_config": ids})


@pytest.fixture(scope="session")
def prompts(target: Path) -> list[list[int]]:
    """Token ids of 24 questions in the target's chat format."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    groups = json.loads((ROOT / "benchmarks/demo/prompts_eval.json").read_text())
    questions = [q["prompt"] for q in groups["unseen"][:16] + groups["seen"][:8]]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


@dataclass
class Recorder:
    """Runs a server over all prompts once and remembers what it answered and what it logged."""

    prompts: Sequence[Sequence[int]]
    folder: Path
    done: dict[str, list[servers.Answer]] = field(default_factory=dict)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def run(self, name: str, words: Sequence[str], tokens: int = TOKENS, **options: object) -> list[servers.Answer]:
        if name not in self.done:
            with servers.serve(self.folder / f"{name}.log", words, **options) as server:  # type: ignore[arg-type]
                self.done[name] = [server.complete(p, tokens, ignore_eos=True) for p in self.prompts]
        return self.done[name]


@pytest.fixture(scope="session")
def recorder(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(prompts, tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def answers(
    recorder: Recorder, target: Path, draft: Path, permuted_draft: Path, stock_draft: Path
) -> Callable[[str], list[servers.Answer]]:
    """Every server's answers in float32; two servers run at a time, one thread each."""
    plain = servers.arguments(target, None)
    off = {"EAGLE3_EXT_KERNELS": "off"}
    runs: list[Callable[[], object]] = [
        lambda: recorder.run("baseline", plain, tokens=TOKENS + LOOKAHEAD),
        lambda: recorder.run("chain", servers.arguments(target, draft, *servers.CHAIN)),
        lambda: recorder.run("tree", servers.arguments(target, draft, *servers.TREE)),
        lambda: recorder.run(
            "permuted", servers.arguments(target, permuted_draft, *servers.CHAIN), command=servers.SERVE
        ),
        lambda: recorder.run("plugin_on", servers.arguments(target, stock_draft, *servers.CHAIN), env=off),
        lambda: recorder.run(
            "plugin_off", servers.arguments(target, stock_draft, *servers.CHAIN), env={"EAGLE3_EXT": "off"}
        ),
        lambda: recorder.run("plugin_on_tree", servers.arguments(target, stock_draft, *servers.TREE), env=off),
        lambda: recorder.run(
            "plugin_off_tree",
            servers.arguments(target, stock_draft, *servers.TREE),
            env={"EAGLE3_EXT": "off"},
        ),
        lambda: recorder.run("misread", servers.arguments(target, draft, *servers.CHAIN), env={"EAGLE3_EXT": "off"}),
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        for future in [pool.submit(r) for r in runs]:
            future.result()
    return recorder.done.__getitem__
