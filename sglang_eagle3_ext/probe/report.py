"""The result of a probe as JSON, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.probe.verdict import Outcome, Probe, boundaries, interval, sources, spell_switches


def as_json(result: Probe) -> dict[str, Any]:
    """Build the object of ``probe --json``; its keys are stable."""
    n = result.target.num_layers
    groups = dict.fromkeys(result.groups)

    def row(outcome: Outcome | None) -> dict[str, Any] | None:
        if outcome is None:
            return None
        total = outcome.total
        return {
            "sources": sources(outcome.places, n),
            "boundaries": list(boundaries(outcome.places, n)),
            "order": "as_listed",
            "switches": dict(outcome.switches),
            "accept_length": total.accept_length,
            "ci95": list(interval(outcome, result.groups)),
            "accept_per_position": list(total.accept_per_position),
            "verify_steps": total.verify_steps,
        }

    best = row(result.best) or {}
    if len(groups) > 1:
        best["groups"] = {
            group: sum(results[1:], results[0]).accept_length
            for group in groups
            for results in [[r for r, g in zip(result.best.results, result.groups, strict=True) if g == group]]
        }
    return {
        "schema": 1,
        "draft": result.spec.path,
        "target": result.target.path,
        "num_layers": n,
        "steps": result.steps,
        "prompts": len(result.answers),
        "completion_tokens": result.best.total.completion_tokens,
        "declared": row(result.declared),
        "stock": row(result.stock),
        "best": best,
        "not_run": dict(result.undeclared),
        "stock_differences": list(result.spec.stock.differences),
        "gain": None if result.gain is None else {"accept_length": result.gain[0], "ci95": list(result.gain[1:])},
        "first_choice": {"best": result.agreement[0], "states_of_another_text": result.agreement[1]},
        "alike": [sources(places, n) for places in result.alike],
        "undecided": {key: list(values) for key, values in result.undecided.items()},
        "curves": None if result.curves is None else [list(curve) for curve in result.curves],
        "verdict": result.verdict,
        "advice": result.advice,
    }


def as_text(result: Probe) -> Iterator[str]:
    """Lay the result out for reading."""
    n = result.target.num_layers
    yield f"{'':<10}{'accept length':<24}{'accepted at each position':<32}fc <-"
    for name, outcome in (("declared", result.declared), ("stock", result.stock), ("best", result.best)):
        if outcome is None:
            yield f"{name:<10}not run: {result.undeclared[name]}"
            continue
        low, high = interval(outcome, result.groups)
        length = f"{outcome.total.accept_length:.3f} ({low:.3f} .. {high:.3f})"
        shares = "  ".join(f"{share:.1%}" for share in outcome.total.accept_per_position)
        words = " | ".join(assembly.spell(b, n) for b in boundaries(outcome.places, n))
        turned = f"; {spell_switches(outcome.switches)}" if outcome.switches else ""
        yield f"{name:<10}{length:<24}{shares:<32}{words}{turned}"
    if result.spec.stock.differences:
        yield "stock also computes otherwise (of this its row covers residual and vocab_map only):"
        yield from (f"  {difference}" for difference in result.spec.stock.differences)
    if result.gain is not None:
        difference, low, high = result.gain
        yield f"best - declared on prompts the search has not seen: {difference:+.3f} ({low:+.3f} .. {high:+.3f})"
    longest = max(len(answer.tokens) for answer in result.answers)
    for block, places in enumerate(result.alike):
        if places and result.verdict != "none_explains":
            spelled = " or ".join(sources(places, n))
            yield f"fc block {block}: the draft proposes as well from {spelled}, as far as these texts tell"
    for key, values in result.undecided.items():
        if result.verdict == "none_explains":
            break
        spelled = " or ".join(spell_switches(((key, value),)) for value in values)
        yield f"{len(result.answers)} texts of up to {longest} tokens do not tell whether it is {spelled} instead"
    yield ""
    yield f"{result.verdict}: {result.advice}"


def picture(result: Probe, file: Path) -> None:
    """Draw, for each fc block, how often the first choice is right against the boundary that feeds it.

    The other blocks stand at their best. What was declared, what stock would feed and the best are marked.

    Raises:
        CheckpointError: the file cannot be written.
        ValueError: the probe did not measure the curves.
    """
    if result.curves is None:
        raise ValueError("result: got no curves; expected a probe with_curves. Probe anew.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    n = result.target.num_layers
    # A little apart, since the final norm is no further step in depth.
    last = n + 1 + max(1, round(n / 15))
    figure, every = pyplot.subplots(
        len(result.curves), sharex=True, sharey=True, squeeze=False, figsize=(7.5, 1.9 * len(result.curves) + 0.9)
    )
    marks = (
        ("declared", result.declared, "s", "tab:orange"),
        ("stock", result.stock, "v", "tab:red"),
        ("best", result.best, "*", "tab:green"),
    )
    for block, (axes, curve) in enumerate(zip(every[:, 0], result.curves, strict=True)):
        axes.plot(range(n + 1), curve[:-1], color="tab:blue", linewidth=1.5)
        axes.plot([last], curve[-1:], "o", color="tab:blue", markersize=4)
        for name, outcome, shape, colour in marks:
            if outcome is not None:
                place = outcome.places[block]
                at = last if place > n else place
                axes.plot(
                    [at],
                    [curve[place]],
                    shape,
                    color=colour,
                    markersize=12 if shape == "*" else 8,
                    alpha=0.85,
                    label=name,
                )
        axes.set_ylabel(f"fc block {block}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    every[0, 0].legend(loc="lower left", frameon=False, ncols=3)
    every[0, 0].set_title("share of right first choices, the other blocks at their best", fontsize=10)
    ticks = list(range(0, n + 1, max(1, round(n / 10))))
    every[-1, 0].set_xticks([*ticks, last], [*map(str, ticks), "final\nnorm"])
    every[-1, 0].set_xlabel("boundary that feeds the block (0: embedding, k + 1: output of layer k)")
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be written, got {error}; expected a place for a picture. Choose another --plot."
        ) from error
    finally:
        pyplot.close(figure)
