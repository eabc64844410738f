"""MLA drafts that were written for stock SGLang are computed by its own class as they were trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

HERE = Path(__file__).parent


def test_in_sglang_s_own_runtime() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / "exported_mla.py")],
        env=environment | {"SGLANG_PLATFORM": "eagle3_ext"},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
