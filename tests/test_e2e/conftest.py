"""The demo pair, its variants, and each server's answers, made once for all end-to-end tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

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


@dataclass(frozen=True)
class Kind:
    """One way to serve: the draft (none: no speculation), its flags, and how much is asked."""

    draft: str | None
    flags: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = servers.LAUNCH
    tokens: int = TOKENS
    prompts: int = 8


@dataclass
class Recorder:
    """Runs each kind of server once, when a test first asks for it, and remembers its answers and its log."""

    prompts: Sequence[Sequence[int]]
    folder: Path
    target: Path
    drafts: Mapping[str, Path]
    done: dict[str, list[servers.Answer]] = field(default_factory=dict)

    KINDS: ClassVar[Mapping[str, Kind]] = {
        "baseline": Kind(None, (), tokens=TOKENS + LOOKAHEAD, prompts=24),
        "chain": Kind("demo", servers.CHAIN, prompts=24),
        "tree": Kind("demo", servers.TREE, prompts=24),
        "permuted": Kind("permuted", servers.CHAIN, command=servers.SERVE),
        "plugin_on": Kind("stock", servers.CHAIN, env={"EAGLE3_EXT_KERNELS": "off"}),
        "plugin_off": Kind("stock", servers.CHAIN, env={"EAGLE3_EXT": "off"}),
        "plugin_on_tree": Kind("stock", servers.TREE, env={"EAGLE3_EXT_KERNELS": "off"}),
        "plugin_off_tree": Kind("stock", servers.TREE, env={"EAGLE3_EXT": "off"}),
        "misread": Kind("demo", servers.CHAIN, env={"EAGLE3_EXT": "off"}),
    }

    def log(self, name: str) -> str:
        """Return what a server of this kind logged."""
        self(name)
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def __call__(self, name: str) -> list[servers.Answer]:
        """Return a server's greedy answers in float32, prompt by prompt."""
        if name not in self.done:
            kind = self.KINDS[name]
            words = servers.arguments(self.target, self.drafts.get(kind.draft or ""), *kind.flags)
            with servers.serve(self.folder / f"{name}.log", words, command=kind.command, env=kind.env) as server:
                self.done[name] = [
                    server.complete(p, kind.tokens, ignore_eos=True) for p in self.prompts[: kind.prompts]
                ]
        return self.done[name]


@pytest.fixture(scope="session")
def answers(
    prompts: list[list[int]],
    target: Path,
    draft: Path,
    permuted_draft: Path,
    stock_draft: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Recorder:
    drafts = {"demo": draft, "permuted": permuted_draft, "stock": stock_draft}
    return Recorder(prompts, tmp_path_factory.mktemp("servers"), target, drafts)
