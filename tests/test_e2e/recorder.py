"""Variants of the demo draft, and servers whose answers are asked for once and remembered."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import servers
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

TOKENS = 40
WRONG_SOURCES = (
    "--json-model-override-args", json.dumps({"eagle3_ext": {"sources": ["layer1", "layer14", "layer26"]}})
)  # fmt: skip
METRICS = "--enable-metrics"
ADJUSTED = ("--speculative-num-draft-tokens", "7")
"""Which SGLang turns into 4 for a chain of three."""
LOOKAHEAD = 3
"""Tokens that the run without speculation writes beyond an answer, so that the last verify step is known."""


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


@dataclass(frozen=True)
class Kind:
    """One way to serve: the draft (none: no speculation), its flags, how much is asked, and by how many at once."""

    draft: str | None
    flags: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = servers.LAUNCH
    tokens: int = TOKENS
    prompts: int = 8
    clients: int = 1


@dataclass
class Recorder:
    """Runs each kind of server once, when a test first asks for it, and remembers its answers and its log.

    Processes that share the folder share the answers; who asks while another one is asking waits for him.
    """

    prompts: Sequence[Sequence[int]]
    folder: Path
    target: Path
    drafts: Mapping[str, Path]
    done: dict[str, list[servers.Answer]] = field(default_factory=dict)

    KINDS: ClassVar[Mapping[str, Kind]] = {
        "baseline": Kind(None, (), tokens=TOKENS + LOOKAHEAD, prompts=24, clients=4),
        "chain": Kind("demo", servers.CHAIN, prompts=24, clients=4),
        "tree": Kind("demo", servers.TREE, prompts=24, clients=4),
        "two_ranks": Kind("demo", (*servers.CHAIN, "--tp", "2"), prompts=4),
        "permuted": Kind("permuted", servers.CHAIN, command=servers.SERVE),
        "completed": Kind("demo", servers.CHAIN, command=servers.OURS, prompts=4),
        "exported": Kind("exported", servers.CHAIN, env={"EAGLE3_EXT": "off"}),
        "plugin_on": Kind("stock", servers.CHAIN, env={"EAGLE3_EXT_KERNELS": "off"}),
        "plugin_off": Kind("stock", servers.CHAIN, env={"EAGLE3_EXT": "off"}),
        "plugin_on_tree": Kind("stock", servers.TREE, env={"EAGLE3_EXT_KERNELS": "off"}),
        "plugin_off_tree": Kind("stock", servers.TREE, env={"EAGLE3_EXT": "off"}),
        "misread": Kind("demo", servers.CHAIN, env={"EAGLE3_EXT": "off"}),
        "wrong": Kind("demo", (*servers.CHAIN, *ADJUSTED, *WRONG_SOURCES, METRICS), tokens=60, prompts=24, clients=4),
    }

    def log(self, name: str) -> str:
        """Return what a server of this kind logged."""
        self(name)
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def metrics(self, name: str) -> str:
        """Return what a server of this kind exported to Prometheus in the end."""
        self(name)
        return (self.folder / f"{name}.prom").read_text()

    def __call__(self, name: str) -> list[servers.Answer]:
        """Return a server's greedy answers in float32, prompt by prompt."""
        if name not in self.done:
            stored = self.folder / f"{name}.json"
            with FileLock(stored.with_suffix(".lock")):
                if not stored.exists():
                    stored.write_text(json.dumps([asdict(answer) for answer in self._ask(name)]))
            self.done[name] = [servers.Answer.read(answer) for answer in json.loads(stored.read_text())]
        return self.done[name]

    def _ask(self, name: str) -> list[servers.Answer]:
        kind = self.KINDS[name]
        draft = self.drafts.get(kind.draft or "")
        words = servers.arguments(self.target, draft, *kind.flags)
        if kind.command is servers.OURS:
            words = [str(draft), *servers.arguments(self.target, None, *kind.flags)]
        log = self.folder / f"{name}.log"
        with (
            servers.serve(log, words, command=kind.command, env=kind.env) as server,
            ThreadPoolExecutor(kind.clients) as clients,
        ):
            got = list(clients.map(lambda p: servers.complete(server, p, kind.tokens), self.prompts[: kind.prompts]))
            if METRICS in kind.flags:
                with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
                    (self.folder / f"{name}.prom").write_bytes(response.read())
            return got
