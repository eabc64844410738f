"""The two entry points SGLang calls.

SGLang logs and swallows what a plugin raises, so nothing here may fail half-way: either every hook is
placed, or stock stays untouched, one ERROR line says why, and a draft that carries ``eagle3_ext`` (which
stock would serve by its own rules) is refused.

Hooks are placed, and the symbols they rely on checked, as SGLang imports its modules (``seams``).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from sglang_eagle3_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang_eagle3_ext.host.contract import Row
    from sglang_eagle3_ext.host.seams import Hook

logger = logging.getLogger(__name__)

_PLATFORM = "eagle3_ext"


def activate_platform() -> str | None:
    """Offer the CPU platform, only when it was asked for by name (``SGLANG_PLATFORM=eagle3_ext``)."""
    if os.environ.get("SGLANG_PLATFORM") != _PLATFORM:
        return None
    return "sglang_eagle3_ext.host.cpu.platform.Eagle3CpuPlatform"


def register() -> None:
    """Register with SGLang everything this package adds to it, or nothing and say why."""
    from sglang_eagle3_ext.host import contract, guard
    from sglang_eagle3_ext.host.switches import read_switches

    try:
        on_cpu = os.environ.get("SGLANG_PLATFORM") == _PLATFORM
        if multiprocessing.parent_process() is None and contract.installed_version() != contract.REFERENCE_VERSION:
            # Another release may lack anything: better to learn it before a worker starts, for seconds of imports.
            contract.require("start", *(["cpu"] if on_cpu else []))
        if on_cpu:
            from sglang_eagle3_ext.host import cpu

            cpu.register()
        if read_switches().ext:
            place_hooks()
        else:
            logger.info("EAGLE3_EXT=off: stock SGLang serves EAGLE-3 drafts by its own rules.")
    except Exception as error:
        # SGLang would swallow it and serve drafts that declare their assembly by stock's rules.
        guard.refuse(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}.")


def place_hooks() -> None:
    """Place every hook of the contract, in modules that SGLang has imported at once and in others as it does."""
    from sglang_eagle3_ext.host import contract, seams

    hooks = all_hooks()
    seams.on_import(
        {
            module: partial(_arrive, rows, [hook for row in rows for hook in hooks if hook.seam == row.target])
            for module, rows in contract.by_module("start").items()
        }
    )


def _arrive(rows: Sequence[Row], hooks: Sequence[Hook]) -> None:
    """Check what is relied upon in a module, and place its hooks, unless this package had to refuse."""
    from sglang_eagle3_ext.host import contract, guard, seams

    try:
        if guard.refused():
            seams.place([h for h in hooks if h.function in guard.CHECKS.values() and h.seam not in seams.placed()])
            return
        contract.require(rows=rows)
        seams.place(hooks)
        failed = {hook.seam for hook in hooks} - seams.placed()
        if failed:
            raise UnsupportedError(f"hooks could not be placed at {', '.join(sorted(failed))}; SGLang's log says why.")
    except Exception as error:
        guard.refuse(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}.")


def all_hooks() -> list[Hook]:
    """List every hook, in the order in which those at one seam wrap it."""
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_eagle3_ext.host import capture, config, contract, guard, launcher, startup, watch
    from sglang_eagle3_ext.host.seams import Hook
    from sglang_eagle3_ext.host.switches import read_switches

    hooks = [
        Hook(contract.LAUNCHER_SEAM, launcher.check_draft, HookType.BEFORE),
        Hook(contract.LAUNCHER_SEAM, launcher.check_launch, HookType.AFTER),
        Hook(contract.CONFIG_PARSER_SEAM, config.parse_draft_config, HookType.AROUND),
        Hook(contract.MISTRAL_PARSER_SEAM, config.parse_mistral_config, HookType.AROUND),
        Hook(contract.DRAFT_CONFIG_SEAM, config.normalise_draft_config, HookType.AFTER),
        Hook(contract.QUANTISATION_FILE_SEAM, config.read_no_quantisation, HookType.AROUND),
        Hook(contract.QUANTISATION_SEAM, config.inherit_no_quantisation, HookType.BEFORE),
        Hook(contract.CONTEXT_SEAM, config.extend_positions, HookType.BEFORE),
        Hook(contract.MODEL_CLASS_SEAM, startup.register_models, HookType.BEFORE),
        Hook(contract.PLAN_SEAM, config.resolve_plan, HookType.AFTER),
        Hook(contract.CAPTURE_SEAM, capture.configure_capture, HookType.AROUND),
        Hook(contract.FINAL_NORM_SEAM, capture.final_norm, HookType.AROUND),
        Hook(contract.EMBED_SEAM, capture.embed_and_head, HookType.AROUND),
        Hook(contract.BACKENDS_SEAM, startup.register_backend, HookType.BEFORE),
        Hook(contract.REPORT_SEAM, startup.report, HookType.AFTER),
    ]
    if read_switches().watch:
        hooks += [
            Hook(contract.REPORT_SEAM, watch.start, HookType.AFTER),
            Hook(contract.ACCEPT_SEAM, watch.count, HookType.AFTER),
            Hook(contract.WEIGHTS_SEAM, watch.restart, HookType.AFTER),
        ]
    guarded = [
        hook._replace(
            function=guard.around_unless_refused(hook.function)
            if hook.kind is HookType.AROUND
            else guard.unless_refused(hook.function)
        )
        for hook in hooks
    ]
    return guarded + [Hook(seam, check, HookType.AFTER) for seam, check in guard.CHECKS.items()]
