"""Which assembly, and which setting of the switches, makes a draft propose what the target wrote.

Any assembly is a sum of projections, one boundary through one column block of ``fc`` each, and one draft layer away
from a score. An assembly is written as places on the boundary axis of the states (``features``).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.formats import read_draft, read_tensors
from sglang_eagle3_ext.probe.features import Answer
from sglang_eagle3_ext.reference import Chains, ReferenceDraft
from sglang_eagle3_ext.spec import DraftSpec

Places = tuple[int, ...]
"""An assembly by places on the boundary axis of the states, in fc column order; n + 1 is ``final_norm``."""

Switches = tuple[tuple[str, Any], ...]
"""Keys of ``eagle3_ext`` that differ from what the draft declares."""

PROJECTION_BYTES = 1 << 30
"""Projections that are kept; what does not fit is projected anew each time."""

ROPE_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Bases that trainers take when they do not read the config, and those that targets commonly have."""


class Candidates:
    """The drafts that a folder may hold: one for each setting of the switches.

    Args:
        path: the draft's folder.
        target: the target's folder, which lends embedding and head.
    """

    def __init__(self, path: str | Path, target: str | Path) -> None:
        self._path = path
        self.spec = read_draft(path)
        self.settled = self._settle()
        base = self.spec_with(self.settled)
        # In float32 once, so that all drafts share them; the embedding may be large and stays as it is stored.
        self.tensors = {
            name: tensor.float() if tensor.is_floating_point() and name != "embed_tokens.weight" else tensor
            for name, tensor in read_tensors(base)
        }
        self._embed, self._head = reference.borrowed(base, target)
        self._heads: dict[str, Tensor] = {}
        self._drafts: dict[Switches, ReferenceDraft] = {}
        self._projections: dict[str, _Projections] = {}
        self.draft(self.settled)  # whatever cannot be run says so now

    def _settle(self) -> Switches:
        """Turn the switches that the files themselves settle: a map that is none, norms that the tensors contradict."""
        settled: Switches = ()
        for key, values in (("vocab_map", ("offset", "absolute")), ("norms", ("none", "per_source", "concatenation"))):
            for value in values:
                turned = turn(settled, key, value)
                if len(self.errors(turned)) < len(self.errors(settled)):
                    settled = turned
        return settled

    def errors(self, switches: Switches) -> set[str]:
        """List the codes of what the reader would refuse."""
        return {f.code for f in self.spec_with(switches).findings if f.severity == "error"}

    def spec_with(self, switches: Switches) -> DraftSpec:
        """Let the reader itself say what the switches mean for this draft."""
        return read_draft(self._path, override=dict(switches)) if switches else self.spec

    def draft(self, switches: Switches) -> ReferenceDraft:
        """Build the draft under some switches; the last few are kept."""
        if switches not in self._drafts:
            while len(self._drafts) > 2:
                self._drafts.pop(next(iter(self._drafts)))
            spec = self.spec_with(switches)
            # The rows that a draft takes of its target's head, in float32 once for each reading of the vocabulary.
            head = self._heads.get(spec.vocab.map, self._head)
            made = ReferenceDraft(spec, self.tensors, embed=self._embed, lm_head=head)
            made.head = self._heads.setdefault(spec.vocab.map, made.head)
            self._drafts[switches] = made
        return self._drafts[switches]

    def hidden(self, answer: Answer, places: Places, switches: Switches) -> Tensor:
        """Assemble the draft's hidden input on one answer: [T - 1, E]."""
        draft = self.draft(switches)
        around = draft.spec.norms.around_fc
        if around not in self._projections:
            self._projections[around] = _Projections(draft.spec, self.tensors)
        return self._projections[around].hidden(answer, places)

    def alternatives(self, switches: Switches, thetas: Sequence[float]) -> Iterator[Switches]:
        """Turn each switch to each value that the files allow, one at a time."""
        spec = self.spec_with(switches)
        values: dict[str, tuple[Any, Sequence[Any]]] = {
            "residual": (spec.norms.residual, ("pre_norm", "post_norm")),
            "rope_theta": (spec.rope.theta, thetas),
            "vocab_map": (spec.vocab.map, () if spec.vocab.map == "none" else ("offset", "absolute")),
        }
        for key, (now, options) in values.items():
            for value in dict.fromkeys(options):
                turned = turn(switches, key, value)
                if value != now and self.errors(turned) <= self.errors(switches):
                    yield turned

    def recurrent(self, switches: Switches) -> Switches:
        """Turn the switch that only the second and later drafts of a chain feel."""
        now = self.spec_with(switches).norms.recurrent_state
        return turn(switches, "recurrent_state", "pre_norm" if now == "post_norm" else "post_norm")


