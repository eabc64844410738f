"""The probe on the demo's pair, told nothing: a part of the prompts, which is enough to find all of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sglang_eagle3_ext.cli import main

pytestmark = pytest.mark.e2e

TOKENS = 48 * 32


def test_finds_what_the_demos_draft_was_trained_on(
    tmp_path: Path, target: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(draft, tmp_path / "draft")
    config = json.loads((copy / "config.json").read_text())
    del config["eagle3_ext"]
    (copy / "config.json").write_text(json.dumps(config))
    words = ["--target", str(target), "--tokens", str(TOKENS), "--max-new-tokens", "32", "--json"]
    assert main(["probe", str(copy), *words]) == 1
    printed = capsys.readouterr()
    got = json.loads(printed.out)
    assert got["prompts"] == 48
    assert got["verdict"] == "other_found"
    assert got["best"]["boundaries"] == [0, 4, 16]
    assert got["best"]["switches"] == {}
    assert "min to write the text" in printed.err
