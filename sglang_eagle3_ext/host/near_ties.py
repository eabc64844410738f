"""Is the first difference between two greedy answers a near-tie of the target's own logits?

In bfloat16 and float16 a verify of several rows is rounded differently from a decode of one row, so two tokens
that the target likes almost equally may change places. That is all that may happen: the judge here is the
target itself, run by transformers in float32 and in the lower precision, far from any server. In float32 nothing
may differ at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_eagle3_ext.host.measure import Record, first_difference
from sglang_eagle3_ext.host.servers import progress

if TYPE_CHECKING:
    from torch import Tensor

TOP = 10


@dataclass(frozen=True)
class Difference:
    """The first difference between an answer and the baseline's.

    Attributes:
        name: the server that differed.
        question: index of the question.
        position: index of the first differing token in the answer.
        gap: difference of the two tokens' logits in float32; ``None`` where there is nothing to weigh (one
            answer ends there, or the run was in float32) or the target could not be asked.
        rounding: the most by which the lower precision moves a logit of that position, over its likeliest tokens.
    """

    name: str
    question: int
    position: int
    gap: float | None
    rounding: float

    @property
    def is_near_tie(self) -> bool:
        """Say whether rounding can swap the two: each of the logits may move by ``rounding``."""
        return self.gap is not None and self.gap <= 2 * self.rounding


@dataclass(frozen=True)
class Disagreement:
    """Two continuations of one prefix: where an answer left the baseline's (``None``: it ends there)."""

    name: str
    question: int
    prefix: tuple[int, ...]
    position: int
    expected: int | None
    got: int | None

    def weigh(self, gap: float | None = None, rounding: float = 0.0) -> Difference:
        """Turn into a difference, with what the target says of it."""
        return Difference(self.name, self.question, self.position, gap, rounding)


def find_disagreements(records: Mapping[str, Record]) -> list[Disagreement]:
    """List where an answer first leaves the baseline's of the same round, each place once."""
    expected = {(answer.round, answer.question): answer for answer in records["baseline"].answers}
    found: dict[Disagreement, None] = {}
    for name, record in records.items():
        for answer in record.answers:
            base = expected[answer.round, answer.question]
            at = first_difference(base.token_ids, answer.token_ids)
            if at is None:
                continue
            item = Disagreement(
                name=name,
                question=answer.question,
                prefix=base.prompt_ids + base.token_ids[:at],
                position=at,
                expected=next(iter(base.token_ids[at:]), None),
                got=next(iter(answer.token_ids[at:]), None),
            )
            found[item] = None
    return list(found)


def judge(
    target: str | Path, disagreements: Sequence[Disagreement], dtype: str = "bfloat16", *, revision: str | None = None
) -> list[Difference]:
    """Measure, for every disagreement, the gap between the two tokens and what the served precision does to it.

    Args:
        target: folder or Hub id of the target.
        disagreements: what to judge; without any, or in float32, no model is loaded.
        dtype: ``float32``, ``bfloat16`` or ``float16``, the type in which the servers ran.
        revision: branch, tag or commit of the target on the Hub.

    Returns:
        One difference for each disagreement, by server and question.
    """
    whole = [item for item in disagreements if item.expected is not None and item.got is not None]
    if dtype == "float32":
        whole = []
    found = [item.weigh() for item in disagreements if item not in whole]
    if whole:
        prefixes = sorted({item.prefix for item in whole})
        exact = _last_logits(target, "float32", prefixes, revision)
        rounded = _last_logits(target, dtype, prefixes, revision)
        for item in whole:
            logits = exact[item.prefix]
            moved = (logits - rounded[item.prefix])[logits.topk(min(TOP, len(logits))).indices]
            gap = abs(float(logits[item.expected] - logits[item.got]))
            found.append(item.weigh(gap, float(moved.abs().max())))
    return sorted(found, key=lambda item: (item.name, item.question, item.position))


def _last_logits(
    target: str | Path, dtype: str, prefixes: Sequence[tuple[int, ...]], revision: str | None
) -> dict[tuple[int, ...], Tensor]:
    """Run the target over prefixes in one precision; one model at a time, for large ones' sake."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype), revision=revision or "main")
    model.eval()
    logits = {}
    with progress(len(prefixes), f"asking the target in {dtype}") as bar, torch.inference_mode():
        for prefix in prefixes:
            logits[prefix] = model(input_ids=torch.tensor([prefix])).logits[0, -1].float()
            bar.update()
    return logits