def turn(switches: Switches, key: str, value: Any) -> Switches:
    return tuple(sorted(dict([*switches, (key, value)]).items()))


class _Projections:
    """What each boundary contributes through each column block of ``fc``, streamed from the states.

    Args:
        spec: says which norms there are around ``fc``.
        tensors: the draft's tensors by canonical names.
    """

    def __init__(self, spec: DraftSpec, tensors: Mapping[str, Tensor]) -> None:
        self._eps = spec.rms_norm_eps
        self._blocks = max(1, spec.num_sources)
        self._around = spec.norms.around_fc if spec.num_sources else "none"
        self._weight = self._bias = None
        if spec.num_sources:
            self._weight = tensors["fc.weight"].float().unflatten(1, (spec.num_sources, -1))
            self._bias = tensors["fc.bias"].float() if spec.fc_bias else None
        self._norm: Tensor | None = None
        if self._around == "per_source":
            self._norm = torch.stack([tensors[f"fc_norm.{k}.weight"].float() for k in range(self._blocks)])
        elif self._around == "concatenation":
            self._norm = tensors["input_norm.weight"].float().unflatten(0, (self._blocks, -1))
        self._kept: dict[tuple[int, int, int], Tensor] = {}
        self._bytes = 0

    def hidden(self, answer: Answer, places: Places) -> Tensor:
        """Add up an assembly: [T - 1, E], what ``ReferenceDraft.project`` gives for its features."""
        total = torch.stack([self._block(answer, block, place) for block, place in enumerate(places)]).sum(0)
        if self._around == "concatenation":
            squares = torch.stack([answer.states[:-1, place].float().pow(2).mean(-1) for place in places])
            total = total * torch.rsqrt(squares.mean(0) + self._eps)[:, None]
        return total if self._bias is None else total + self._bias

    def _block(self, answer: Answer, block: int, place: int) -> Tensor:
        key = (id(answer), block, place)  # answers live as long as the features they belong to
        if key in self._kept:
            return self._kept[key]
        x = answer.states[:-1, place].float()
        if self._around == "per_source":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        if self._norm is not None:
            x = x * self._norm[block]
        if self._weight is not None:
            x = F.linear(x, self._weight[:, block])
        if self._bytes + x.nbytes <= PROJECTION_BYTES:
            self._kept[key] = x
            self._bytes += x.nbytes
        return x


_SURPRISE = 10.0
"""Most nats that one token can cost: rows on which a candidate is lost say no more than that."""

