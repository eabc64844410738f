"""What was declared, what stock would do and what a search found, measured and judged."""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import read_draft, read_target
from sglang_eagle3_ext.formats.folder import locate
from sglang_eagle3_ext.probe.features import Answer, Features
from sglang_eagle3_ext.probe.search import (
    STAGES,
    Candidates,
    Places,
    Scorer,
    Search,
    Switches,
    accepted,
    beyond_chance,
    search_bound,
    sizes,
    turn,
)
from sglang_eagle3_ext.reference import ChainResult
from sglang_eagle3_ext.spec import Boundary, DraftSpec, TargetFacts

_RESAMPLES = 2000

Verdict = Literal["declared_right", "other_found", "none_explains"]


@dataclass(frozen=True)
class Outcome:
    """How one candidate would have been served.

    Attributes:
        places: its assembly.
        switches: its switches.
        results: the counts of each answer.
    """

    places: Places
    switches: Switches
    results: tuple[ChainResult, ...]

    @property
    def total(self) -> ChainResult:
        """Pool all answers."""
        return sum(self.results[1:], self.results[0])


def measure(
    candidates: Candidates,
    answers: Sequence[Answer],
    places: Places,
    switches: Switches,
    *,
    steps: int,
    progress: Callable[[int], object] = lambda answers: None,
) -> Outcome:
    """Replay how a server would have served every answer with chains of ``steps`` drafts, as ``simulate_chain`` does.

    Args:
        candidates: the drafts.
        answers: what the target wrote.
        places: the assembly.
        switches: the switches.
        steps: drafts of a chain.
        progress: is called with the number of answers that are done.

    Returns:
        The counts.
    """
    draft = candidates.draft(switches)
    results = []
    with torch.inference_mode():
        for answer in answers:
            hidden = candidates.hidden(answer, places, switches)
            counts = accepted(draft, hidden, answer, steps).tolist()
            # A verify step emits what was accepted and one token more; the one before the first comes from prefill.
            histogram, emitted = [0] * (steps + 1), 1
            while emitted < answer.completion_tokens:
                histogram[counts[emitted - 1]] += 1
                emitted += counts[emitted - 1] + 1
            results.append(ChainResult(tuple(histogram), answer.completion_tokens))
            progress(1)
    return Outcome(places, switches, tuple(results))


def interval(
    outcome: Outcome, groups: Sequence[str | None], *, minus: Outcome | None = None, seed: int = 0
) -> tuple[float, float]:
    """Estimate the 95 % interval of an accept length, or of a difference, by a bootstrap over prompts.

    Prompts are drawn anew within their group, so that the mixture of groups stays what it is. A difference is taken
    on the same draws.

    Args:
        outcome: what was measured.
        groups: the group of each answer.
        minus: what to subtract.
        seed: of the draws.

    Returns:
        Lower and upper end; NaN with fewer than two answers.
    """
    if len(outcome.results) < 2:
        return math.nan, math.nan
    members = [torch.tensor([i for i, g in enumerate(groups) if g == group]) for group in dict.fromkeys(groups)]
    if min(map(len, members)) < 2:
        members = [torch.arange(len(groups))]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.cat([m[torch.randint(len(m), (_RESAMPLES, len(m)), generator=generator)] for m in members], dim=1)

    def lengths(measured: Outcome) -> Tensor:
        counts = torch.tensor([[r.completion_tokens, r.verify_steps] for r in measured.results]).double()
        drawn = counts[draws].sum(1)
        return drawn[:, 0] / drawn[:, 1]

    values = lengths(outcome) if minus is None else lengths(outcome) - lengths(minus)
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


_CONTROL = 48
"""Answers on which first choices are compared with those on states of another text."""

_CURVE = 12
"""Answers behind each point of a curve."""

_WEAK = 0.3
"""Share of first drafts accepted below which a rightly assembled draft is called weak."""


