"""Watch acceptance while serving: counters per draft position, and one warning when a draft looks mis-assembled.

A draft that is fed the wrong states crashes nothing and logs nothing; only its acceptance tells. SGLang brings the
accepted counts of every verify step to the host anyway. They are read there: nothing is copied from a device and
nothing waits for one.

How the thresholds were chosen, and how often the watch fires when it should and when it should not:
docs/watch.md, benchmarks/watch/.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any

from sglang_eagle3_ext.spec import AssemblyPlan, Expected

logger = logging.getLogger(__name__)

FLOOR = 0.15
"""Acceptance of the first draft token below which a draft is not merely weak."""

FIRST_STEPS = 500
"""Verify steps of texts that have ended before the first judgement."""

FEWEST_TEXTS = 8
"""Texts before the first judgement."""

LOOKS = 1.25
"""Judgements come when the verify steps have grown by this factor: a bounded number of chances to be wrong."""

FAR = 0.25
"""A quarter below a recorded value no category of text lies (of the demo's draft the hardest of eight: an eighth)."""

FAR_DEVIATIONS = 2.0
"""Standard errors that acceptance must lie below that, or below the floor."""

DEVIATIONS = 3.25
"""Standard errors that acceptance must lie below a recorded value itself."""

TEXT_STEPS = 128
"""A text is at most this many verify steps of one request; a long answer counts as several."""

SETTLED_TEXTS = 32
"""Texts from which the spread of a stream says how its topics differ; before, it may have been about one only."""

RECORDED_STEPS = 1000
"""Verify steps that a recorded value is taken to rest on where it does not say: it was measured on some text, too, and
errs as its mean."""

MOST_RECORDED_STEPS = 10_000
"""Verify steps that a recorded value is taken to rest on at most: what is served is other text."""

RECENT_STEPS = 100
"""Verify steps over which the exported rate of a position is taken."""


class Spread:
    """The mean of a stream of texts, and how far it may lie off, neighbours being alike or not.

    Sums of squares are kept over single texts and over runs of 2, 4, 8, ... texts. Where neighbours are alike
    (prompts arrive topic by topic), runs spread more than single texts would have it, and the largest of the
    estimates counts. Memory grows with the logarithm of the number of texts.
    """

    def __init__(self) -> None:
        self.chances = 0
        self.accepted = 0
        # For each scale: number of runs, their sums of chances squared, chances times accepted, accepted squared.
        self._sums: list[list[int]] = []
        self._halves: list[tuple[int, int] | None] = []

    @property
    def texts(self) -> int:
        """Count the texts."""
        return self._sums[0][0] if self._sums else 0

    @property
    def mean(self) -> float:
        """Return accepted drafts per chance; NaN without any."""
        return self.accepted / self.chances if self.chances else math.nan

    def add(self, chances: int, accepted: int) -> None:
        """Take in one text: how often a draft stood at the position, and how often it was accepted."""
        self.chances += chances
        self.accepted += accepted
        for scale in range(len(self._sums) + 1):
            if scale == len(self._sums):
                self._sums.append([0, 0, 0, 0])
                self._halves.append(None)
            for i, value in enumerate((1, chances * chances, chances * accepted, accepted * accepted)):
                self._sums[scale][i] += value
            half, self._halves[scale] = self._halves[scale], None
            if half is None:
                self._halves[scale] = (chances, accepted)
                return
            chances, accepted = chances + half[0], accepted + half[1]

    def error(self) -> float:
        """Return the standard error of the mean, from every scale with at least four runs; infinite without one."""
        squares = [
            (aa - 2 * self.mean * na + self.mean**2 * nn) * runs / (runs - 1)
            for runs, nn, na, aa in self._sums
            if runs >= 4
        ]
        return math.sqrt(max(0.0, *squares)) / self.chances if squares and self.chances else math.inf


@dataclass(frozen=True)
class Alarm:
    """Acceptance that lies below what is expected.

    Attributes:
        passes: which of the draft's passes propose too little: ``feature`` (draft 1) or ``recurrent`` (the others).
        got: accepted share of the drafts these passes proposed behind accepted ones.
        expected: what it should be.
        verify_steps: what it rests on, those of requests that are still running left out.
        texts: likewise.
        accept_per_position: share of verify steps in which draft i was accepted.
    """

    passes: str
    got: float
    expected: float
    verify_steps: int
    texts: int
    accept_per_position: tuple[float, ...]


class Watch:
    """Decide from the accepted drafts of every verify step whether a draft gets what it was trained on.

    The first draft of a chain comes from a feature pass, the others from recurrent passes. The share of accepted
    drafts is tested for both, the second given that the drafts before were accepted: what is wrong with one kind
    of pass hardly shows in the other, and either varies less from text to text than the accept length does.

    An alarm needs the mean to lie some standard errors below what is expected, or somewhat fewer errors far below it.
    The error is that of texts, not of verify steps (:class:`Spread`), so a stream of like texts convinces slowly.

    Args:
        expected: acceptance per position, as in ``eagle3_ext.expected``; as many positions as are to be compared.
        recorded_steps: verify steps that ``expected`` was measured on, so that it errs and depends on their text;
            ``None`` where it is a floor under any text.
    """

    def __init__(self, expected: Sequence[float], *, recorded_steps: int | None) -> None:
        self.expected = tuple(expected)
        self._recorded_steps = None if recorded_steps is None else min(recorded_steps, MOST_RECORDED_STEPS)
        self.restart()

    def restart(self) -> None:
        """Forget everything that was counted, and that an alarm was raised."""
        self.verify_steps = 0
        self.alarm: Alarm | None = None
        self._due: float = FIRST_STEPS
        self._feature, self._recurrent = Spread(), Spread()
        # For each request: verify steps that accepted 0, 1, ... drafts, and their number.
        self._open: dict[Hashable, list[int]] = {}
        self._closed = [0] * (len(self.expected) + 1)

    def count(self, requests: Sequence[Hashable], accepted: Sequence[int]) -> Alarm | None:
        """Take in one pass of the target.

        Args:
            requests: whose drafts were verified; a request that is not among them has ended.
            accepted: how many drafts of each were accepted.

        Returns:
            An alarm, at most once.
        """
        positions = len(self.expected)
        before, self._open = self._open, {}
        for request, drafts in zip(requests, accepted, strict=True):
            tally = before.pop(request, None) or [0] * (positions + 2)
            tally[drafts if drafts < positions else positions] += 1
            tally[-1] += 1
            if tally[-1] < TEXT_STEPS:
                self._open[request] = tally
            else:
                self._close(tally)
        for tally in before.values():
            self._close(tally)
        self.verify_steps += len(accepted)
        # Of closed texts: what is still open is not judged, and many open ones must not bring the judgement forward.
        judged = self._feature.chances
        if self.alarm is not None or judged < self._due or self._feature.texts < FEWEST_TEXTS:
            return None
        self._due = judged * LOOKS
        self.alarm = self._judge()
        return self.alarm

    def _close(self, tally: Sequence[int]) -> None:
        histogram = tally[:-1]
        self._closed = [total + count for total, count in zip(self._closed, histogram, strict=True)]
        reached = _reached(histogram)
        self._feature.add(reached[0], reached[1])
        if sum(reached[1:-1]):
            self._recurrent.add(sum(reached[1:-1]), sum(reached[2:]))

    def _judge(self) -> Alarm | None:
        reached = [1.0, *self.expected]
        for passes, spread, expected in (
            ("feature", self._feature, self.expected[0]),
            ("recurrent", self._recurrent, sum(reached[2:]) / max(sum(reached[1:-1]), 1e-9)),
        ):
            if spread.texts < FEWEST_TEXTS:
                continue
            error, far = spread.error(), expected
            if self._recorded_steps is not None:
                # The recorded value has an error of the same kind as the one measured here.
                error *= math.sqrt(1 + self._feature.chances / self._recorded_steps)
                far *= 1 - FAR
            below = spread.texts >= SETTLED_TEXTS and spread.mean + DEVIATIONS * error < expected
            if below or spread.mean + FAR_DEVIATIONS * error < far:
                counted = _reached(self._closed)
                shares = tuple(count / counted[0] for count in counted[1:])
                return Alarm(passes, spread.mean, expected, counted[0], self._feature.texts, shares)
        return None


def _reached(histogram: Sequence[int]) -> list[int]:
    """Return, for i = 0, 1, ..., the verify steps in which at least i drafts were accepted."""
    return [sum(histogram[i:]) for i in range(len(histogram))]


def comparable(expected: Expected | None, steps: int, topk: int, draft_tokens: int) -> tuple[tuple[float, ...], str]:
    """Choose what acceptance is compared with.

    A draft's place in a chain fixes its acceptance, so shorter and longer chains compare on the positions they
    share; a tree that is at least as wide and as large accepts at least as much, so that the recorded value is a
    lower bound there. A smaller tree accepts less, by an amount that is not known: then only the floor is left.

    Args:
        expected: what the draft records, ``None`` when it records nothing.
        steps: ``speculative_num_steps`` of this server; ``topk`` and ``draft_tokens`` likewise.
        topk: see above.
        draft_tokens: see above.

    Returns:
        Acceptance per position, empty when nothing compares, and why, as half a sentence.
    """
    if expected is None:
        return (), "the draft records none in eagle3_ext.expected"
    recorded = f"eagle3_ext.expected, recorded with {expected.steps} steps, topk {expected.topk}"
    positions = expected.accept_per_position[: min(steps, expected.steps)]
    if not positions or positions[0] <= 0:
        return (), f"{recorded}, names no position that compares"
    chains = topk == expected.topk == 1
    if not chains and (topk < expected.topk or draft_tokens < expected.draft_tokens):
        return (), f"{recorded} and {expected.draft_tokens} draft tokens, is of a larger tree than this server's"
    return positions, recorded


# ---- in SGLang --------------------------------------------------------------------------------------------


class Metrics:
    """Prometheus series per draft position, beside SGLang's own and with its labels.

    Args:
        collector: SGLang's collector of this scheduler, whose labels and kinds of metric are taken over.
    """

    def __init__(self, collector: Any) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR late, and the client reads it when it is imported.
        import prometheus_client

        counter = collector._counter_cls or prometheus_client.Counter
        gauge = collector._gauge_cls or prometheus_client.Gauge
        names = [*collector.labels, "position"]
        self._labels = collector.labels
        self._metrics = (
            counter(
                name="sglang:spec_num_correct_drafts_per_position_total",
                documentation="Verify steps in which the draft token at this position was accepted.",
                labelnames=names,
            ),
            counter(
                name="sglang:spec_num_proposed_drafts_per_position_total",
                documentation="Verify steps in which a draft token was proposed at this position.",
                labelnames=names,
            ),
            gauge(
                name="sglang:spec_accept_rate_per_position",
                documentation="Share of recent verify steps in which the draft token at this position was accepted.",
                labelnames=names,
                multiprocess_mode="mostrecent",
            ),
        )
        self._series: list[tuple[Any, ...]] = []
        self._recent: list[list[int]] = []

    def count(self, accepted: Sequence[int], proposed: int) -> None:
        """Count one pass of the target.

        Args:
            accepted: accepted drafts of each request.
            proposed: positions at which each was proposed drafts.
        """
        # Adaptive speculation may lengthen the chains while serving.
        while len(self._series) < proposed:
            labels = {**self._labels, "position": str(len(self._series) + 1)}
            self._series.append(tuple(metric.labels(**labels) for metric in self._metrics))
            self._recent.append([0, 0])
        for i in range(proposed):
            correct = sum(drafts > i for drafts in accepted)
            total_correct, total_proposed, rate = self._series[i]
            if correct:
                total_correct.inc(correct)
            total_proposed.inc(len(accepted))
            recent = self._recent[i]
            recent[0] += correct
            recent[1] += len(accepted)
            if recent[1] >= RECENT_STEPS:
                rate.set(recent[0] / recent[1])
                recent[:] = 0, 0


class Served:
    """A draft that this process serves, with its counters and its watches.

    Args:
        plan: what is served.
        steps: ``speculative_num_steps``; ``topk`` and ``draft_tokens`` likewise.
        topk: see above.
        draft_tokens: see above.
        warns: whether this process is the one of the server's that may warn.
    """

    def __init__(self, plan: AssemblyPlan, steps: int, topk: int, draft_tokens: int, warns: bool) -> None:
        self.plan, self._steps, self._topk, self._warns = plan, steps, topk, warns
        self._metrics: Metrics | None = None
        self._floor = Watch([FLOOR], recorded_steps=None)
        expected, why = comparable(plan.spec.expected, steps, topk, draft_tokens)
        recorded = plan.spec.expected and plan.spec.expected.verify_steps
        self._recorded = Watch(expected, recorded_steps=recorded or RECORDED_STEPS) if expected else None
        self._warned = False
        if warns:
            compared = f"with a floor only: {why}"
            if expected:
                rests = (
                    f"{recorded:,} verify steps" if recorded else f"steps nobody noted, taken for {RECORDED_STEPS:,}"
                )
                if recorded and recorded > MOST_RECORDED_STEPS:
                    rests += f", taken for {MOST_RECORDED_STEPS:,}"
                compared = f"with {_shares(expected)} per position, measured on {rests} ({why})"
            logger.info("  watch             acceptance is compared %s", compared)

    def restart(self) -> None:
        """Start anew with other weights, which no recorded value speaks of."""
        self._floor.restart()
        self._recorded = None
        self._warned = False

    def count(self, processor: Any, result: Any, batch: Any) -> None:
        """Take in one verify step of a batch.

        Args:
            processor: SGLang's batch result processor.
            result: its result, the accepted counts on the host.
            batch: the batch, in the order of the counts.
        """
        # SGLang's own counts leave these rows out, too: a step that overlap scheduling ran behind a request's end.
        rows = [
            (req, drafts)
            for req, drafts in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True)
            if not (req.is_retracted or req.finished())
        ]
        if not rows:
            return
        # A chain's length may change while serving; a tree's depth does not.
        proposed = self._steps if self._topk > 1 else result.speculative_num_draft_tokens - 1
        reporter = processor.metrics_reporter
        if reporter.current_scheduler_metrics_enabled:
            if self._metrics is None:
                self._metrics = Metrics(reporter.metrics_collector)
            self._metrics.count([drafts for _, drafts in rows], proposed)
        if not self._warns or self._warned or not proposed:
            return
        alike: list[tuple[Any, int]] = []
        others = rows
        if self._recorded is not None and proposed >= len(self._recorded.expected):
            # A recorded value is that of greedy decoding without a grammar; sampling accepts less.
            greedy = [req.sampling_params.top_k == 1 and req.grammar is None for req, _ in rows]
            alike, others = list(compress(rows, greedy)), list(compress(rows, map(not_, greedy)))
        self._warn(
            self._floor.count([req.rid for req, _ in others], [drafts for _, drafts in others]),
            "{} and more of any draft that fits its target, a weak one included",
        )
        if self._recorded is not None:
            self._warn(
                self._recorded.count([req.rid for req, _ in alike], [drafts for _, drafts in alike]),
                "{:.3f}, as eagle3_ext.expected records",
                ", or the text is harder than the one it was recorded on",
            )

    def _warn(self, alarm: Alarm | None, expected: str, doubt: str = "") -> None:
        if alarm is None or self._warned:
            return
        self._warned = True
        draft, target = self.plan.spec.path, self.plan.target.path
        logger.warning(
            "%s: acceptance of %s, got %.3f over %d verify steps (per position %s); expected %s. The draft may be fed "
            "other states than it was trained on%s. Run: sglang-eagle3 probe %s --target %s",
            draft,
            "the first draft token" if alarm.passes == "feature" else "draft tokens behind an accepted one",
            alarm.got,
            alarm.verify_steps,
            _shares(alarm.accept_per_position),
            expected.format(alarm.expected),
            doubt if alarm.got >= (1 - FAR) * alarm.expected else "",
            shlex.quote(draft),
            shlex.quote(target),
        )


