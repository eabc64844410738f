"""What a newcomer is told when the set-up cannot go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy what the set-up reads into a folder without a .venv."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def set_up(tree: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up where every Python on PATH is the given shell script."""
    folder = tree / "bin"
    folder.mkdir()
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13"):
        (folder / name).write_text(f"#!/bin/sh\n{python}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}
    script = tree / "requirements" / "setup.sh"
    return subprocess.run([script, "demo"], env=environment, capture_output=True, text=True, timeout=60)


def test_without_ensurepip_the_debian_package_is_named(tree: Path):
    done = set_up(tree, 'case "$2" in *ensurepip*) exit 1;; esac; exit 0')
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert not (tree / ".venv").exists()


def test_an_old_python_is_refused(tree: Path):
    done = set_up(tree, "exit 1")
    assert done.returncode == 1
    assert "no Python >= 3.11" in done.stderr


def test_an_interrupted_setup_starts_anew(tree: Path):
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").write_text("half written")
    (tree / ".venv" / ".unfinished").touch()
    done = set_up(tree, "exit 1")
    assert "starting .venv anew" in done.stdout
    assert not (tree / ".venv").exists()


def test_check_names_what_an_environment_lacks(tree: Path):
    requirement = tree / "requirements" / "demo.txt"
    requirement.write_text(requirement.read_text() + "no-such-distribution==1.0\n")
    done = subprocess.run(
        [sys.executable, tree / "requirements" / "check.py", "demo"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no-such-distribution: not installed; expected 1.0" in done.stderr