@dataclass(frozen=True)
class Probe:
    """What was found out about one draft on one target.

    Attributes:
        spec: the draft as it declares itself.
        target: the target's facts.
        answers: everything that was measured on.
        steps: drafts of a chain.
        declared: the declared assembly, ``None`` where it cannot be run (``undeclared`` says why).
        stock: what stock SGLang would capture, likewise.
        best: what was found.
        gain: accept length of ``best`` less that of ``declared`` on prompts that the search has not seen, with its
            95 % interval; ``None`` where they are the same or nothing is declared.
        agreement: share of first choices that are right with ``best``, and with states of another answer.
        curves: for each fc block the share of first choices that are right at each place; ``None`` unless asked for.
        verdict: the verdict.
        advice: one sentence.
        undeclared: why there is no ``declared``, or no ``stock``.
        alike: for each fc block the places that this text does not tell from that of ``best``.
        undecided: keys of ``eagle3_ext`` with the values that this text does not tell from those of ``best``.
    """

    spec: DraftSpec
    target: TargetFacts
    answers: tuple[Answer, ...]
    steps: int
    declared: Outcome | None
    stock: Outcome | None
    best: Outcome
    gain: tuple[float, float, float] | None
    agreement: tuple[float, float]
    curves: tuple[tuple[float, ...], ...] | None
    verdict: Verdict
    advice: str
    undeclared: Mapping[str, str]
    undecided: Mapping[str, tuple[Any, ...]]
    alike: tuple[Places, ...]

    @property
    def groups(self) -> list[str | None]:
        """Name the group of each answer."""
        return [answer.group for answer in self.answers]


