"""A plugin of SGLang's, for tests: this package's Triton kernels run in the corrected interpreter, on CPU tensors.

It is what ``TRITON_INTERPRET=1`` would be, had Triton's own interpreter the arithmetic of a GPU: kernels serve on the
CPU. Every launch of any Triton kernel in the process is noted, one name a line, in the file that
``INTERPRETED_LAUNCHES`` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Interpret this package's kernels in this process and note launches (called by SGLang's plugin loader)."""
    import interpreter  # of tests/, while Triton still compiles: it needs the language compiled
    import triton
    from sglang_eagle3_ext.kernels import fc_proj, norm_concat, split_merge, tree_verify_gqa, tree_verify_mla
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    interpreter.interpret(fc_proj, norm_concat, split_merge, tree_verify_gqa, tree_verify_mla)
    log = os.open(os.environ["INTERPRETED_LAUNCHES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noting(launch: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            os.write(log, f"{kind} {self.fn.__name__}\n".encode())
            return launch(self, *args, **kwargs)

        return call

    GridExecutor.__call__ = noting(GridExecutor.__call__, "interpreted")
    JITFunction.run = noting(JITFunction.run, "compiled")
    triton.knobs.propagate_env = False  # each process of the server comes by here itself
    triton.knobs.runtime.interpret = True
