"""Servers of a comparison, with a stand-in that serves /health: they come up and never outlive their block."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_eagle3_ext.host import servers
from sglang_eagle3_ext.host.servers import Server, ServerError, free_port, running, signals_as_exit, stop

STAND_IN = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
FAILING = "import sys; print('server_args={' + 'y' * 9000); print('x' * 9000); print('the reason'); sys.exit(3)"


def server(tmp_path: Path, name: str, code: str, *words: str) -> Server:
    return Server(name, [sys.executable, "-c", code, *words], tmp_path / f"{name}.log")


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def pids_of(*servers: Server) -> list[int]:
    lines = [line.split() for s in servers for line in s.log.read_text().splitlines()]
    return [int(pid) for words in lines if words[:1] == ["pids"] for pid in words[1:]]


def guards_of(pids: list[int]) -> list[int]:
    """Find the shells that watch over servers."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_text(errors="replace").split("\0")
            if "guard" in words and set(map(str, pids)) & set(words):
                found.append(int(file.parent.name))
    return found


def wait_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_servers_answer_on_ports_of_their_own_and_end_with_the_block(tmp_path: Path):
    first, second = server(tmp_path, "first", STAND_IN), server(tmp_path, "second", STAND_IN)
    with running([first, second]):
        assert first.port != second.port
        assert first.is_ready()
        assert second.is_ready()
        pids = pids_of(first, second)
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        assert len(guards_of(pids)) == 2
    assert wait_gone(pids)
    assert not guards_of(pids)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_stops_the_servers(tmp_path: Path, error: type[BaseException]):
    one = server(tmp_path, "one", STAND_IN)
    with pytest.raises(error), running([one]):
        raise error
    assert pids_of(one)
    assert wait_gone(pids_of(one))


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang_eagle3_ext.host.servers.stop.__defaults__", (0.5,))
    one = server(tmp_path, "one", STAND_IN, "stubborn")
    with running([one]):
        pass
    assert wait_gone(pids_of(one))


def test_a_server_that_dies_shows_its_log_and_takes_the_others_along(tmp_path: Path):
    good, bad = server(tmp_path, "good", STAND_IN), server(tmp_path, "bad", FAILING)
    with pytest.raises(ServerError) as caught, running([good, bad]):
        pytest.fail("the block must not be entered")
    message = str(caught.value)
    assert message.startswith("server 'bad' ended with code 3; expected it to serve. See the end of its log")
    assert "the reason" in message
    assert str(bad.log) in message
    assert max(map(len, message.splitlines())) < 500
    assert "server_args" not in message
    assert wait_gone(pids_of(good))


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.parametrize("word", ["", "stubborn"])
def test_a_signal_to_the_caller_ends_its_servers(tmp_path: Path, signum: signal.Signals, code: int, word: str):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from sglang_eagle3_ext.host import servers
servers.stop.__defaults__, servers.GRACE_S = (0.5,), 1
log = Path({str(tmp_path / "one.log")!r})
with servers.running([servers.Server("one", [sys.executable, "-c", {STAND_IN!r}, {word!r}], log)]):
    print("up", flush=True)
    time.sleep(600)
"""
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "up\n"
    caller.stdout.close()
    pids = pids_of(server(tmp_path, "one", ""))
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    try:
        caller.send_signal(signum)
        assert caller.wait(timeout=20) == code
        assert wait_gone(pids)
        assert wait_gone(guards_of(pids))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)


def test_the_log_of_an_earlier_run_is_kept(tmp_path: Path):
    for text in ("first", "second"):
        one = server(tmp_path, "one", f"print({text!r}); raise SystemExit(3)")
        with pytest.raises(ServerError, match=text), running([one]):
            pytest.fail("the block must not be entered")
    assert (tmp_path / "one.1.log").read_text() == "first\n"
    assert (tmp_path / "one.log").read_text() == "second\n"


def test_one_after_the_other_the_next_starts_when_the_first_answers(tmp_path: Path):
    first = server(tmp_path, "first", STAND_IN)
    code = f"assert __import__('os').path.getsize({str(first.log)!r})\n" + STAND_IN
    with running([first, server(tmp_path, "second", code)], at_once=False):
        pass
    assert wait_gone(pids_of(first))


def test_a_second_sigterm_does_not_keep_servers_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang_eagle3_ext.host.servers.stop.__defaults__", (0.5,))
    one = server(tmp_path, "one", STAND_IN, "stubborn")
    before = signal.getsignal(signal.SIGTERM)

    def impatient(servers: list[Server], grace_s: float = 0.5) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stop(servers, grace_s)

    monkeypatch.setattr("sglang_eagle3_ext.host.servers.stop", impatient)
    with running([one]):
        pass
    assert wait_gone(pids_of(one))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch):
    """``nohup`` ignores SIGHUP for its child, which is to outlive the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_exit():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_printed_command_is_the_command(tmp_path: Path):
    command = ["python", "-m", "x", "--flag", "a b", "--json", '{"k": 1}']
    one = Server("one", command, tmp_path / "log", {"A": "1", "B": "two words"}, port=1234)
    printed = shlex.split(one.shell_command().replace("\\\n", " "))
    assert printed == ["A=1", "B=two words", *command, "--port", "1234"]


def test_the_printed_command_runs_in_a_shell(tmp_path: Path):
    show = "import os, sys; print(os.environ['A'], sys.argv[1:])"
    one = Server("one", [sys.executable, "-c", show, "--x", "a b"], tmp_path / "log", {"A": "1"}, port=7)
    out = subprocess.run(one.shell_command(), shell=True, capture_output=True, text=True, env=dict(os.environ))
    assert out.stdout == "1 ['--x', 'a b', '--port', '7']\n"


def test_no_outgoing_connection_is_given_a_port_we_picked() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low = int(given.read_text().split()[0]) if given.exists() else 32_768
    picked = {free_port() for _ in range(50)}
    assert max(picked) < low
    assert len(picked) == 50


def test_a_port_somebody_listens_on_is_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(servers, "PORTS", range(port, port + 1))
        with pytest.raises(ServerError, match=f"--port: got none that is free among those tried of {port} to {port};"):
            free_port()