def probe(
    draft: str | Path,
    target: str | Path,
    features: Features,
    *,
    steps: int = 3,
    seed: int = 0,
    with_curves: bool = False,
    progress: Callable[[str, int], Callable[[int], object]] = lambda what, total: lambda done: None,
    name: str | None = None,
    revision: str | None = None,
    candidates: Candidates | None = None,
) -> Probe:
    """Find out which assembly a draft was trained with.

    Args:
        draft: folder of the draft.
        target: folder of the target; lends its embedding and head where the draft has none of its own.
        features: what the target wrote, with its states.
        steps: drafts of a chain (topk 1).
        seed: of the choice of answers and of the random starts.
        with_curves: whether to measure ``Probe.curves``.
        progress: is called with a name and a total, and returns what advances it.
        name: the draft in the user's words, such as a Hub id, for the advice; the folder by default.
        revision: its branch, tag or commit on the Hub, where one was asked for, for the advice.
        candidates: of this draft and this target, where they have been read.

    Returns:
        What was found.

    Raises:
        CheckpointError: the draft cannot be read, does not fit the target, or the features are not this target's.
        UnsupportedError: the draft is of a kind that ``reference`` does not run.
    """
    facts = read_target(target)
    candidates = Candidates(draft, target) if candidates is None else candidates
    spec = candidates.spec
    plan = assembly.plan(spec, facts)
    check_pair(spec, target, features)
    longest = max(len(answer.tokens) for answer in features.answers)
    if steps >= longest:
        raise CheckpointError(
            f"--steps: got {steps} with texts of up to {longest} tokens; expected chains that are shorter. Give fewer."
        )
    n = facts.num_layers
    blocks = max(1, spec.num_sources)
    undeclared: dict[str, str] = {}

    def runnable(name: str, boundaries: Sequence[Boundary] | None) -> Places | None:
        places = _places(boundaries, n) if boundaries is not None else None
        if places is not None and len(places) == blocks:
            return places
        undeclared[name] = (
            "stock SGLang refuses this pair or loses a state"
            if boundaries is None
            else f"it names {list(boundaries)}, and fc was trained on {blocks} of the boundaries 0..{n}"
        )
        return None

    declared = runnable("declared", plan.boundaries)
    if declared is not None and candidates.settled:
        undeclared["declared"] = f"its files can only be read with {spell_switches(candidates.settled)}"
        declared = None
    stock = runnable("stock", plan.stock_boundaries)
    stock_switches = _stock_switches(candidates)
    if stock is not None and not candidates.errors(stock_switches) <= candidates.errors(candidates.settled):
        undeclared["stock"] = "it reads d2t as offsets, which leads out of the target's vocabulary"
        stock = None
    starts = [s for s in (declared, stock) if s is not None] + _conventions(candidates, facts, blocks)

    seen, unseen = _split(features.answers, seed)
    counts = sizes(len(seen))
    stages = [Scorer(candidates, seen[:size]) for size in counts]
    advance = progress("search", search_bound(n, blocks, counts))
    search = Search(candidates, stages, advance)
    places, switches = search.run(list(dict.fromkeys(starts)), thetas=_target_thetas(target), seed=seed)
    undecided: dict[str, tuple[Any, ...]] = {}
    for key, value in search.undecided:
        undecided[key] = (*undecided.get(key, ()), value)

    best_is_declared = declared is not None and places == declared and not switches
    wanted: dict[str, tuple[Places, Switches]] = {"best": (places, switches)}
    if declared is not None:
        wanted["declared"] = (declared, ())
    if stock is not None:
        wanted["stock"] = (stock, stock_switches)
    advance = progress("measure", len(set(wanted.values())) * len(features.answers))
    outcomes = {
        key: measure(candidates, features.answers, *key, steps=steps, progress=advance)
        for key in dict.fromkeys(wanted.values())
    }
    measured = {name: outcomes[key] for name, key in wanted.items()}
    best = measured["best"]
    gain = None
    if declared is not None and not best_is_declared:
        gain = _gain(best, measured["declared"], features.answers, unseen)

    held = Scorer(candidates, [features.answers[i] for i in unseen[:_CONTROL]])
    right = held.agreement(places, switches)
    control = held.agreement(places, switches, displaced=True)
    shares = _share(right), _share(control)
    explained = _explains(right, control)
    verdict: Verdict
    if not explained:
        verdict = "none_explains"
    elif best_is_declared or (gain is not None and gain[1] <= 0):
        verdict = "declared_right"
    else:
        verdict = "other_found"
    curves = None
    if with_curves:
        advance = progress("curves", (n + 2) * blocks)
        curves = _curves(Scorer(candidates, seen[:_CURVE]), places, switches, advance)
    result = Probe(
        spec, facts, features.answers, steps, measured.get("declared"), measured.get("stock"), best, gain, shares,
        curves, verdict, "", undeclared, undecided, search.alike,
    )  # fmt: skip
    named = str(draft) if name is None else name
    return replace(result, advice=_advise(result, plan.origins.get("boundaries", "default"), named, revision))


def check_pair(spec: DraftSpec, target: str | Path, features: Features | None = None) -> None:
    """Check that draft, target and states belong together.

    Args:
        spec: the draft.
        target: folder of the target.
        features: states, where there are any yet.

    Raises:
        CheckpointError: they do not; holds every problem.
    """
    facts = read_target(target)
    findings = assembly.plan(spec, facts).findings
    problems = [f.message for f in findings if f.severity == "error" and f.code in ("target_width", "vocab_size")]
    if spec.num_sources > facts.num_layers + 2:
        problems.append(
            f"{spec.path}:fc.weight: got {spec.num_sources} blocks of columns; expected at most "
            f"{facts.num_layers + 2}, one for each boundary of {facts.path} and one for the state after its final "
            "norm. Check --target."
        )
    if features is not None and not features.answers:
        problems.append("features: got no answer of two tokens or more; expected some. Give other prompts.")
    elif features is not None:
        _, places, width = features.answers[0].states.shape
        if (places, width) != (facts.num_layers + 2, facts.hidden_size):
            problems.append(
                f"features: got {places - 2} layers of width {width}; expected the {facts.num_layers} of width "
                f"{facts.hidden_size} of {facts.path}. Capture them on this target."
            )
        largest = max(int(a.tokens.max()) for a in features.answers)
        if largest >= spec.vocab.target:
            problems.append(
                f"features: got token {largest}; expected ids below {spec.vocab.target}. Capture them on this target."
            )
    if problems:
        raise CheckpointError("\n".join(problems))


