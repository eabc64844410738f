"""Carry SGLang's attention kernels to a machine without SGLang, for ``make gpu`` there.

    python -m benchmarks.carry_peers

Copies five files of the installed SGLang, as they are, to .demo/peers/, and writes beside them the few names that they
import from the rest of SGLang. On the other machine: PYTHONPATH=.demo/peers make gpu PYTHON=python3. FlashInfer is
carried as its wheel, unpacked into the same folder (pip download --no-deps flashinfer-python), and compiles itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

from benchmarks.kernel_bench import ROOT

TO = ROOT / ".demo" / "peers"
KERNELS = ("decode_attention", "extend_attention", "score_mod", "verify_mla", "verify_splitkv")
FOLDER = Path("kernels", "ops", "attention")

# What the kernels ask of the rest is about AMD devices, and about settings that are read on those alone.
REST = {
    "srt/environ.py": """
class _Unset:
    def __getattr__(self, name):
        return self

    def get(self):
        return None


envs = _Unset()
""",
    "srt/utils.py": """
import torch


def is_cuda():
    return torch.cuda.is_available() and torch.version.cuda is not None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args: False
""",
}


def carry(package: Path, release: str, to: Path) -> None:
    """Write a package ``sglang`` that has these kernels and nothing else.

    Args:
        package: folder of the installed package.
        release: its version, which results name.
        to: folder to write it into; what an earlier call wrote there is replaced.
    """
    for earlier in to.glob("sglang-*.dist-info"):
        shutil.rmtree(earlier)
    about = to / f"sglang-{release}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    target = to / "sglang"
    shutil.rmtree(target, ignore_errors=True)
    (target / FOLDER).mkdir(parents=True)
    for name in KERNELS:
        shutil.copyfile(package / FOLDER / f"{name}.py", target / FOLDER / f"{name}.py")
    for name, text in REST.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text.lstrip())
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()


def main() -> None:
    """Carry them out of the SGLang of this interpreter."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "sglang: not installed here; expected the release whose kernels are to be carried. Install it."
        )
    carry(Path(spec.origin).parent, importlib.metadata.version("sglang"), TO)
    print(f"wrote {TO.relative_to(ROOT)}; there: PYTHONPATH={TO.relative_to(ROOT)} make gpu PYTHON=python3")


if __name__ == "__main__":
    main()
