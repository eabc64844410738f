"""Start SGLang's own server on the CPU platform and ask it for greedy completions."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).parent / "sglang"), "serve")

CHAIN = (
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "4",
)
TREE = (
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "4",
    "--speculative-num-draft-tokens",
    "8",
)


@dataclass(frozen=True)
class Answer:
    """One completion: its token ids, and how often 0, 1, ... drafts were accepted in a verify step."""

    ids: tuple[int, ...]
    histogram: tuple[int, ...]
    verify_steps: int


@dataclass
class Server:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: Mapping[str, object], timeout: float = 600.0) -> dict[str, object]:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer: dict[str, object] = json.load(response)
            return answer

    def complete(self, input_ids: Sequence[int], tokens: int, **sampling: object) -> Answer:
        """Ask for one greedy completion of exactly ``tokens`` tokens or up to the end of the text."""
        got = self.post(
            "/generate",
            {
                "input_ids": list(input_ids),
                "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling},
            },
        )
        meta = got["meta_info"]
        assert isinstance(meta, dict)
        ids = got["output_ids"]
        assert isinstance(ids, list)
        return Answer(
            tuple(ids),
            tuple(meta.get("spec_correct_drafts_histogram") or ()),
            meta.get("spec_verify_ct") or 0,
        )


def free_port() -> int:
    """Pick a port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Build the environment of a CPU server; nothing of the caller's own switches leaks in."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    env |= {"SGLANG_PLATFORM": "eagle3_ext", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return env | dict(extra or {})


def arguments(target: Path, draft: Path | None, *flags: str, dtype: str = "float32") -> list[str]:
    """Spell a server's command line without its port."""
    words = [
        "--model-path",
        str(target),
        "--device",
        "cpu",
        "--attention-backend",
        "eagle3_cpu",
        "--dtype",
        dtype,
    ]
    words += ["--max-total-tokens", "8192", "--max-running-requests", "8", "--skip-server-warmup"]
    if draft is not None:
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    return [*words, *flags]


@contextmanager
def serve(
    log: Path,
    words: Sequence[str],
    *,
    command: Sequence[str] = LAUNCH,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Iterator[Server]:
    """Run a server for the length of a ``with`` block; its whole process group ends with it."""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *words, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(env),
            cwd=log.parent,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait(server, timeout)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def run_to_exit(
    words: Sequence[str],
    *,
    command: Sequence[str] = LAUNCH,
    env: Mapping[str, str] | None = None,
    cwd: Path,
    timeout: float = 600.0,
) -> tuple[int, str, str]:
    """Run a server that must refuse to start; return (exit code, stdout, stderr)."""
    process = subprocess.Popen(
        [*command, *words, "--host", "127.0.0.1", "--port", str(free_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(env),
        cwd=cwd,
        start_new_session=True,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def _wait(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    lines = [x for x in server.log.read_text(errors="replace").splitlines() if "server_args=" not in x]
    raise RuntimeError(
        f"the server did not come up (exit {server.process.poll()}); its log ends:\n" + "\n".join(lines[-40:])
    )
