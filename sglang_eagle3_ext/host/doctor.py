"""Is this environment fit to serve drafts with this package?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import contract
from sglang_eagle3_ext.host.cpu import BACKEND
from sglang_eagle3_ext.host.switches import read_switches

_NAME = "eagle3_ext"
_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_CPU_PLATFORM = "Eagle3CpuPlatform"

# What a fresh process really has after SGLang loaded its plugins; printed as JSON on the last line.
_PROBE = """
import importlib, json, logging, os, types
logging.disable(logging.CRITICAL)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_eagle3_ext.host import contract, plugin, seams
for module in contract.by_module("start"):
    importlib.import_module(module)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.platforms import current_platform
hooks = sorted(seams.placed())
wanted = sorted({hook.seam for hook in plugin.all_hooks()})
hf_config = types.SimpleNamespace(architectures=["LlamaForCausalLMEagle3"], eagle3_ext_draft="doctor")
cls, _ = get_model_architecture(types.SimpleNamespace(hf_config=hf_config, quantization=None, model_impl="auto"))
if os.environ.get("SGLANG_PLATFORM") == "eagle3_ext":
    current_platform.init_backend()
print(json.dumps({"model_class": f"{cls.__module__}.{cls.__name__}", "hooks": hooks,
                  "seams": wanted, "replaced": list(seams.problems(wanted)),
                  "backends": sorted(ATTENTION_BACKENDS), "platform": type(current_platform).__name__}))
