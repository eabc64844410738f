"""An interpreter that has imported SGLang and loaded its plugins, forked for every launch.

Nearly all of a launch that is refused is that. Each line of standard input is a launch as JSON: its ``arguments``, its
folder ``cwd`` and the file for its ``error`` output; each line of output is its exit code. What a fork runs is
``sglang.launch_server`` itself, as ``-m`` runs it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from typing import Any

from sglang.launch_server import load_plugins

LONGEST_S = 240.0
"""After which a launch hangs, and is killed: its exit code then says so."""


def launch(arguments: list[str], cwd: str, error: str) -> None:
    """Become the command, and end as the interpreter ends it."""
    os.setsid()
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    sys.argv = ["launch_server", *arguments]
    code: Any = 0
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException as problem:
        sys.excepthook(type(problem), problem, problem.__traceback__)
        code = 1
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    """Launch what is asked for, one at a time."""
    load_plugins()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            launch(**asked)
        ends = time.monotonic() + LONGEST_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.02)
            if time.monotonic() > ends:
                os.killpg(child, signal.SIGKILL)
        status = ended[1]
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
