"""Ask several servers the same questions in interleaved rounds, and sum up what they did."""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.servers import Server, progress

if TYPE_CHECKING:
    import openai

MODEL = "default"


@dataclass(frozen=True)
class Answer:
    """What one server answered to one question.

    Attributes:
        question: index of the question.
        round: which repetition.
        prompt_ids: the prompt as the server tokenised it.
        token_ids: the answer.
        verify_steps: forward passes of the target that verified drafts; ``None`` without speculation.
        histogram: ``histogram[k]`` verify steps accepted exactly k draft tokens.
    """

    question: int
    round: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    verify_steps: int | None
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """Everything one server answered.

    Attributes:
        answers: the answers.
        seconds: for every round, how long its requests kept the server busy.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One server's line of the table; field names are those of the JSON.

    Attributes:
        cycle_cost: seconds for each verify step over the baseline's seconds for each token; reading the
            prompt counts in both.
    """

    name: str
    tok_s: float
    tok_s_rounds: list[float]
    spec_accept_length: float | None
    spec_accept_rate_per_position: list[float] | None
    identical: float
    near_ties: int | None
    prompts: int
    output_tokens: int
    verify_steps: int | None
    cycle_cost: float | None


def client_of(server: Server) -> openai.OpenAI:
    """Return the stock OpenAI client, pointed at a server.

    Raises:
        UnsupportedError: the package is not installed.
    """
    try:
        import openai
    except ImportError:
        raise UnsupportedError(
            "openai: not installed; expected the client with which the servers are asked. "
            "Install it: pip install openai."
        ) from None
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3600, max_retries=0)


def ask(client: openai.OpenAI, question: str, max_tokens: int) -> Any:
    """Send one question over the OpenAI-compatible API and return its choice.

    SGLang's extensions of that API carry token ids and the counts of speculation in the same response.
    """
    flags = ("return_meta_info", "return_token_ids")
    response = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        extra_body=dict.fromkeys(flags, True),
    )
    return response.choices[0]


def flush_cache(server: Server) -> None:
    """Make a server forget earlier prompts, so that every round does the same work."""
    request = urllib.request.Request(f"{server.url}/flush_cache", method="POST")
    urllib.request.urlopen(request, timeout=60).close()


def ask_all(
    server: Server, questions: Sequence[str], max_tokens: int, pool: ThreadPoolExecutor
) -> tuple[list[Any], float]:
    """Send questions with as many threads as the pool has; return the choices and how long all of it took.

    Raises:
        ServerError: the server refused one or went away.
    """
    # A client of its own for every call: an idle connection may be closed while it is taken up again.
    client = client_of(server)
    start = time.perf_counter()
    try:
        choices = list(pool.map(lambda question: ask(client, question, max_tokens), questions))
    except Exception as error:
        # The client raises errors of its own, of its HTTP library and of the operating system.
        raise server.error(f"gave no answer, got {type(error).__name__}: {error}") from error
    return choices, time.perf_counter() - start


def measure(
    servers: Sequence[Server],
    questions: Sequence[str],
    rounds: int,
    max_tokens: int,
    warmup: str,
    concurrency: int = 1,
) -> dict[str, Record]:
    """Ask every question of every server in every round.

    The servers take turns and the order rotates, so that whatever else the machine does falls on all of them
    alike: one request at a time they take turns at each question, several at a time at each round.

    Args:
        servers: the servers, running.
        questions: what to ask.
        rounds: how often to ask each question.
        max_tokens: longest answer.
        warmup: a question that is asked first and not counted.
        concurrency: how many requests a server is sent at a time.

    Returns:
        What each server answered, by its name.

    Raises:
        ServerError: a server refused a request or went away.
    """
    records = {server.name: Record(seconds=[0.0] * rounds) for server in servers}
    every = list(range(len(questions)))
    batches = [[q] for q in every] if concurrency == 1 else [every]
    turns = [(r, batch) for r in range(rounds) for batch in batches]
    pool = ThreadPoolExecutor(concurrency)
    try:
        for server in servers:
            ask_all(server, [warmup] * concurrency, max_tokens, pool)
        with progress(rounds * len(questions) * len(servers), "asking") as bar:
            for turn, (r, batch) in enumerate(turns):
                shift = turn % len(servers)
                for server in [*servers[shift:], *servers[:shift]]:
                    bar.set_postfix_str(f"round {r + 1}/{rounds}, {server.name}", refresh=False)
                    flush_cache(server)
                    choices, seconds = ask_all(server, [questions[q] for q in batch], max_tokens, pool)
                    record = records[server.name]
                    record.seconds[r] += seconds
                    record.answers.extend(read_answer(q, r, choice) for q, choice in zip(batch, choices, strict=True))
                    bar.update(len(batch))
    finally:
        # Whoever ends this early stops the servers next; a request in flight must not hold that up.
        pool.shutdown(wait=False, cancel_futures=True)
    return records


def read_answer(question: int, round: int, choice: Any) -> Answer:
    """Take out of a choice what the figures need."""
    extra = choice.model_extra
    meta = extra["meta_info"]
    return Answer(
        question=question,
        round=round,
        prompt_ids=tuple(extra["prompt_token_ids"]),
        token_ids=tuple(extra["response_token_ids"]),
        verify_steps=meta.get("spec_verify_ct"),
        histogram=tuple(meta.get("spec_correct_drafts_histogram") or ()),
    )


def accept_rate_per_position(histogram: Sequence[int], positions: int) -> list[float]:
    """Turn counts of accepted drafts into the share of verify steps in which draft i was accepted."""
    steps = sum(histogram)
    return [sum(histogram[i:]) / steps if steps else 0.0 for i in range(1, positions + 1)]


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Return the tokens for each verify step; ``None`` where nothing was verified."""
    verifies = sum(answer.verify_steps or 0 for answer in answers)
    return sum(len(answer.token_ids) for answer in answers) / verifies if verifies else None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two answers differ (one may end there); ``None`` when equal."""
    if tuple(a) == tuple(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def sum_up(name: str, record: Record, baseline: Record, steps: int) -> Row:
    """Compute one row of the table from one server's answers and the baseline's."""
    answers = record.answers
    per_round = [
        sum(len(answer.token_ids) for answer in answers if answer.round == r) / seconds
        for r, seconds in enumerate(record.seconds)
    ]
    tokens = sum(len(answer.token_ids) for answer in answers)
    base_tokens = sum(len(answer.token_ids) for answer in baseline.answers)
    verifies = sum(answer.verify_steps or 0 for answer in answers)
    width = max(len(answer.histogram) for answer in answers)
    histogram = [sum(a.histogram[k] for a in answers if len(a.histogram) > k) for k in range(width)]
    expected = {(answer.round, answer.question): answer.token_ids for answer in baseline.answers}
    same = [answer.token_ids == expected[answer.round, answer.question] for answer in answers]
    decode = sum(baseline.seconds) / base_tokens if base_tokens else 0.0
    return Row(
        name=name,
        tok_s=statistics.median(per_round),
        tok_s_rounds=per_round,
        spec_accept_length=accept_length(answers),
        spec_accept_rate_per_position=accept_rate_per_position(histogram, steps) if verifies else None,
        identical=sum(same) / len(same),
        near_ties=None,
        prompts=len({answer.question for answer in answers}),
        output_tokens=tokens,
        verify_steps=verifies or None,
        cycle_cost=sum(record.seconds) / verifies / decode if verifies and decode else None,
    )
