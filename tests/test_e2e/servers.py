"""Command lines of SGLang's own server on the CPU platform, and greedy completions from it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_eagle3_ext.host.servers import Server, free_port, running

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).parent / "sglang"), "serve")
OURS = (str(Path(sys.executable).parent / "sglang-eagle3"), "serve")
"""Takes the draft as its first argument."""

CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8")

ENVIRONMENT = {"SGLANG_PLATFORM": "eagle3_ext", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Answer:
    """One completion: its token ids, and how often 0, 1, ... drafts were accepted in a verify step."""

    ids: tuple[int, ...]
    histogram: tuple[int, ...]
    verify_steps: int

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Answer:
        """Read an answer back from JSON."""
        return cls(tuple(stored["ids"]), tuple(stored["histogram"]), stored["verify_steps"])


def complete(server: Server, input_ids: Sequence[int], tokens: int) -> Answer:
    """Ask for one greedy completion of exactly ``tokens`` tokens."""
    body = {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{server.url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        got = json.load(response)
    meta = got["meta_info"]
    return Answer(
        tuple(got["output_ids"]),
        tuple(meta.get("spec_correct_drafts_histogram") or ()),
        meta.get("spec_verify_ct") or 0,
    )


def arguments(target: Path, draft: Path | None, *flags: str) -> list[str]:
    """Spell a float32 server's arguments without its port."""
    words = ["--model-path", str(target), "--device", "cpu", "--attention-backend", "eagle3_cpu"]
    words += ["--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "8"]
    words += ["--skip-server-warmup", "--sleep-on-idle"]  # an idle SGLang spins
    if draft is not None:
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    return [*words, *flags]


@contextmanager
def serve(
    log: Path, words: Sequence[str], *, command: Sequence[str] = LAUNCH, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server for the length of a ``with`` block."""
    server = Server(log.stem, [*command, *words], log, ENVIRONMENT | dict(env or {}))
    with running([server]):
        yield server


def run_to_exit(
    words: Sequence[str], *, command: Sequence[str] = LAUNCH, env: Mapping[str, str] | None = None, cwd: Path
) -> tuple[int, str]:
    """Run a server that must refuse to start; return its exit code and what it wrote to stderr."""
    process = subprocess.Popen(
        [*command, *words, "--port", str(free_port())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT | dict(env or {}),
        cwd=cwd,
        start_new_session=True,
        text=True,
    )
    try:
        _, error = process.communicate(timeout=600)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, error


@contextmanager
def warm(folder: Path) -> Iterator[Callable[[Sequence[str]], tuple[int, str]]]:
    """Hand out launches like those of ``run_to_exit`` that share one import of SGLang."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "warm.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        launches, ends = process.stdin, process.stdout

        def launch(words: Sequence[str]) -> tuple[int, str]:
            error = folder / "error.log"
            error.unlink(missing_ok=True)
            asked = {"arguments": [*words, "--port", str(free_port())], "cwd": str(folder), "error": str(error)}
            launches.write(json.dumps(asked) + "\n")
            launches.flush()
            if not select.select([ends], [], [], 300)[0]:
                pytest.fail(f"hangs: {' '.join(words)}\n{error.read_text(errors='replace') if error.exists() else ''}")
            return int(ends.readline()), error.read_text(errors="replace")

        try:
            yield launch
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            launches.close()
