"""Say where, with what and of which draft something was measured, for the head of a result file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from sglang_eagle3_ext.host import bench

DRAFT = Path(__file__).parent / "demo" / "draft"


def stamp() -> dict[str, Any]:
    """Name the day, the machine (without its name) and the versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": bench.machine_facts(),
        "versions": bench.versions(),
    }


def demo_draft() -> str:
    """Hash the weights of the demo's draft, which every figure about that pair is of."""
    return bench.weights_sha256(DRAFT)