def _places(boundaries: Iterable[Boundary], num_layers: int) -> Places | None:
    """Find the places of boundaries on the axis of states; ``None`` where one lies outside."""
    places = tuple(num_layers + 1 if b == "final_norm" else int(b) for b in boundaries)
    return places if all(0 <= p <= num_layers + 1 for p in places) else None


def boundaries(places: Places, num_layers: int) -> tuple[Boundary, ...]:
    return tuple("final_norm" if p == num_layers + 1 else p for p in places)


def sources(places: Places, num_layers: int) -> list[str]:
    """Spell an assembly as ``eagle3_ext.sources``."""
    return ["embed" if p == 0 else "final_norm" if p > num_layers else f"layer{p - 1}" for p in places]


def _conventions(candidates: Candidates, facts: TargetFacts, blocks: int) -> list[Places]:
    """List what the known conventions make of this draft: its own ids in each reading, then the trainers' defaults."""
    n = facts.num_layers
    read: list[Places | None] = []
    for override in _id_readings(candidates.spec):
        spec = read_draft(candidates.spec.path, override=override)
        read.append(_places(assembly.plan(spec, facts).boundaries, n))
    classic = (2, n // 2, n - 3)
    for shift in (0, 1, -1):
        read.append(tuple(b + shift for b in classic))
    read.append((0, n // 2, n - 3))
    read.append((n - 3, n // 2, 2))
    spread = tuple(round(i * n / max(1, blocks - 1)) for i in range(blocks))
    fits = [p for p in read if p is not None and len(p) == blocks and all(0 <= x <= n + 1 for x in p)]
    return list(dict.fromkeys([*fits, spread, (n + 1,) * blocks if blocks == 1 else spread[::-1]]))


def _id_readings(spec: DraftSpec) -> list[dict[str, str]]:
    """List the ways to read a checkpoint's list of plain ids: what an id means, and in which order."""
    if not spec.sources or all(s.kind != "id" for s in spec.sources):
        return [{"order": order} for order in ("as_listed", "ascending")] if spec.sources else []
    return [
        {"layer_ids": meaning, "order": order}
        for meaning in ("output", "boundary")
        for order in ("ascending", "as_listed")
    ]


def _target_thetas(target: str | Path) -> tuple[float, ...]:
    """Read the base of the target's own rotary embedding, which trainers copy."""
    config = json.loads((locate(target, None, weights=False) / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config") or config
    theta = inner.get("rope_theta") or (inner.get("rope_parameters") or {}).get("rope_theta")
    return (float(theta),) if isinstance(theta, (int, float)) else ()


def _stock_switches(candidates: Candidates) -> Switches:
    """Say what stock computes otherwise than the draft declares, as far as switches can say it."""
    switches = candidates.settled
    spec = candidates.spec_with(switches)
    if spec.norms.residual == "post_norm":
        switches = turn(switches, "residual", "pre_norm")
    if spec.vocab.map == "absolute":
        switches = turn(switches, "vocab_map", "offset")
    return switches


def _split(answers: Sequence[Answer], seed: int) -> tuple[list[Answer], list[int]]:
    """Choose the answers to search on, the groups taking turns, and those to judge on.

    Returns:
        The former, and the places of the latter; both are all answers where there are fewer than six.
    """
    everything = list(range(len(answers)))
    if len(everything) < 6:
        return list(answers), everything
    order = random.Random(seed).sample(everything, len(everything))
    by_group: dict[str | None, list[int]] = {}
    for i in order:
        by_group.setdefault(answers[i].group, []).append(i)
    longest = max(map(len, by_group.values()))
    turns = [members[t] for t in range(longest) for members in by_group.values() if t < len(members)]
    chosen = turns[: min(STAGES[-1], len(answers) // 2)]
    return [answers[i] for i in chosen], turns[len(chosen) :]


def _gain(
    best: Outcome, declared: Outcome, answers: Sequence[Answer], unseen: Sequence[int]
) -> tuple[float, float, float]:
    """Compare two outcomes on the unseen answers: difference of the accept lengths, and its interval."""
    one, other = (replace(o, results=tuple(o.results[i] for i in unseen)) for o in (best, declared))
    low, high = interval(one, [answers[i].group for i in unseen], minus=other)
    return one.total.accept_length - other.total.accept_length, low, high


def _share(counts: Tensor) -> float:
    return float(counts[:, 0].sum() / counts[:, 1].sum())


def _explains(right: Tensor, control: Tensor) -> bool:
    """Say whether the draft reads anything out of the states: it must do better than with another answer's.

    The unit is the answer, since rows of one answer resemble each other.
    """
    gain = (right[:, 0] - control[:, 0]).double() / right[:, 1]
    share, chance = _share(right), _share(control)
    return beyond_chance(gain) and share > 1.5 * chance and share - chance > 0.02


def _curves(
    scorer: Scorer, places: Places, switches: Switches, progress: Callable[[int], object]
) -> tuple[tuple[float, ...], ...]:
    """Measure, block by block, how often the first choice is right at each place."""
    curves = []
    for block in range(len(places)):
        curve = []
        for p in range(scorer.answers[0].states.shape[1]):
            curve.append(_share(scorer.agreement((*places[:block], p, *places[block + 1 :]), switches)))
            progress(1)
        curves.append(tuple(curve))
    return tuple(curves)


def spell_switches(switches: Switches) -> str:
    return ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in switches)


def _advise(result: Probe, origin: str, draft: str, revision: str | None) -> str:
    """Say in one sentence what to do.

    Args:
        result: what was found, without advice.
        origin: where the declared boundaries come from.
        draft: the draft as the user names it, a folder or a Hub id.
    """
    n, best = result.target.num_layers, result.best
    found = f"[{', '.join(sources(best.places, n))}]"
    if result.verdict == "none_explains":
        return (
            f"No assembly explains this draft on {result.target.path}: its first choice is right on "
            f"{result.agreement[0]:.1%} of the rows with the best assembly and on {result.agreement[1]:.1%} with the "
            "states of another text; check that this is the target it was trained for."
        )
    if result.verdict == "declared_right":
        total = (result.declared or best).total
        first, also = total.accept_per_position[0], ""
        if result.gain is not None and result.gain[2] >= 0:
            also = f" ({found} cannot be told from it)"
        weak = ""
        if first < _WEAK:
            weak = f"; the draft is weak on this text, {first:.1%} of its first drafts are accepted"
        return f"The assembly is right{also}{weak}: accept length {total.accept_length:.2f}."
    sets = [f"--set sources={','.join(sources(best.places, n))}"]
    sets += [f"--set {spell_switches((switch,))}" for switch in best.switches]
    trained = found + (f" with {spell_switches(best.switches)}" if best.switches else "")
    if result.declared is None:
        start = f"The draft was trained with {trained}, and cannot be served as declared"
    elif origin == "default":
        start = (
            f"The draft names no sources and would be served with [{', '.join(sources(result.declared.places, n))}], "
            f"it was trained with {trained}"
        )
    else:
        start = f"Served with [{', '.join(sources(result.declared.places, n))}], trained with {trained}"
    command = f"sglang-eagle3 configure {shlex.quote(draft)} {' '.join(sets)}"
    if not Path(draft).expanduser().is_dir():
        # What lies in the Hub's cache is shared, and is not written to.
        version = "" if revision is None else f" --revision {shlex.quote(revision)}"
        return f"{start}: run {command}{version} --out DIR, and serve DIR."
    return f"{start}: run {command}, or probe with --write."
