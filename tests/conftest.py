"""Shared by all tests: any of them can import the writer of tiny checkpoints (``checkpoints.py``)."""

import os
import sys
from pathlib import Path

# Two threads of every test process would fight over the cores of a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