def _shares(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in values) + "]"


_served: Served | None = None
"""The draft of this process; SGLang's scheduler and its models live in one."""


def start(_result: Any, draft_worker: Any) -> None:
    """Watch the draft of this process (AFTER the draft's attention backends are made)."""
    global _served
    from sglang.srt.runtime_context import get_parallel, get_spec

    plan = getattr(draft_worker.draft_runner.model, "plan", None)
    # Adaptive speculation makes its backends more than once.
    if not isinstance(plan, AssemblyPlan) or (_served is not None and _served.plan is plan):
        return
    parallel, spec = get_parallel(), get_spec()
    warns = parallel.tp_rank == 0 and not parallel.dp_rank
    _served = Served(
        plan,
        spec.speculative_num_steps,
        spec.speculative_eagle_topk,
        spec.speculative_num_draft_tokens,
        warns,
    )


def count(_tokens: Any, processor: Any, result: Any, batch: Any) -> None:
    """Count a verify step (AFTER the accepted counts of a batch were brought to the host)."""
    global _served
    if _served is None:
        return
    try:
        _served.count(processor, result, batch)
    except Exception:
        # Whatever is wrong with the watch, it must not end a server.
        logger.exception("The acceptance watch failed and is off until the next start. Please report it.")
        _served = None


def restart(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    """Start the watch anew (AFTER weights were updated)."""
    if _served is not None:
        _served.restart()
