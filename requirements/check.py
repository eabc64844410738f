"""Say what an environment lacks for `make demo` or `make test`: python requirements/check.py demo|test."""

import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = {
    "demo": ["demo.txt", "demo-nodeps.txt"],
    "test": ["demo.txt", "demo-nodeps.txt", "test.txt", "test-nodeps.txt"],
}


def problems(level: str) -> list[str]:
    """Compare the pins of one level with what this interpreter has."""
    lines = [line for name in FILES[level] for line in (HERE / name).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    found = []
    for name in [*pins, "sglang-eagle3-ext"]:
        try:
            got = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name}: not installed; expected {pins.get(name, 'this tree (pip install -e .)')}")
            continue
        if name == "sglang" and got != pins[name]:
            found.append(f"{name}: got {got}; expected {pins[name]}")
    return found


if __name__ == "__main__":
    if missing := problems(sys.argv[1]):
        title = f"{sys.executable} is not fit for `make {sys.argv[1]}`:"
        sys.exit("\n  ".join([title, *missing]) + "\nWithout PYTHON= everything is set up in .venv.")
