"""Serve the demo's draft in every dialect and write docs/formats.md's table: python -m benchmarks.dialects [--render]

The servers are those of ``tests/test_e2e/test_dialects.py``, one for each dialect, which must take the original's
steps. It leaves ``benchmarks/results/dialects.json``; ``--render`` writes the page alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.render import ROOT, markdown_table, replace_region
from benchmarks.stamp import demo_draft, stamp

PAGE = ROOT / "docs" / "formats.md"
RESULT = ROOT / "benchmarks" / "results" / "dialects.json"
TESTS = ROOT / "tests" / "test_e2e" / "test_dialects.py"


def table(result: dict[str, Any]) -> str:
    """Write what each dialect's server did."""
    rows = [
        [f"`{name}`", f"`{row['format']}`", f"{row['tokens']}", f"{row['verify_steps']}", f"{row['accept_length']:.3f}"]
        for name, row in result["served"].items()
    ]
    machine, versions = result["machine"], result["versions"]
    note = (
        f"Float32, chains of three, {machine['cpu']}, SGLang {versions['sglang']}, {result['date']}. "
        "Data: [dialects.json](../benchmarks/results/dialects.json)."
    )
    header = ["written as", "read by", "tokens", "verify steps", "accept length"]
    return "\n".join([*markdown_table(header, rows), "", note]) + "\n"


def render(page: str, result: dict[str, Any]) -> str:
    """Return docs/formats.md with its measured part replaced."""
    return replace_region(page, "served", table(result))


def run() -> int:
    """Run the tests and take over what they found; return their exit code."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    stamped = stamp() | {"draft_sha256": demo_draft()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "pytest", "-q", str(TESTS)]
        code = subprocess.run(
            command, cwd=ROOT, env=environment | {"DIALECTS_RESULTS": str(file)}, check=False
        ).returncode
        if not code:
            RESULT.write_text(json.dumps(stamped | {"served": json.loads(file.read_text())}, indent=1) + "\n")
    return code


def main() -> int:
    """Serve unless told otherwise, and write the page."""
    parser = argparse.ArgumentParser(description="Serve the demo's draft in every dialect; write docs/formats.md.")
    parser.add_argument("--render", action="store_true", help="write the page from the committed result alone")
    if not parser.parse_args().render and (code := run()):
        return code
    PAGE.write_text(render(PAGE.read_text(), json.loads(RESULT.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
