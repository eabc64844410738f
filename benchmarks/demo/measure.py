"""Ask several servers the same questions in interleaved rounds, and sum up what they did."""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from benchmarks.demo.servers import Server, progress

MODEL = "default"


@dataclass(frozen=True)
class Answer:
    """What one server answered to one question.

    Attributes:
        question: index of the question.
        round: which repetition.
        prompt_ids: the prompt as the server tokenised it.
        token_ids: the answer.
        seconds: from sending the request to its last byte.
        verify_steps: forward passes of the target that verified drafts; ``None`` without speculation.
        histogram: ``histogram[k]`` verify steps accepted exactly k draft tokens.
    """

    question: int
    round: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    seconds: float
    verify_steps: int | None
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One server's line of the table; field names are those of the JSON."""

    name: str
    tok_s: float
    tok_s_rounds: list[float]
    spec_accept_length: float | None
    spec_accept_rate_per_position: list[float] | None
    identical: float
    near_ties: int | None
    prompts: int
    output_tokens: int


def client_of(server: Server) -> openai.OpenAI:
    """Return the stock OpenAI client, pointed at a server."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def ask(server: Server, question: str, max_tokens: int) -> tuple[Any, float]:
    """Send one question over the OpenAI-compatible API; return its choice and how long it took.

    SGLang's extensions of that API carry token ids and the counts of speculation in the same response.
    """
    flags = ("return_meta_info", "return_token_ids")
    client = client_of(server)
    start = time.perf_counter()
    response = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        extra_body=dict.fromkeys(flags, True),
    )
    return response.choices[0], time.perf_counter() - start


def flush_cache(server: Server) -> None:
    """Make a server forget earlier prompts, so that every round does the same work."""
    request = urllib.request.Request(f"{server.url}/flush_cache", method="POST")
    urllib.request.urlopen(request, timeout=60).close()


def measure(
    servers: Sequence[Server], questions: Sequence[str], rounds: int, max_tokens: int, warmup: str
) -> dict[str, list[Answer]]:
    """Ask every question of every server in every round, one request at a time.

    The servers take turns at each question and the order rotates, so that whatever else the machine does
    falls on all of them alike.
    """
    for server in servers:
        ask(server, warmup, max_tokens)
    answers: dict[str, list[Answer]] = {server.name: [] for server in servers}
    turns = [(r, q) for r in range(rounds) for q in range(len(questions))]
    with progress(len(turns) * len(servers), "asking") as bar:
        for turn, (r, q) in enumerate(turns):
            shift = turn % len(servers)
            for server in [*servers[shift:], *servers[:shift]]:
                bar.set_postfix_str(f"round {r + 1}/{rounds}, {server.name}", refresh=False)
                flush_cache(server)
                choice, seconds = ask(server, questions[q], max_tokens)
                extra = choice.model_extra
                meta = extra["meta_info"]
                answers[server.name].append(
                    Answer(
                        question=q,
                        round=r,
                        prompt_ids=tuple(extra["prompt_token_ids"]),
                        token_ids=tuple(extra["response_token_ids"]),
                        seconds=seconds,
                        verify_steps=meta.get("spec_verify_ct"),
                        histogram=tuple(meta.get("spec_correct_drafts_histogram") or ()),
                    )
                )
                bar.update()
    return answers


def accept_rate_per_position(histogram: Sequence[int], positions: int) -> list[float]:
    """Turn counts of accepted drafts into the share of verify steps in which draft i was accepted."""
    steps = sum(histogram)
    return [sum(histogram[i:]) / steps if steps else 0.0 for i in range(1, positions + 1)]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two answers differ (one may end there); ``None`` when equal."""
    if tuple(a) == tuple(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def sum_up(name: str, answers: Sequence[Answer], baseline: Sequence[Answer], steps: int) -> Row:
    """Compute one row of the table from one server's answers and the baseline's."""
    rounds = sorted({answer.round for answer in answers})
    per_round = []
    for r in rounds:
        part = [answer for answer in answers if answer.round == r]
        per_round.append(sum(len(a.token_ids) for a in part) / sum(a.seconds for a in part))
    tokens = sum(len(answer.token_ids) for answer in answers)
    verifies = sum(answer.verify_steps or 0 for answer in answers)
    width = max(len(answer.histogram) for answer in answers)
    histogram = [sum(a.histogram[k] for a in answers if len(a.histogram) > k) for k in range(width)]
    expected = {(answer.round, answer.question): answer.token_ids for answer in baseline}
    same = [answer.token_ids == expected[answer.round, answer.question] for answer in answers]
    return Row(
        name=name,
        tok_s=statistics.median(per_round),
        tok_s_rounds=per_round,
        spec_accept_length=tokens / verifies if verifies else None,
        spec_accept_rate_per_position=accept_rate_per_position(histogram, steps) if verifies else None,
        identical=sum(same) / len(same),
        near_ties=None,
        prompts=len({answer.question for answer in answers}),
        output_tokens=tokens,
    )
