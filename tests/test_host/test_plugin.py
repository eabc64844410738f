"""Registration, switches and doctor, each in a fresh process as SGLang would have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import contract, doctor, switches

pytestmark = pytest.mark.host


def run(code: str, env: Mapping[str, str] | None = None) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean | dict(env or {}), timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


LOADED = """
import importlib, json, sys, types
import sglang.launch_server
from sglang.srt.plugins import load_plugins
load_plugins()
imported = sorted(name for name in sys.modules if name.startswith("sglang."))
from sglang_eagle3_ext.host import contract, seams
for module in contract.by_module("start"):
    importlib.import_module(module)
placed = sorted(seams.placed())
from sglang.srt.model_loader.utils import get_model_architecture
classes = {}
for name in ("LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "Qwen3ForCausalLM"):
    hf = types.SimpleNamespace(architectures=[name])
    if name == "LlamaForCausalLMEagle3":
        hf.eagle3_ext_draft = "a draft that was read"
    cls, _ = get_model_architecture(types.SimpleNamespace(hf_config=hf, quantization=None, model_impl="auto"))
    classes[name] = cls.__module__
print(json.dumps({"placed": placed, "classes": classes, "imported": imported}))
"""

ENVIRONMENTS = {"on": {}, "off": {"EAGLE3_EXT": "off"}, "filtered": {"SGLANG_PLUGINS": "none"}}


@pytest.fixture(scope="module")
def loaded() -> dict[str, dict[str, Any]]:
    """What a process of SGLang has after it loaded its plugins, in each environment."""
    return {name: json.loads(run(LOADED, env)) for name, env in ENVIRONMENTS.items()}


def test_only_the_eagle3_class_is_replaced(loaded: dict[str, dict[str, Any]]) -> None:
    on, off, filtered = (dict(loaded[name]["classes"]) for name in ("on", "off", "filtered"))
    assert off == filtered
    assert off["LlamaForCausalLMEagle3"] == "sglang.srt.models.llama_eagle3"
    assert on.pop("LlamaForCausalLMEagle3") == "sglang_eagle3_ext.host.models.llama_eagle3"
    del off["LlamaForCausalLMEagle3"]
    assert on == off
    assert all(module.startswith("sglang.srt.models.") for module in on.values())


def test_hooks_follow_the_switch_and_the_filter(loaded: dict[str, dict[str, Any]]) -> None:
    seams = {r.target for r in contract.ROWS if r.kind == "hook" and r.when == "start"}
    assert set(loaded["on"]["placed"]) == seams
    assert loaded["off"]["placed"] == loaded["filtered"]["placed"] == []


def test_a_launcher_imports_nothing_more_of_sglang(loaded: dict[str, dict[str, Any]]) -> None:
    more = set(loaded["on"]["imported"]) - set(loaded["filtered"]["imported"])
    assert not more
    assert "sglang.srt.managers.scheduler" not in loaded["on"]["imported"]


LATE = """
import json, sys, types
from sglang_eagle3_ext.host import contract, guard, seams
module, seam = "sglang.srt.speculative.eagle_worker_v2", contract.DRAFT_CONFIG_SEAM
contract.ROWS += (contract.Row(module + ".gone", "call", (), "start", "show a broken contract", "never"),)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.configs.model_config import ModelConfig
before = guard.refused(), seam in seams.placed()
__import__(module)
said = []
for declared in ({}, {"eagle3_ext": {"sources": ["embed"]}}):
    model = types.SimpleNamespace(
        is_draft_model=True, model_path="DRAFT", revision=None, model_override_args=declared,
        speculative_algorithm="EAGLE3", hf_config=types.SimpleNamespace(architectures=["A"]), hf_text_config=None)
    try:
        ModelConfig._config_draft_model(model)
        said.append("served by stock")
    except Exception as error:
        said.append(str(error))
print(json.dumps({"before": before, "after": guard.refused(), "said": said}))
"""


def test_a_contract_that_breaks_late_leaves_stock_untouched_and_refuses_a_declared_draft() -> None:
    found = json.loads(run(LATE))
    assert found["before"] == [False, True]
    assert found["after"] is True
    undeclared, declared = found["said"]
    assert undeclared == "served by stock"
    assert "eagle_worker_v2.gone: not found" in declared
    assert "Run: sglang-eagle3 doctor" in declared


def test_a_switch_that_is_neither_on_nor_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "maybe")
    monkeypatch.setenv("EAGLE3_EXT_WATCH", "2")
    with pytest.raises(UnsupportedError) as caught:
        switches.read_switches()
    assert "EAGLE3_EXT_KERNELS: got 'maybe'" in str(caught.value)
    assert "EAGLE3_EXT_WATCH: got '2'" in str(caught.value)


def test_doctor_is_content_here(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "sglang_eagle3_ext.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=clean | {"SGLANG_PLATFORM": "eagle3_ext"},
        cwd=tmp_path,
        timeout=300,
    )
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert done.returncode == 0
    assert report["ok"] is True
    assert checks["model class"]["status"] == "ok"
    assert "eagle3_cpu" in checks["platform"]["text"]


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave out what a doctor that is content has examined above: SGLang's symbols and a fresh process of it."""
    monkeypatch.setattr(contract, "problems", list)
    monkeypatch.setattr(doctor, "_fresh_process", list)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failures(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    code = doctor.run(as_json=True)
    report = json.loads(capsys.readouterr().out)
    failed = {check["name"]: check["text"] for check in report["checks"] if check["status"] == "FAIL"}
    assert code == (1 if failed else 0)
    assert report["ok"] is not bool(failed)
    return failed


@pytest.mark.parametrize(
    ("env", "name", "words"),
    [
        pytest.param({"SGLANG_PLUGINS": "none"}, "filters", "SGLANG_PLUGINS=none", id="filtered"),
        pytest.param({"SGLANG_PLATFORM": "other"}, "filters", "SGLANG_PLATFORM=other", id="other-platform"),
        pytest.param({"EAGLE3_EXT": "perhaps"}, "switches", "EAGLE3_EXT", id="switch"),
    ],
)
def test_doctor_fails_and_says_why(
    env: Mapping[str, str],
    name: str,
    words: str,
    quick_doctor: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not failures(capsys)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    failed = failures(capsys)
    assert list(failed) == [name]
    assert words in failed[name]


def test_doctor_sees_a_shadowing_folder(
    quick_doctor: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (quick_doctor / "kernels").mkdir()
    (quick_doctor / "kernels" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in `python -m`
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        monkeypatch.delitem(sys.modules, name)
    failed = failures(capsys)
    assert list(failed) == ["imports"]
    assert "kernels" in failed["imports"]
