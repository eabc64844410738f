"""How a refused launch ends: with the message alone on SGLang's command line, with an exception elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from sglang_eagle3_ext.errors import CheckpointError


def report_without_traceback() -> None:
    """On SGLang's own command line, end with the message alone; a caller of ``Engine`` keeps his traceback."""
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)
    if module not in ("sglang.launch_server", "sglang.cli.main", "sglang.__main__") and (
        Path(sys.argv[0]).name != "sglang"
    ):
        return
    previous = sys.excepthook

    def one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, CheckpointError):
            previous(kind, error, trace)
            return
        for line in str(error).splitlines():
            sys.stderr.write(f"sglang-eagle3: {line}\n")
        sys.stderr.flush()

    sys.excepthook = one_line
