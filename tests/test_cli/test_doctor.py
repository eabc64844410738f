"""``sglang-eagle3 doctor`` as one sees it: what is said while it runs, and how the platform is named."""

from __future__ import annotations

import json

import pytest

from sglang_eagle3_ext import cli
from sglang_eagle3_ext.host import doctor


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every slow check be content, and list them in the order in which they ran."""
    ran: list[str] = []
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "kernels" else _Spec)
    monkeypatch.setattr(doctor.contract, "problems", lambda: ran.append("contract") or [])
    monkeypatch.setattr(doctor, "_fresh_process", lambda: ran.append("fresh process") or [])
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "EAGLE3_EXT"):
        monkeypatch.delenv(name, raising=False)
    return ran


class _Spec:
    origin = None


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_each_slow_step_is_announced_on_stderr(content: list[str], capsys: pytest.CaptureFixture[str], more):
    cli.main(["doctor", *more])
    out, err = capsys.readouterr()
    assert content == ["contract", "fresh process"]
    lines = err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("checking ") for line in lines)
    assert "a minute on a busy machine" in lines[1]
    assert "fresh process" in lines[2]
    assert "checking" not in out
    if more:
        assert json.loads(out)["checks"]


def test_a_step_is_announced_before_it_begins(
    content: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(doctor.contract, "problems", lambda: seen.append(capsys.readouterr().err) or [])
    doctor.examine()
    assert seen[0].splitlines()[-1].startswith(f"checking {len(doctor.contract.ROWS)} symbols of SGLang")


def test_the_platform_is_named_with_what_chose_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    check = doctor._platform("CudaPlatform", [])
    assert check.status == "ok"
    assert check.text.startswith("CudaPlatform, SGLang's own choice; this package's CPU platform, Eagle3CpuPlatform,")
    assert "SGLANG_PLATFORM=eagle3_ext asks for it" in check.text
    monkeypatch.setenv("SGLANG_PLATFORM", "eagle3_ext")
    check = doctor._platform("Eagle3CpuPlatform", ["eagle3_cpu", "triton"])
    assert (check.status, check.text) == (
        "ok",
        "Eagle3CpuPlatform, chosen by SGLANG_PLATFORM=eagle3_ext; attention backends eagle3_cpu, triton",
    )
    assert doctor._platform("CudaPlatform", ["triton"]).status == "FAIL"
    assert doctor._platform("Eagle3CpuPlatform", ["triton"]).status == "FAIL"
