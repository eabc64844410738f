"""The drop-in draft class inside SGLang's runtime, in a process of its own.

SGLang keeps its platform, its parallel groups and its settings in the process; the tests that need them on the
CPU platform are in ``draft_model.py``, which no other run collects.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

TESTS = Path(__file__).with_name("draft_model.py")


def test_drafts_are_served_as_the_reference_computes_them() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", str(TESTS)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, cwd=TESTS.parents[2], check=False
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