_SHARPER = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Factors on the logits, of which each candidate gets its best: acceptance knows no temperature, and a candidate must
not win by being surer."""

_SURE = 3.0
"""Standard errors beyond which a difference is no accident."""

_TELLS = 2.0
"""Standard errors within which two candidates are not told apart, when the search is over."""

STAGES = (4, 24, 96)
"""Answers of the stages of the search, as long as they are at most half of all."""

_KEPT = (8, 3, 1)
"""Candidates of a race that leave each stage."""

_NAMED = 8
"""Most assemblies with one block moved, and most with two exchanged, that are found to be no worse."""

_RESTARTS = 1
"""Random starts."""

_SWEEPS = 4
"""Most sweeps over the blocks; two are usual."""


class Scorer:
    """Score candidates on some answers, each once.

    The score is the mean log-probability of what the target wrote, among the tokens of these answers and at the
    candidate's best temperature: it falls smoothly with the distance from the right boundary, where the share of
    accepted tokens moves in steps.

    Args:
        candidates: the drafts.
        answers: the answers; each must have a row.
    """

    def __init__(self, candidates: Candidates, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.scored = 0
        self._candidates = candidates
        self._seen: dict[tuple[Places, Switches], Tensor] = {}
        self._written = torch.cat([a.tokens[a.prompt_length :] for a in answers]).unique()

    @torch.inference_mode()
    def per_answer(self, places: Places, switches: Switches) -> Tensor:
        """Score one candidate, answer by answer.

        Returns:
            [number of answers], in nats, at most 0.
        """
        key = (places, switches)
        if key not in self._seen:
            self.scored += len(self.answers)
            draft = self._candidates.draft(switches)
            head, column = self._contest(draft)
            scores = []
            for answer in self.answers:
                step, _ = draft.feature_pass(self._candidates.hidden(answer, places, switches), answer.tokens)
                wanted = column[answer.tokens[answer.rows + 2]]
                scores.append(self._log_probabilities(step[answer.rows].normed, head, wanted))
            tempered = torch.stack(scores)
            self._seen[key] = tempered[:, tempered.mean(0).argmax()]
        return self._seen[key]

    @torch.inference_mode()
    def accepted(self, places: Places, switches: Switches) -> Tensor:
        """Count the drafts of a chain of three that are accepted, on the mean over the rows of each answer."""
        draft = self._candidates.draft(switches)
        self.scored += len(self.answers)
        counts = [
            accepted(draft, self._candidates.hidden(answer, places, switches), answer, 3).double().mean()
            for answer in self.answers
        ]
        return torch.stack(counts)

    @torch.inference_mode()
    def agreement(self, places: Places, switches: Switches, *, displaced: bool = False) -> Tensor:
        """Count on how many rows the draft's first choice is what the target wrote, answer by answer.

        Args:
            places: the assembly.
            switches: the switches.
            displaced: feed each answer with the states of another one, as a control.

        Returns:
            [number of answers, 2]: rows that agree, rows.
        """
        draft = self._candidates.draft(switches)
        counts = []
        for i, answer in enumerate(self.answers):
            read = self.answers[(i + 1) % len(self.answers)] if displaced else answer
            hidden = self._candidates.hidden(read, places, switches)
            wanted = len(answer.tokens) - 1
            hidden = hidden.repeat(math.ceil(wanted / len(hidden)), 1)[:wanted]
            if displaced:
                hidden = hidden.roll(wanted // 2, 0)
            step, _ = draft.feature_pass(hidden, answer.tokens)
            rows = answer.rows
            agrees = draft.to_target(step[rows].best()) == answer.tokens[rows + 2]
            counts.append(torch.tensor([int(agrees.sum()), len(rows)]))
        return torch.stack(counts)

    def _contest(self, draft: ReferenceDraft) -> tuple[Tensor, Tensor]:
        """Take the rows of the head that stand for tokens of these answers; [target vocabulary] -> row, or -1."""
        targets = draft.to_target(torch.arange(draft.spec.vocab.draft))
        known = torch.isin(targets, self._written).nonzero()[:, 0]
        column = torch.full((max(draft.spec.vocab.target, int(self._written.max()) + 1),), -1)
        column[targets[known]] = torch.arange(len(known))
        return draft.head[known], column

    @staticmethod
    def _log_probabilities(normed: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
        """Average over the rows of one answer, at each temperature: [number of temperatures]."""
        known = wanted >= 0
        logits = F.linear(normed[known], head)
        means = [
            (logits * sharper).log_softmax(-1).gather(1, wanted[known][:, None]).clamp(min=-_SURPRISE).mean()
            for sharper in _SHARPER
        ]
        return torch.stack(means).nan_to_num(-_SURPRISE)


def accepted(draft: ReferenceDraft, hidden: Tensor, answer: Answer, steps: int) -> Tensor:
    """Count, row by row of an answer, the drafts of a chain that are accepted; only chains that go on are run on.

    Args:
        draft: the draft.
        hidden: [T - 1, E], its hidden input.
        answer: what the target wrote.
        steps: drafts of a chain.

    Returns:
        [number of rows].
    """
    written = F.pad(answer.tokens, (0, steps), value=-1).unfold(0, steps, 1)[answer.rows + 2]
    step, cache = draft.feature_pass(hidden, answer.tokens)
    step = step[answer.rows]
    proposed = draft.to_target(step.best())
    counts = (proposed == written[:, 0]).long()
    on = counts.nonzero()[:, 0]
    if not len(on):
        return counts
    chains, step, proposed = Chains(draft, cache, answer.rows[on]), step[on], proposed[on]
    for k in range(1, steps):
        going = (counts[on] == k).nonzero()[:, 0]
        if not len(going):
            break
        step = chains.advance(proposed, step.state)
        # The others go along, and propose nothing that counts.
        proposed[going] = draft.to_target(step[going].best())
        counts[on[going]] += proposed[going] == written[on[going], k]
    return counts


class Search:
    """Find the assembly and the switches with the best score.

    Coordinate ascent on the fewest answers, from the best start, from the first start and from a random one (blocks
    may then share a place, so that one can move to where another still is). Then sweeps over every place of every
    block and every exchange of two blocks, in which the best go on to more answers, until nothing improves; then each
    switch, and the sweeps again if one was turned.

    Args:
        candidates: the drafts.
        stages: scorers on more and more answers, each with those of the one before.
        progress: is called with the number of answers that were scored since the last call.
    """

    def __init__(
        self,
        candidates: Candidates,
        stages: Sequence[Scorer],
        progress: Callable[[int], object] = lambda answers: None,
    ) -> None:
        self._candidates = candidates
        self._stages = stages
        self._progress = progress
        self._count = stages[0].answers[0].states.shape[1]
        self._blocks = max(1, candidates.spec.num_sources)
        self._switches = candidates.settled
        self._done = 0
        self.undecided: tuple[tuple[str, Any], ...] = ()
        """Keys of ``eagle3_ext`` and values that these answers do not tell from what ``run`` returned."""
        self.alike: tuple[Places, ...] = ()
        """For each block the places that these answers do not tell from the one that ``run`` returned."""

    def run(self, starts: Sequence[Places], *, thetas: Sequence[float] = (), seed: int = 0) -> tuple[Places, Switches]:
        """Search.

        Args:
            starts: assemblies to begin with, the declared one first where there is one.
            thetas: further bases of the rotary embedding to try.
            seed: of the random starts.

        Returns:
            The assembly and the switches that were turned.
        """
        rng = random.Random(seed)
        best = max(starts, key=self._first)
        lots = [tuple(rng.randrange(self._count) for _ in range(self._blocks)) for _ in range(_RESTARTS)]
        climbed = [self._climb(start) for start in dict.fromkeys([best, *starts[:1], *lots])]
        places = self._sweep(_distinct(max(climbed, key=self._first), self._count))
        for _ in range(3):
            before = self._switches
            for turned in self._candidates.alternatives(before, (*ROPE_THETAS, *thetas)):
                self._turn_if_it_helps(turned, partial(_score, places=places))
            if self._switches == before:
                break
            places = self._sweep(places)
        # Only whole chains feel it. What the later drafts are worth is counted, since no score of theirs is comparable
        # between a state that is normed and one that is not.
        turned = self._candidates.recurrent(self._switches)
        whole = partial(_accepted, places=places)
        self._turn_if_it_helps(turned, whole)
        others = list(self._candidates.alternatives(self._switches, (*ROPE_THETAS, *thetas)))
        self.undecided = tuple(
            _difference(other, self._switches)
            for other, judge in [
                *((other, partial(_score, places=places)) for other in others),
                (self._candidates.recurrent(self._switches), whole),
            ]
            if not self._is_worse(other, judge)
        )
        self.alike = self._find_alike(places)
        return places, self._switches

    def _first(self, places: Places) -> float:
        """Score on the fewest answers."""
        return self._scores(0, places).mean().item()

    def _scores(self, stage: int, places: Places) -> Tensor:
        scores = self._stages[stage].per_answer(places, self._switches)
        self._report()
        return scores

    def _report(self) -> None:
        done = sum(scorer.scored for scorer in self._stages)
        self._progress(done - self._done)
        self._done = done

    def _climb(self, places: Places) -> Places:
        for _ in range(_SWEEPS):
            before = places
            for block in range(self._blocks):
                # A stride over the depth first: the score falls smoothly with the distance from the right place.
                stride = _stride(self._count)
                options = {places[block], *range(0, self._count, stride), self._count - 2, self._count - 1}
                while True:
                    moved = [(*places[:block], p, *places[block + 1 :]) for p in sorted(options)]
                    places = max(moved, key=self._first)
                    if stride == 1:
                        break
                    stride = math.ceil(stride / 2)
                    options = {
                        p for p in range(places[block] - stride, places[block] + stride + 1, stride)
                        if 0 <= p < self._count
                    }  # fmt: skip
            places = max([places, *_exchanges(places)], key=self._first)
            if places == before:
                break
        return places

    def _sweep(self, places: Places) -> Places:
        for _ in range(_SWEEPS):
            before = places
            for block in range(self._blocks):
                free = [p for p in range(self._count) if p == places[block] or p not in places]
                places = self._race([(*places[:block], p, *places[block + 1 :]) for p in free])
            places = self._race([places, *_exchanges(places)])
            if places == before:
                break
        return places

    def _race(self, options: Sequence[Places]) -> Places:
        """Let the best of some candidates go on to more answers, as long as they cannot be told apart."""
        left = list(options)
        for stage, keep in enumerate(_KEPT):
            if len(left) == 1 or stage == len(self._stages):
                break
            scores = {places: self._scores(stage, places) for places in left}
            left.sort(key=lambda places: -scores[places].mean().item())
            leader = scores[left[0]]
            left = [places for places in left[:keep] if not beyond_chance(leader - scores[places])]
        return left[0]

    def _turn_if_it_helps(self, turned: Switches, judge: Callable[[Scorer, Switches], Tensor]) -> None:
        for scorer in self._stages[1:] or self._stages:
            gain = judge(scorer, turned) - judge(scorer, self._switches)
            self._report()
            if float(gain.mean()) < 0:
                return
        if beyond_chance(gain):
            self._switches = turned

    def _find_alike(self, places: Places) -> tuple[Places, ...]:
        """List for each block the places that it may have as well, by itself or in exchange with another block."""
        found: list[set[int]] = [set() for _ in places]
        free = [p for p in range(self._count) if p not in places]
        moved = [[(*places[:block], p, *places[block + 1 :]) for p in free] for block in range(self._blocks)]
        for others in (*moved, _exchanges(places)):
            for other in self._not_worse(places, others):
                for block, place in enumerate(other):
                    if place != places[block]:
                        found[block].add(place)
        return tuple(tuple(sorted(some)) for some in found)

    def _not_worse(self, places: Places, others: Sequence[Places]) -> list[Places]:
        """Choose the assemblies that answers do not tell from one that is at least as good."""
        left = list(others)
        for stage in range(len(self._stages)):
            best = self._scores(stage, places)
            loss = {other: best - self._scores(stage, other) for other in left}
            left.sort(key=lambda other: loss[other].mean().item())
            sure = _TELLS if stage == len(self._stages) - 1 else _SURE
            left = [other for other in left[:_NAMED] if not beyond_chance(loss[other], sure)]
        return left

    def _is_worse(self, turned: Switches, judge: Callable[[Scorer, Switches], Tensor]) -> bool:
        """Say whether answers tell that a switch must not be turned."""
        for scorer in self._stages[1:] or self._stages:
            loss = judge(scorer, self._switches) - judge(scorer, turned)
            self._report()
            if beyond_chance(loss):
                return True
        return beyond_chance(loss, _TELLS)


def _difference(turned: Switches, switches: Switches) -> tuple[str, Any]:
    """Name the one switch that was turned."""
    (changed,) = set(turned) - set(switches)
    return changed


def _score(scorer: Scorer, switches: Switches, places: Places) -> Tensor:
    return scorer.per_answer(places, switches)


def _accepted(scorer: Scorer, switches: Switches, places: Places) -> Tensor:
    return scorer.accepted(places, switches)


def beyond_chance(gain: Tensor, sure: float = _SURE) -> bool:
    """Say whether a mean gain over answers is more than an accident.

    With few answers the error itself is not known well, so that more errors are asked for: as many as Student's
    distribution exceeds as seldom as the normal one exceeds ``sure``, by Wallace's approximation (Annals of
    Mathematical Statistics 30, 1959).
    """
    free = len(gain) - 1
    if free < 1:
        return False
    error = float(gain.std()) / math.sqrt(len(gain))
    deviate = sure * (8 * free + 3) / (8 * free + 1)
    return float(gain.mean()) > math.sqrt(free * math.expm1(deviate**2 / free)) * error


def _stride(count: int) -> int:
    """Choose the first stride over the depth, about half the square root of it."""
    return max(1, round(math.sqrt(count) / 1.5))


def sizes(answers: int) -> list[int]:
    """Choose the answers of each stage of a search among so many."""
    return [*(size for size in STAGES if size < answers), answers]


def seconds_per_answer(candidates: Candidates, tokens: int) -> float:
    """Time how long a draft takes to project, to read and to score an answer, on no text.

    Args:
        candidates: the drafts.
        tokens: of the prompt and the answer, which is taken for half of them.

    Returns:
        Seconds.
    """
    draft = candidates.draft(candidates.settled)
    feed = torch.arange(tokens) % draft.spec.vocab.target
    features = torch.ones(tokens - 1, max(1, draft.spec.num_sources) * draft.spec.target_hidden_size)
    wanted, seconds = torch.zeros(tokens - 1 - tokens // 2, dtype=torch.int64), []
    with torch.inference_mode():
        for _ in range(4):
            began = time.perf_counter()
            step, _ = draft.feature_pass(draft.project(features), feed)
            Scorer._log_probabilities(step.normed[tokens // 2 :], draft.head, wanted)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one is slow


def search_bound(num_layers: int, blocks: int, sizes: Sequence[int]) -> int:
    """Bound how many answers a search scores.

    Args:
        num_layers: n.
        blocks: column blocks of ``fc``.
        sizes: answers of each stage.
    """
    count = num_layers + 2
    stride = _stride(count)
    scan = math.ceil(count / stride) + 3 + 3 * math.ceil(math.log2(stride) + 1)
    exchanges = blocks * (blocks - 1) // 2
    climbs = (2 + _RESTARTS) * _SWEEPS * (blocks * scan + exchanges) * sizes[0]
    entering: tuple[int, ...] = (count, *_KEPT)
    race = sum(size * number for size, number in zip(sizes, entering, strict=False))
    entering = (max(count, exchanges), _NAMED, _NAMED)
    alike = sum(size * number for size, number in zip(sizes, entering, strict=False))
    return climbs + 4 * _SWEEPS * (blocks + 1) * race + (blocks + 1) * alike + 60 * sizes[-1]


def _exchanges(places: Places) -> list[Places]:
    """List the assemblies in which two blocks have changed places."""
    made = []
    for i in range(len(places)):
        for j in range(i):
            changed = list(places)
            changed[i], changed[j] = changed[j], changed[i]
            made.append(tuple(changed))
    return made


def _distinct(places: Places, count: int) -> Places:
    """Move blocks that share a place to the nearest free ones, because every source must be another state."""
    taken: list[int] = []
    for place in places:
        free = [p for p in range(count) if p not in taken]
        taken.append(min(free, key=lambda p: abs(p - place)))
    return tuple(taken)