"""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    status: Literal["ok", "warn", "FAIL"]
    name: str
    text: str


def run(as_json: bool = False) -> int:
    """Check the environment and print the report.

    Returns:
        1 when any check failed, else 0.
    """
    checks = examine()
    failed = any(c.status == "FAIL" for c in checks)
    if as_json:
        sys.stdout.write(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}, indent=2) + "\n")
    else:
        for check in checks:
            sys.stdout.write(f"[{check.status:<4}] {check.name}: {check.text}\n")
    return 1 if failed else 0


def examine() -> list[Check]:
    """Run every check, the cheap ones first; the one that starts a process only when SGLang is there.

    What takes long is announced on stderr before it begins.
    """
    _announce("versions, entry points, filters, switches and imports")
    plugin_filters, switches = filters(), _switches()
    checks = [_versions(), *_entry_points(), plugin_filters, switches, *_shadows()]
    if importlib.util.find_spec("sglang") is None:
        return checks
    if plugin_filters.status == "FAIL":
        return [*checks, Check("warn", "contract", "not examined while SGLang filters this package out")]
    _announce(f"{len(contract.ROWS)} symbols of SGLang, which is imported for it: seconds, a minute on a busy machine")
    problems = contract.problems()
    checks += [Check("FAIL", "contract", p) for p in problems] or [
        Check("ok", "contract", f"all {len(contract.ROWS)} symbols of SGLang have the shape we need")
    ]
    if not problems and switches.status != "FAIL":
        _announce("what a fresh process of SGLang has: as long again")
        checks += _fresh_process()
    return checks


def _announce(what: str) -> None:
    sys.stderr.write(f"checking {what}\n")
    sys.stderr.flush()


def _versions() -> Check:
    have = contract.installed_version()
    if have is None:
        return Check(
            "FAIL",
            "versions",
            f"SGLang is not installed in {sys.executable}; expected {contract.REFERENCE_VERSION}. "
            'Install it: pip install "sglang-eagle3-ext[host]"',
        )
    found = [f"sglang {have}"]
    for name in ("sglang-eagle3-ext", "torch", "triton", "transformers", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    text = ", ".join(found)
    if have != contract.REFERENCE_VERSION:
        return Check("warn", "versions", f"{text}; tested with sglang {contract.REFERENCE_VERSION} only")
    return Check("ok", "versions", text)


def _entry_points() -> list[Check]:
    checks = []
    for group in _GROUPS:
        if any(e.name == _NAME for e in entry_points(group=group)):
            checks.append(Check("ok", "entry point", f"{_NAME} in {group}"))
        else:
            checks.append(
                Check(
                    "FAIL",
                    "entry point",
                    f"{_NAME} is not visible in {group}; expected the package to be installed where SGLang runs. "
                    f"Install it: {sys.executable} -m pip install sglang-eagle3-ext",
                )
            )
    return checks


def filters() -> Check:
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {x.strip() for x in allowed.split(",") if x.strip()}
    if names and _NAME not in names:
        return Check(
            "FAIL",
            "filters",
            f"SGLANG_PLUGINS={allowed} filters this package out, so that stock would serve every draft by its own "
            f"rules; expected {_NAME} in it. Add {_NAME} to it or unset it.",
        )
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if platform and platform != _NAME:
        return Check(
            "FAIL",
            "filters",
            f"SGLANG_PLATFORM={platform} makes SGLang skip every package that offers another platform, this one "
            f"included; expected none or {_NAME}. Unset it, or set SGLANG_PLATFORM={_NAME} to serve on the CPU.",
        )
    return Check("ok", "filters", "neither SGLANG_PLUGINS nor SGLANG_PLATFORM keeps this package out")


def _switches() -> Check:
    try:
        switches = read_switches()
    except UnsupportedError as error:
        return Check("FAIL", "switches", str(error).replace("\n", " "))
    if not switches.ext:
        return Check("warn", "switches", "EAGLE3_EXT=off: stock serves every draft by its own rules")
    off = [name for name, on in asdict(switches).items() if not on]
    return Check("ok", "switches", f"off: {', '.join(off)}" if off else "all on")


def _shadows() -> list[Check]:
    checks = []
    here = Path.cwd()
    for name in ("sglang", "kernels"):
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is not None and Path(origin).is_relative_to(here) and "site-packages" not in origin:
            checks.append(
                Check(
                    "FAIL",
                    "imports",
                    f"import {name} yields {origin} out of the current folder; expected the installed package. "
                    "Start the server from another folder.",
                )
            )
    return checks or [Check("ok", "imports", "no folder here shadows sglang or kernels")]


def _fresh_process() -> list[Check]:
    process = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=300)
    lines = process.stdout.strip().splitlines()
    if process.returncode != 0 or not lines:
        tail = (process.stderr.strip().splitlines() or ["no output"])[-1]
        return [Check("FAIL", "fresh process", f"SGLang does not start with this package: {tail}")]
    found = json.loads(lines[-1])
    checks = []
    ours = found["model_class"].startswith("sglang_eagle3_ext.") is read_switches().ext
    checks.append(Check("ok" if ours else "FAIL", "model class", f"{found['model_class']} serves EAGLE-3 drafts"))
    if read_switches().ext:
        absent = sorted(set(found["seams"]) - set(found["hooks"]))
        wrong = [f"not placed: {', '.join(absent)}"] if absent else []
        checks += [Check("FAIL", "hooks", text) for text in (*wrong, *found["replaced"])] or [
            Check("ok", "hooks", f"{len(found['hooks'])} placed")
        ]
    checks.append(_platform(found["platform"], found["backends"]))
    return checks


def _platform(platform: str, backends: Sequence[str]) -> Check:
    """Say which platform a fresh process runs on, and whether ``SGLANG_PLATFORM`` has chosen it."""
    if os.environ.get("SGLANG_PLATFORM") == _NAME:
        on_cpu = platform == _CPU_PLATFORM and BACKEND in backends
        return Check(
            "ok" if on_cpu else "FAIL",
            "platform",
            f"{platform}, chosen by SGLANG_PLATFORM={_NAME}; attention backends {', '.join(backends)}",
        )
    return Check(
        "ok",
        "platform",
        f"{platform}, SGLang's own choice; this package's CPU platform, {_CPU_PLATFORM}, serves only where "
        f"SGLANG_PLATFORM={_NAME} asks for it",
    )
