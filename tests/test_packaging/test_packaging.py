"""The distribution: sdist -> wheel -> a fresh interpreter; and the source tree, from inside and outside."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_eagle3_ext"
SOURCES = sorted(
    [path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")]
    + [f"{PACKAGE}/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")]
)

REPORT = """
import importlib, json, sys
import sglang_eagle3_ext as package
report = {"file": package.__file__, "path": list(package.__path__), "torch": "torch" in sys.modules}
report["kernels"] = {
    name: importlib.import_module("sglang_eagle3_ext.kernels." + name).__file__ for name in sys.argv[1:]
}
print(json.dumps(report))
"""
KERNELS = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run one command in a folder with a clean Python path and return what it printed."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist in a copy of the tree, and the wheel out of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    tree.mkdir()
    for name in (PACKAGE, "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, str(folder), cwd=tree)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    run(*pip, "--wheel-dir", str(folder), ".", cwd=unpacked)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """Unpack the wheel as an installer would (it is pure Python: site-packages is the archive)."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_every_source_file(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(name for name in names if name.endswith(".py")) == SOURCES
    assert f"{PACKAGE}/py.typed" in names
    assert {name.split("/")[0] for name in names} == {PACKAGE}


def test_wheel_asks_for_no_package_and_carries_its_licence(site: Path):
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    required = [line for line in distribution.requires or [] if "extra ==" not in line]
    assert required == []
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (distribution.read_text("licenses/LICENSE") or "")
    points = {(point.group, point.name) for point in distribution.entry_points}
    assert points >= {
        ("sglang.srt.plugins", "eagle3_ext"),
        ("sglang.srt.platforms", "eagle3_ext"),
        ("console_scripts", "sglang-eagle3"),
    }


def test_wheel_imports_in_a_fresh_interpreter(site: Path, tmp_path: Path):
    out = run(sys.executable, "-P", "-c", REPORT, *KERNELS, cwd=tmp_path, PYTHONPATH=str(site))
    report = json.loads(out)
    assert report["path"] == [str(site / PACKAGE)]
    assert set(report["kernels"].values()) == {str(site / PACKAGE / "kernels" / f"{k}.py") for k in KERNELS}


def test_wheel_is_used_inside_the_source_tree_too(site: Path):
    # -P keeps the working directory out of sys.path: the installed package is used, not the tree's.
    out = run(sys.executable, "-P", "-c", REPORT, *KERNELS, cwd=ROOT, PYTHONPATH=str(site))
    assert json.loads(out)["file"] == str(site / PACKAGE / "__init__.py")


def test_importing_the_package_loads_no_torch(site: Path, tmp_path: Path):
    assert not json.loads(run(sys.executable, "-P", "-c", REPORT, cwd=tmp_path, PYTHONPATH=str(site)))["torch"]


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_source_tree_finds_its_kernels(where: str, tmp_path: Path):
    cwd, path = (ROOT, "") if where == "inside" else (tmp_path, str(ROOT))
    out = run(sys.executable, "-c", REPORT, *KERNELS, cwd=cwd, PYTHONPATH=path)
    assert set(json.loads(out)["kernels"].values()) == {str(ROOT / "kernels" / f"{k}.py") for k in KERNELS}


def test_kernels_never_becomes_a_top_level_package():
    # SGLang does `from kernels import get_kernel` inside a try: a package of ours would silence its kernels.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec and spec.origin)"
    assert not run(sys.executable, "-c", code, cwd=ROOT).startswith(str(ROOT / "kernels"))
