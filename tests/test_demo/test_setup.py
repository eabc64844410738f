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


STAND_IN = """
echo "$*" >> calls
case "$*" in
    *find_spec*) exit 1 ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip"*)
        echo "WARNING: Location '/nowhere' is ignored: it is either a non-existing path or lacks a specific scheme." >&2
        echo "WARNING: another" >&2
        echo "progress"
        case "$*" in *"$BROKEN"*) exit 7 ;; esac ;;
esac
exit 0
"""


def set_up(tree: Path, python: str, level: str = "demo", broken: str = "none") -> subprocess.CompletedProcess[str]:
    """Run the set-up where every Python on PATH is the given shell script."""
    folder = tree / "bin"
    folder.mkdir()
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13"):
        (folder / name).write_text(f"#!/bin/sh\n{python}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "BROKEN": broken}
    script = tree / "requirements" / "setup.sh"
    return subprocess.run([script, level], cwd=tree, env=environment, capture_output=True, text=True, timeout=60)


def test_without_ensurepip_the_debian_package_is_named(tree: Path):
    done = set_up(tree, 'case "$2" in *ensurepip*) exit 1;; esac; exit 0')
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert not (tree / ".venv").exists()


def test_an_old_python_is_refused(tree: Path):
    done = set_up(tree, "exit 1")
    assert done.returncode == 1
    assert "no Python >= 3.11" in done.stderr


def test_the_python_that_has_sglang_goes_first(tree: Path):
    asked = 'case "$0:$2" in *python3.12:*find_spec*) exit 0;; *find_spec*|*ensurepip*) exit 1;; esac; exit 0'
    assert "python3.12 cannot create a virtual environment" in set_up(tree, asked).stderr


def test_without_sglang_the_first_python_is_taken(tree: Path):
    asked = 'case "$2" in *find_spec*|*ensurepip*) exit 1;; esac; exit 0'
    assert "set-up: python cannot create a virtual environment" in set_up(tree, asked).stderr


def interrupt(tree: Path) -> None:
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").write_text("half written")
    (tree / ".venv" / ".unfinished").touch()


def test_an_interrupted_setup_of_the_tests_installs_the_demo_again(tree: Path):
    interrupt(tree)
    (tree / ".venv" / ".ready-demo").touch()
    done = set_up(tree, STAND_IN, "test")
    assert done.returncode == 0, done.stderr
    calls = (tree / "calls").read_text().splitlines()
    steps = [c.split("-r ")[-1] for c in calls if " -r " in c or "check.py" in c]
    assert steps == [
        *("requirements/demo.txt", "requirements/demo-nodeps.txt", "requirements/check.py demo"),
        *("requirements/test.txt", "requirements/test-nodeps.txt", "requirements/check.py test"),
    ]
    assert calls.count("-m venv .venv") == 1
    assert {p.name for p in (tree / ".venv").glob(".*")} == {".ready-demo", ".ready-test"}


def test_pip_speaks_but_for_locations_that_are_not_there(tree: Path):
    done = set_up(tree, STAND_IN)
    assert done.stderr.splitlines() == ["WARNING: another"] * 3
    assert done.stdout.count("progress") == 3


def test_a_failure_of_pip_ends_the_setup(tree: Path):
    done = set_up(tree, STAND_IN, broken="demo-nodeps.txt")
    assert done.returncode == 7
    assert (tree / ".venv" / ".unfinished").exists()
    assert not (tree / ".venv" / ".ready-demo").exists()


def test_an_interrupted_setup_starts_anew(tree: Path):
    interrupt(tree)
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
