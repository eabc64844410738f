"""The two entry points SGLang calls.

SGLang logs and swallows what a plugin raises, so nothing here may fail half-way: either every hook is
placed, or stock stays untouched, one ERROR line says why, and a draft that carries ``eagle3_ext`` (which
stock would serve by its own rules) is refused.
"""

from __future__ import annotations

import logging
import os

from sglang_eagle3_ext.errors import UnsupportedError

logger = logging.getLogger(__name__)

_PLATFORM = "eagle3_ext"


def activate_platform() -> str | None:
    """Offer the CPU platform, only when it was asked for by name (``SGLANG_PLATFORM=eagle3_ext``)."""
    if os.environ.get("SGLANG_PLATFORM") != _PLATFORM:
        return None
    return "sglang_eagle3_ext.host.cpu.platform.Eagle3CpuPlatform"


def register() -> None:
    """Register with SGLang everything this package adds to it, or nothing and say why."""
    from sglang_eagle3_ext.host import guard
    from sglang_eagle3_ext.host.switches import read_switches

    try:
        if os.environ.get("SGLANG_PLATFORM") == _PLATFORM:
            _require("cpu")
            from sglang_eagle3_ext.host import cpu

            cpu.register()
        _require("start")
        if read_switches().ext:
            place_hooks()
        else:
            logger.info("EAGLE3_EXT=off: stock SGLang serves EAGLE-3 drafts by its own rules.")
    except Exception as error:
        # SGLang would swallow it and serve drafts that declare their assembly by stock's rules.
        guard.refuse(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}.")


def _require(stage: str) -> None:
    """Check one stage of the contract.

    Raises:
        UnsupportedError: it does not hold; names every problem.
    """
    from sglang_eagle3_ext.host import contract

    problems = contract.problems(stage)
    if problems:
        raise UnsupportedError(
            f"this SGLang ({contract.installed_version()}) lacks what sglang-eagle3-ext needs of it (made for "
            f"{contract.REFERENCE_VERSION}): {' '.join(problems)}"
        )


def place_hooks() -> None:
    """Place every hook of the contract."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_eagle3_ext.host import capture, config, contract, launcher, startup, watch
    from sglang_eagle3_ext.host.switches import read_switches

    HookRegistry.register(contract.LAUNCHER_SEAM, launcher.check_draft, HookType.BEFORE)
    HookRegistry.register(contract.LAUNCHER_SEAM, launcher.check_launch, HookType.AFTER)
    HookRegistry.register(contract.CONFIG_PARSER_SEAM, config.parse_draft_config, HookType.AROUND)
    HookRegistry.register(contract.MISTRAL_PARSER_SEAM, config.parse_mistral_config, HookType.AROUND)
    HookRegistry.register(contract.DRAFT_CONFIG_SEAM, config.normalise_draft_config, HookType.AFTER)
    HookRegistry.register(contract.QUANTISATION_FILE_SEAM, config.read_no_quantisation, HookType.AROUND)
    HookRegistry.register(contract.QUANTISATION_SEAM, config.inherit_no_quantisation, HookType.BEFORE)
    HookRegistry.register(contract.CONTEXT_SEAM, config.extend_positions, HookType.BEFORE)
    HookRegistry.register(contract.MODEL_CLASS_SEAM, startup.register_models, HookType.BEFORE)
    HookRegistry.register(contract.PLAN_SEAM, config.resolve_plan, HookType.AFTER)
    HookRegistry.register(contract.CAPTURE_SEAM, capture.configure_capture, HookType.AROUND)
    HookRegistry.register(contract.FINAL_NORM_SEAM, capture.final_norm, HookType.AROUND)
    HookRegistry.register(contract.EMBED_SEAM, capture.embed_and_head, HookType.AROUND)
    HookRegistry.register(contract.BACKENDS_SEAM, startup.register_backend, HookType.BEFORE)
    HookRegistry.register(contract.REPORT_SEAM, startup.report, HookType.AFTER)
    if read_switches().watch:
        HookRegistry.register(contract.REPORT_SEAM, watch.start, HookType.AFTER)
        HookRegistry.register(contract.ACCEPT_SEAM, watch.count, HookType.AFTER)
        HookRegistry.register(contract.WEIGHTS_SEAM, watch.restart, HookType.AFTER)
