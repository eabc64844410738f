"""Draw the training curve of runs that went on from each other.

python plot.py --join RUN_A/log.json RUN_B/log.json --out curve.json     (join the logs of runs, in order)
python plot.py --draw curve.json --out curve.png
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw loss, agreement and accept length over the updates of all runs.

    Args:
        runs: the logs of ``train.py``, in the order of training.
        path: picture to write.
    """
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    colours = ("tab:blue", "tab:orange", "tab:green")
    before = 0
    for number, run in enumerate(runs):
        for axis, key in zip(axes, ("loss", "agreement"), strict=False):
            for step, colour in enumerate(colours):
                points = [(before + e["update"], e[key][step]) for e in run["curve"] if len(e[key]) > step]
                axis.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=colour,
                    label=None if number else f"step {step + 1}",
                )
        held_out = run["validation"]
        axes[2].plot(
            [before + e["update"] for e in held_out],
            [e["accept_length"] for e in held_out],
            marker="o",
            color="black",
        )
        before += held_out[-1]["update"]
        for axis in axes:
            axis.axvline(before, color="grey", linestyle=":", linewidth=0.8)
    axes[0].set_title("training loss", fontsize=10)
    axes[1].set_title("training agreement (top 1, part of the vocabulary)", fontsize=10)
    axes[2].set_title("accept length, chain of 3, validation topics", fontsize=10)
    for axis in axes[:2]:
        axis.legend()
    for axis in axes:
        axis.set_xlabel("update (dotted: a run ends)")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Join logs, or draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--join", type=pathlib.Path, nargs="+", help="logs of runs, in order")
    what.add_argument("--draw", type=pathlib.Path, help="file written by --join")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="file to write")
    arguments = parser.parse_args()
    if arguments.join:
        runs = [json.loads(path.read_text()) for path in arguments.join]
        arguments.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    else:
        draw(json.loads(arguments.draw.read_text())["runs"], arguments.out)


if __name__ == "__main__":
    main()
