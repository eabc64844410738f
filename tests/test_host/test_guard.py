"""What is left when this package cannot be active; oracle: the functions that a refusal has to leave alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DELETE, write_draft

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import config, contract, guard

pytestmark = pytest.mark.host

from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402

from sglang_eagle3_ext.host import seams  # noqa: E402


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_reason", None)
    monkeypatch.setattr(sys, "argv", ["sglang"])


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[seams.Hook]:
    """Collect what would be placed."""
    hooks: list[seams.Hook] = []
    monkeypatch.setattr(seams, "place", hooks.extend)
    monkeypatch.setattr(seams, "placed", lambda: frozenset(hook.seam for hook in hooks))
    return hooks


def test_hooks_act_until_a_refusal_and_then_leave_sglang_alone(placed: list[seams.Hook]) -> None:
    asked: list[str] = []

    def before(word: str) -> tuple[tuple[str], dict[str, Any]]:
        asked.append(word)
        return (f"our {word}",), {}

    def around(original: Callable[[str], str], word: str) -> str:
        asked.append(word)
        return original(f"our {word}")

    guarded, wrapped = guard.unless_refused(before), guard.around_unless_refused(around)
    assert guarded("plan") == (("our plan",), {})
    assert wrapped(str.upper, "plan") == "OUR PLAN"
    guard.refuse("a symbol is gone")
    assert guarded("plan") is None
    assert wrapped(str.upper, "plan") == "PLAN"
    assert asked == ["plan", "plan"]
    assert placed == [seams.Hook(seam, check, HookType.AFTER) for seam, check in guard.CHECKS.items()]


def test_a_refusal_is_said_once_and_its_first_reason_stays(
    placed: list[seams.Hook], caplog: pytest.LogCaptureFixture
) -> None:
    guard.refuse("first")
    guard.refuse("second")
    said = [r.getMessage() for r in caplog.records if "is not active" in r.getMessage()]
    assert len(said) == 1
    assert "first" in said[0]
    assert said[0].endswith("run: sglang-eagle3 doctor")
    assert len(placed) == 2


def test_checks_are_placed_by_sglangs_registry_where_ours_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, Any]] = []
    monkeypatch.setitem(sys.modules, "sglang_eagle3_ext.host.seams", None)  # as if what it is made of were gone
    monkeypatch.delattr(sys.modules["sglang_eagle3_ext.host"], "seams")
    monkeypatch.setattr(HookRegistry, "register", lambda seam, check, kind: registered.append((seam, check)))
    guard.refuse("HookSource is gone")
    assert registered == list(guard.CHECKS.items())


@pytest.mark.parametrize(("declared", "ends"), [(True, True), (False, False)])
def test_where_no_check_can_be_placed_a_declared_draft_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool, ends: bool
) -> None:
    ext = {"eagle3_ext": {"sources": ["embed", "layer3", "last"]}} if declared else {"eagle3_ext": DELETE}
    draft = write_draft(tmp_path / "draft", config_changes=ext)
    monkeypatch.setattr(contract, "problems", lambda *stages, rows=None: ["gone."])
    monkeypatch.setattr(sys, "argv", ["sglang", "--speculative-draft-model-path", str(draft)])
    if ends:
        with pytest.raises(SystemExit, match="declares its assembly in eagle3_ext"):
            guard.refuse("everything is gone")
    else:
        guard.refuse("everything is gone")
    assert guard.refused()


@pytest.mark.parametrize("declared", [True, False])
def test_a_broken_contract_that_is_met_with_a_draft_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: list[seams.Hook], declared: bool
) -> None:
    """As where a whole module of SGLang is gone, so that it never arrives."""
    ext = {"eagle3_ext": {"sources": ["embed", "layer3", "last"]}} if declared else {"eagle3_ext": DELETE}
    draft = str(write_draft(tmp_path / "draft", config_changes=ext))
    monkeypatch.setattr(config, "_contract_problems", lambda: ("sglang.srt.gone.thing: not found;",))
    if declared:
        with pytest.raises(CheckpointError, match=r"sglang\.srt\.gone\.thing"):
            config.read_spec(draft, None, None)
    else:
        assert config.read_spec(draft, None, None) is None
    assert guard.refused()
    assert placed


@pytest.mark.parametrize("target", [contract.DRAFT_CONFIG_SEAM, contract.DRAFT_CONFIG_SEAM.rpartition(".")[0]])
@pytest.mark.parametrize(("kind", "told"), [(HookType.REPLACE, True), (HookType.AFTER, False)])
def test_another_plugin_in_the_place_of_a_seam_is_told(
    monkeypatch: pytest.MonkeyPatch, target: str, kind: HookType, told: bool
) -> None:
    theirs = {target: [(kind, print, seams.HookSource("other", "other-dist"))]}
    monkeypatch.setattr(HookRegistry, "_hooks", theirs)
    problems = list(seams.problems([contract.DRAFT_CONFIG_SEAM, contract.CAPTURE_SEAM]))
    assert len(problems) == told
    assert all("replaced by the plugin other;" in problem for problem in problems)
