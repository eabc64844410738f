"""What happens when our hooks cannot be placed: stock serves what it can, and nothing it would serve wrong."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import config, contract
from sglang_eagle3_ext.host.exit import report_without_traceback
from sglang_eagle3_ext.host.flags import find

logger = logging.getLogger(__name__)

_DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")

_reason: str | None = None


def refused() -> bool:
    """Say whether this package is not active in this process, because SGLang lacks what it needs."""
    return _reason is not None


def refuse(reason: str) -> None:
    """Log the reason and refuse drafts that carry ``eagle3_ext``; every other model is left to stock.

    Hooks that stand already do nothing from now on.

    Raises:
        SystemExit: no seam is left to refuse at, and the command line names such a draft.
    """
    global _reason
    if _reason is not None:
        return
    _reason = reason
    logger.error(
        "sglang-eagle3-ext is not active, EAGLE-3 drafts are served by stock's rules: %s run: sglang-eagle3 doctor",
        reason,
    )
    placed = [seam for seam in CHECKS if _place_check(seam)]
    draft = _draft_on_command_line(sys.argv)
    if not placed and draft is not None and "eagle3_ext" in config.peek(draft, None):
        raise SystemExit(f"sglang-eagle3: {_message(draft, reason)}")


def _place_check(seam: str) -> bool:
    """Place the check of a seam, unless it came with our hooks; say whether it stands."""
    if contract.problems(rows=contract.rows_of(seam)):
        return False
    try:
        from sglang.srt.plugins.hook_registry import HookType

        from sglang_eagle3_ext.host import seams

        if seam not in seams.placed():
            seams.place([seams.Hook(seam, CHECKS[seam], HookType.AFTER)])
        return seam in seams.placed()
    except Exception:
        # What is missing may be what our own table of hooks is made of; SGLang applies its own once plugins are loaded.
        logger.debug("%s: a check could not be placed by our own table of hooks", seam, exc_info=True)
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(seam, CHECKS[seam], HookType.AFTER)
        return True
    except Exception:
        logger.exception("%s: no check could be placed", seam)
        return False


def unless_refused(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook do nothing once this package is not active: SGLang goes on with what it had."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        return None if refused() else hook(*args, **kwargs)

    return run


def around_unless_refused(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook around a function of SGLang's only call it, once this package is not active."""

    @wraps(hook)
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if refused() else hook(original, *args, **kwargs)

    return run


def check_launch(_result: Any, server_args: Any) -> None:
    """Refuse in the launcher, where flags and checkpoint are in hand (AFTER ``handle_speculative_decoding``)."""
    if _reason is None:
        return
    from sglang.srt.arg_groups.model_override_base import resolving_view

    args = resolving_view(server_args)
    draft = args.speculative_draft_model_path
    if draft is not None:
        override = json.loads(args.json_model_override_args or "{}")
        _refuse(_reason, draft, args.speculative_draft_model_revision, override)


def check_config(_result: Any, model_config: Any) -> None:
    """Refuse where a draft's config is read (AFTER ``ModelConfig._config_draft_model``)."""
    if _reason is not None and model_config.is_draft_model:
        _refuse(_reason, model_config.model_path, model_config.revision, model_config.model_override_args)


CHECKS: dict[str, Callable[..., None]] = {
    contract.LAUNCHER_SEAM: check_launch,
    contract.DRAFT_CONFIG_SEAM: check_config,
}
"""Where a draft can be refused, and by what, AFTER the seam."""


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
