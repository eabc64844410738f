"""Shared by the kernel tests: poisoned scratch, and the file in which ``make kernels`` keeps what they measured.

Memory that a wrapper allocates is poisoned, so that what it fails to write shows. What a test measures it notes with
``record``; ``--kernels-json FILE`` writes all of it, beside the runs of other Triton versions that the file holds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from stock_attention import as_on_hopper

from benchmarks.kernel_bench import machine, provenance
from benchmarks.kernel_tables import kernels_sha256

POISON = 101
"""What fresh integers hold; floats hold NaN."""

Record = Callable[..., None]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the kernels' modules take from ``torch.empty`` and ``torch.empty_like``."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            fresh = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("sglang_eagle3_ext.kernels."):
                fresh.fill_(float("nan") if fresh.is_floating_point() else POISON)
            return fresh

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Note a row of a table of the file: ``record("traffic", kernel="tree_verify_gqa", ...)``.

    A tensor is kept as the first digits of a hash of its bytes, which say whether two runs gave the same result; a
    dtype by its name.
    """

    def cell(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return digest(value)
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

    def note(table: str, **row: Any) -> None:
        record_property("kernels", {"table": table, "row": {name: cell(value) for name, value in row.items()}})

    return note


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret SGLang's attention kernels, with the tiles that they have for a Hopper GPU."""
    as_on_hopper(monkeypatch)


def digest(t: torch.Tensor) -> str:
    """Hash the bytes of a tensor."""
    return hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option."""
    parser.addoption("--kernels-json", type=Path, metavar="FILE", help="where to keep what the kernel tests measured")


def pytest_configure(config: pytest.Config) -> None:
    """Collect where the results of all workers meet."""
    path = config.getoption("--kernels-json", None)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Keeper(path))


class _Keeper:
    """Collects what tests noted and writes it at the end, for the version of Triton at hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = time.monotonic()
        self.kernels_sha256 = kernels_sha256()
        self.outcomes: Counter[str] = Counter()
        self.tables: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the test, and take its rows."""
        if report.when != "call" and report.passed:
            return
        self.outcomes[report.outcome] += 1
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "kernels":
                self.tables[value["table"]].append(value["row"])

    def pytest_sessionfinish(self) -> None:
        """Put this run in the place of an earlier one with the same Triton."""
        runs = json.loads(self.path.read_text())["runs"] if self.path.is_file() else []
        run = provenance() | {
            "machine": machine(torch.device("cpu")),
            "kernels_sha256": self.kernels_sha256,
            "seconds": round(time.monotonic() - self.begin),
            "tests": {outcome: self.outcomes[outcome] for outcome in ("passed", "failed", "skipped")},
        }
        run |= {table: sorted(rows, key=json.dumps) for table, rows in sorted(self.tables.items())}
        runs = [earlier for earlier in runs if earlier["versions"]["triton"] != triton.__version__] + [run]
        runs.sort(key=lambda r: [int(part) for part in r["versions"]["triton"].split(".")[:2]], reverse=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"schema": 1, "runs": runs}, indent=1) + "\n")
