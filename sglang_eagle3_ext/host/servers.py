"""Start SGLang servers, watch them come up, and stop them whatever happens, this process being killed included."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.variants import set_aside

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_TAIL_LINES = 25

PORTS = range(20_000, 31_000)
"""Where a server's port is picked: below what kernels give to outgoing connections (Linux: from 32768 on).

A server binds its port only after it has imported everything; until then no connection may be given it.
"""

_given: set[int] = set()
"""Ports that were picked in this process: servers that start together have not bound them yet."""

GRACE_S = 10
"""How long a server may take to end when it is asked to."""

_GUARD = """
read -r _
kill -s TERM -- "-$1"
i=0
while [ "$i" -lt "$2" ]; do
    sleep 1
    kill -s 0 -- "-$1" || exit 0
    i=$((i + 1))
done
kill -s KILL -- "-$1"
"""
"""What a shell of its own does for a server: it waits until our end of a pipe closes, then ends the server's group.

No code of ours runs in a process that is killed. The kernel's parent-death signal would reach the server alone: what
it is just starting has not asked for that signal yet.
"""


class ServerError(RuntimeError):
    """Say that a server died, did not become ready or did not answer, with the tail of its log."""


@dataclass
class Server:
    """One server process of a comparison.

    Attributes:
        name: what the table calls it.
        command: the full command but for ``--port``.
        environment: what is set on top of this process's environment.
        log: file that takes everything the server prints; one that is there gets a backup name.
        port: filled when it starts.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Name the address the server listens on."""
        return f"http://127.0.0.1:{self.port}"

    def shell_command(self) -> str:
        """Write the command as one would type it, one flag a line."""
        words = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        for word in [*self.command, "--port", str(self.port)]:
            words.append(("\\\n    " if word.startswith("--") else "") + shlex.quote(word))
        return " ".join(words)

    def start(self) -> None:
        """Start the server in a process group of its own, on a free port; it does not outlive this process."""
        self.port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        set_aside(self.log)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self._process.pid), str(GRACE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_ready(self) -> bool:
        """Ask the server for a token.

        Raises:
            ServerError: the process has ended.
        """
        if self._process is None or self._process.poll() is not None:
            code = self._process and self._process.returncode
            raise self.error(f"ended with code {code}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def send(self, signum: int) -> bool:
        """Send a signal to the server and everything it started; say whether anything of it is left."""
        if self._process is None:
            return False
        self._process.poll()  # reaps the leader; its group lives on while a member does
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            return False
        return True

    def dismiss_guard(self) -> None:
        """Let go of what would end the server with this process; it has ended."""
        if self._guard is not None:
            # First, since it would act when the pipe closes, on a number that may be somebody else's by now.
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def error(self, what: str) -> ServerError:
        """Build the error that says what the server did, with the tail of its log."""
        return ServerError(
            f"server {self.name!r} {what}; expected it to serve. See the end of its log for the reason.\n"
            f"{self.log_tail()}"
        )

    def log_tail(self) -> str:
        """Return the last lines of the log and where the rest is."""
        # SGLang logs all of its arguments on one line of 15 kB.
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "server_args={" not in line]
        shown = [line[:400] for line in lines[-LOG_TAIL_LINES:]]
        return "\n".join([f"--- last {len(shown)} lines of {self.log}", *shown, f"--- end of {self.log}"])


def free_port() -> int:
    """Pick a port that nobody listens on now, that no connection is given later, and that was not picked before.

    Raises:
        ServerError: every port tried is taken.
    """
    left = [port for port in PORTS if port not in _given]
    for port in random.SystemRandom().sample(left, min(100, len(left))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise ServerError(
        f"--port: got none that is free among those tried of {PORTS.start} to {PORTS.stop - 1}; expected one for a "
        "server. End what listens there."
    )


def wait_ready(servers: Sequence[Server], timeout_s: float) -> None:
    """Wait until every server answers, with a progress bar.

    Raises:
        ServerError: one of them ended, or the time is up; carries the tail of its log.
    """
    waiting = list(servers)
    deadline = time.monotonic() + timeout_s
    with progress(len(servers), "starting servers") as bar:
        while waiting:
            bar.set_postfix_str("waiting for " + ", ".join(server.name for server in waiting), refresh=False)
            bar.update(0)
            for server in [server for server in waiting if server.is_ready()]:
                waiting.remove(server)
                bar.update()
            if waiting and time.monotonic() > deadline:
                raise ServerError("\n".join(str(s.error(f"is not ready after {timeout_s:.0f} s")) for s in waiting))
            time.sleep(1.0 if waiting else 0.0)


def progress(total: int, what: str) -> tqdm[Any]:
    """Return a progress bar that moves on a terminal and prints a line now and then elsewhere.

    Raises:
        UnsupportedError: tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        raise UnsupportedError(
            "tqdm: not installed; expected it for the progress bars. Install it: pip install tqdm."
        ) from None
    return tqdm(
        total=total,
        desc=what,
        bar_format="{desc}: {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}",
        mininterval=0.5 if sys.stderr.isatty() else 20.0,
    )


def stop(servers: Sequence[Server], grace_s: float = GRACE_S) -> None:
    """End servers and everything they started: politely, then for good."""
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        left = [server for server in servers if server.send(signum)]
        deadline = time.monotonic() + wait_s
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = [server for server in left if server.send(0)]
        if not left:
            break
    for server in servers:
        server.dismiss_guard()


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit``, so that every ``finally`` of a block runs.

    One that is ignored stays so: ``nohup`` asks for it.
    """

    def terminated(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    heard = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, terminated) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def running(servers: Sequence[Server], timeout_s: float = 900.0, *, at_once: bool = True) -> Iterator[None]:
    """Keep servers up for the duration of a block; they are stopped however it ends.

    Args:
        servers: what to start.
        timeout_s: how long to wait for each start.
        at_once: start all together; otherwise each one finds the others' memory taken before it sizes its own.
    """
    with signals_as_exit():
        try:
            for batch in [servers] if at_once else [[server] for server in servers]:
                for server in batch:
                    server.start()
                wait_ready(batch, timeout_s)
            yield
        finally:
            # A second Ctrl-C or SIGTERM must not leave a server behind.
            signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signals}
            stop(servers)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
