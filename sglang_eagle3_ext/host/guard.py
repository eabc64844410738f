"""What happens when our hooks cannot be placed: stock serves what it can, and nothing it would serve wrong."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import config, contract
from sglang_eagle3_ext.host.exit import report_without_traceback
from sglang_eagle3_ext.host.flags import find

logger = logging.getLogger(__name__)

_DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")


def refuse(reason: str) -> None:
    """Log the reason and refuse drafts that carry ``eagle3_ext``; every other model is left to stock.

    Raises:
        SystemExit: no seam is left to refuse at, and the command line names such a draft.
    """
    logger.error(
        "sglang-eagle3-ext is not active, EAGLE-3 drafts are served by stock's rules: %s run: sglang-eagle3 doctor",
        reason,
    )
    placed = False
    for seam, check in ((contract.LAUNCHER_SEAM, _refuse_launch), (contract.DRAFT_CONFIG_SEAM, _refuse_config)):
        if contract.problems(rows=tuple(row for row in contract.ROWS if row.target == seam)):
            continue
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(seam, partial(check, reason), HookType.AFTER)
        placed = True
    draft = _draft_on_command_line(sys.argv)
    if not placed and draft is not None and "eagle3_ext" in config.peek(draft, None):
        raise SystemExit(f"sglang-eagle3: {_message(draft, reason)}")


def _refuse_launch(reason: str, _result: Any, server_args: Any) -> None:
    """Refuse in the launcher, where flags and checkpoint are in hand (AFTER ``handle_speculative_decoding``)."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    args = resolving_view(server_args)
    draft = args.speculative_draft_model_path
    if draft is not None:
        override = json.loads(args.json_model_override_args or "{}")
        _refuse(reason, draft, args.speculative_draft_model_revision, override)


def _refuse_config(reason: str, _result: Any, model_config: Any) -> None:
    """Refuse where a draft's config is read (AFTER ``ModelConfig._config_draft_model``)."""
    if model_config.is_draft_model:
        _refuse(reason, model_config.model_path, model_config.revision, model_config.model_override_args)


def _refuse(reason: str, draft: str, revision: str | None, override: Mapping[str, Any]) -> None:
    if "eagle3_ext" in override or "eagle3_ext" in config.peek(draft, revision):
        report_without_traceback()
        raise CheckpointError(_message(draft, reason))


def _message(draft: str, reason: str) -> str:
    return (
        f"{draft}: declares its assembly in eagle3_ext, which stock SGLang does not read; expected "
        f"sglang-eagle3-ext to be active. {reason.rstrip('.')}. Run: sglang-eagle3 doctor"
    )


def _draft_on_command_line(argv: list[str]) -> str | None:
    for i, word in enumerate(argv):
        value = word.partition("=")[2]
        if find([word], _DRAFT_FLAGS):
            return value or (argv[i + 1] if i + 1 < len(argv) else None)
    return None
