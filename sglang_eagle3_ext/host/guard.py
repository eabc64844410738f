"""What happens when our hooks cannot be placed: stock serves what it can, and nothing it would serve wrong."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import config, contract

logger = logging.getLogger(__name__)

_DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")


def refuse(reason: str) -> None:
    """Log the reason and refuse drafts that carry ``eagle3_ext``; every other model is left to stock.

    Raises:
        SystemExit: the launcher seam itself is gone and the command line names such a draft.
    """
    logger.error(
        "sglang-eagle3-ext is not active, EAGLE-3 drafts are served by stock's rules: %s run: sglang-eagle3 doctor",
        reason,
    )
    seam = tuple(row for row in contract.ROWS if row.target == contract.LAUNCHER_SEAM)
    if contract.problems(rows=seam):
        draft = _draft_on_command_line(sys.argv)
        if draft is not None and "eagle3_ext" in config.peek(draft, None):
            raise SystemExit(f"sglang-eagle3: {_message(draft, reason)}")
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def check(_result: Any, server_args: Any) -> None:
        from sglang.srt.arg_groups.model_override_base import resolving_view

        from sglang_eagle3_ext.host.launcher import report_without_traceback

        args = resolving_view(server_args)
        draft = args.speculative_draft_model_path
        if draft is None:
            return
        declared = "eagle3_ext" in json.loads(args.json_model_override_args or "{}")
        if not declared and "eagle3_ext" not in config.peek(draft, args.speculative_draft_model_revision):
            return
        report_without_traceback()
        raise CheckpointError(_message(draft, reason))

    HookRegistry.register(contract.LAUNCHER_SEAM, check, HookType.AFTER)


def _message(draft: str, reason: str) -> str:
    return (
        f"{draft}: declares its assembly in eagle3_ext, which stock SGLang does not read; expected "
        f"sglang-eagle3-ext to be active. {reason.rstrip('.')}. Run: sglang-eagle3 doctor"
    )


def _draft_on_command_line(argv: list[str]) -> str | None:
    for i, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag in _DRAFT_FLAGS:
            return value or (argv[i + 1] if i + 1 < len(argv) else None)
    return None
