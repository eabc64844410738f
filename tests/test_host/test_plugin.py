"""Registration, switches and doctor, each in a fresh process as SGLang would have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import switches

pytestmark = pytest.mark.host


def run(code: str, env: Mapping[str, str] | None = None) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean | dict(env or {}), timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


RESOLVE = """
import json, sys, types
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.model_loader.utils import get_model_architecture
out = {}
for name in ("LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "Qwen3ForCausalLM"):
    hf = types.SimpleNamespace(architectures=[name])
    if name == "LlamaForCausalLMEagle3":
        hf.eagle3_ext_draft = "a draft that was read"
    cls, _ = get_model_architecture(types.SimpleNamespace(hf_config=hf, quantization=None, model_impl="auto"))
    out[name] = cls.__module__
print(json.dumps(out))
"""


def test_only_the_eagle3_class_is_replaced() -> None:
    on, off = (json.loads(run(RESOLVE, {"EAGLE3_EXT": value})) for value in ("on", "off"))
    assert off["LlamaForCausalLMEagle3"] == "sglang.srt.models.llama_eagle3"
    assert on.pop("LlamaForCausalLMEagle3") == "sglang_eagle3_ext.host.models.llama_eagle3"
    del off["LlamaForCausalLMEagle3"]
    assert on == off
    assert all(module.startswith("sglang.srt.models.") for module in on.values())


PLACED = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps([t for t, hooks in HookRegistry._hooks.items() for _, h, s in hooks if s.plugin_name == "eagle3_ext"]))
"""


@pytest.mark.parametrize(
    ("env", "placed"),
    [
        pytest.param({}, True, id="on"),
        pytest.param({"EAGLE3_EXT": "off"}, False, id="off"),
        pytest.param({"SGLANG_PLUGINS": "none"}, False, id="filtered"),
    ],
)
def test_hooks_follow_the_switch_and_the_filter(env: Mapping[str, str], placed: bool) -> None:
    from sglang_eagle3_ext.host import contract

    hooks = set(json.loads(run(PLACED, env)))
    seams = {r.target for r in contract.ROWS if r.kind == "hook" and r.when == "start"}
    assert hooks == (seams if placed else set())


def test_a_switch_that_is_neither_on_nor_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "maybe")
    monkeypatch.setenv("EAGLE3_EXT_WATCH", "2")
    with pytest.raises(UnsupportedError) as caught:
        switches.read_switches()
    assert "EAGLE3_EXT_KERNELS: got 'maybe'" in str(caught.value)
    assert "EAGLE3_EXT_WATCH: got '2'" in str(caught.value)


def doctor(env: Mapping[str, str], cwd: Path) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "sglang_eagle3_ext.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=clean | dict(env),
        cwd=cwd,
        timeout=300,
    )
    report = json.loads(done.stdout)
    checks: dict[str, list[tuple[str, str]]] = {}
    for check in report["checks"]:
        checks.setdefault(check["name"], []).append((check["status"], check["text"]))
    assert report["ok"] is (done.returncode == 0)
    return done.returncode, checks


def test_doctor_is_content_here(tmp_path: Path) -> None:
    code, checks = doctor({"SGLANG_PLATFORM": "eagle3_ext"}, tmp_path)
    assert code == 0
    assert checks["model class"][0][0] == "ok"
    assert "eagle3_cpu" in checks["platform"][0][1]


@pytest.mark.parametrize(
    ("env", "name", "words"),
    [
        pytest.param({"SGLANG_PLUGINS": "none"}, "filters", "SGLANG_PLUGINS=none", id="filtered"),
        pytest.param({"SGLANG_PLATFORM": "other"}, "filters", "SGLANG_PLATFORM=other", id="other-platform"),
        pytest.param({"EAGLE3_EXT": "perhaps"}, "switches", "EAGLE3_EXT", id="switch"),
    ],
)
def test_doctor_fails_and_says_why(env: Mapping[str, str], name: str, words: str, tmp_path: Path) -> None:
    code, checks = doctor(env, tmp_path)
    assert code == 1
    assert any(status == "FAIL" and words in text for status, text in checks[name])


def test_doctor_sees_a_shadowing_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code, checks = doctor({}, tmp_path)
    assert code == 1
    assert any(status == "FAIL" and "kernels" in text for status, text in checks["imports"])
