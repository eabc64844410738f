"""Is the first difference between two greedy answers a near-tie of the target's own logits?

In bfloat16 a verify of several rows is rounded differently from a decode of one row, so two tokens that the
target likes almost equally may change places. That is all that may happen: the judge here is the target
itself, run by transformers in float32 and in bfloat16, far from any server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo.servers import progress

TOP = 10


@dataclass(frozen=True)
class Difference:
    """The first difference between an answer and the baseline's.

    Attributes:
        name: the server that differed.
        question: index of the question.
        position: index of the first differing token in the answer.
        gap: difference of the two tokens' logits in float32.
        rounding: the most by which bfloat16 moves a logit of that position, over its likeliest tokens.
    """

    name: str
    question: int
    position: int
    gap: float
    rounding: float

    @property
    def is_near_tie(self) -> bool:
        """Say whether rounding can swap the two: each of the logits may move by ``rounding``."""
        return self.gap <= 2 * self.rounding


@dataclass(frozen=True)
class Disagreement:
    """Two continuations of one prefix: where an answer left the baseline's."""

    name: str
    question: int
    prefix: tuple[int, ...]
    position: int
    expected: int
    got: int


def judge(target: Path, disagreements: Sequence[Disagreement]) -> list[Difference]:
    """Measure, for every disagreement, the gap between the two tokens and what bfloat16 does to it."""
    if not disagreements:
        return []
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    models = [
        AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
    ]
    found: list[Difference] = []
    prefixes = sorted({item.prefix for item in disagreements})
    with progress(len(prefixes), "asking the target in float32") as bar:
        for prefix in prefixes:
            ids = torch.tensor([prefix])
            with torch.inference_mode():
                exact, rounded = (model(input_ids=ids).logits[0, -1].float() for model in models)
            rounding = float((exact - rounded)[exact.topk(TOP).indices].abs().max())
            found += [
                Difference(
                    name=item.name,
                    question=item.question,
                    position=item.position,
                    gap=abs(float(exact[item.expected] - exact[item.got])),
                    rounding=rounding,
                )
                for item in disagreements
                if item.prefix == prefix
            ]
            bar.update()
    return sorted(found, key=lambda item: (item.name, item.question, item.position))
