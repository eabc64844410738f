"""The two entry points SGLang calls."""

from __future__ import annotations

import os


def activate_platform() -> str | None:
    """Offer the CPU platform, only when it was asked for by name (``SGLANG_PLATFORM=eagle3_ext``)."""
    if os.environ.get("SGLANG_PLATFORM") != "eagle3_ext":
        return None
    return "sglang_eagle3_ext.host.cpu.platform.Eagle3CpuPlatform"


def register() -> None:
    """Register with SGLang everything this package adds to it."""
    if os.environ.get("SGLANG_PLATFORM") == "eagle3_ext":
        from sglang_eagle3_ext.host import cpu

        cpu.register()
