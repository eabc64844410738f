"""Draw the training curve: ``python plot.py curve.json curve.png``."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw(log: dict[str, Any], path: pathlib.Path) -> None:
    """Draw loss, agreement and accept length over updates.

    Args:
        log: what ``train.py`` wrote to ``log.json``.
        path: picture to write.
    """
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, key, title in zip(
        axes,
        ("loss", "agreement"),
        ("training loss", "training agreement (top 1, part of the vocabulary)"),
        strict=False,
    ):
        for step in range(3):
            points = [(e["update"], e[key][step]) for e in log["curve"] if len(e[key]) > step]
            axis.plot(*zip(*points, strict=True), label=f"step {step + 1}")
        axis.set_title(title, fontsize=10)
        axis.legend()
    held_out = log["validation"]
    axes[2].plot([e["update"] for e in held_out], [e["accept_length"] for e in held_out], marker="o", color="black")
    axes[2].set_title("accept length, chain of 3, validation topics", fontsize=10)
    for axis in axes:
        axis.axvline(log["settings"]["one_step"], color="grey", linestyle=":")
        axis.set_xlabel("update (dotted: test-time training begins)")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2]))
