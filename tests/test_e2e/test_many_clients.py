"""Eight clients at once, streaming or not, some of whom leave: everyone gets what he gets alone."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import servers
from recorder import Recorder

from sglang_eagle3_ext.host.servers import Server

pytestmark = pytest.mark.e2e

CLIENTS = 8
CHUNK = 64
POOL = 4096
LENGTHS = (5, 43, 17, 33, 1, 40, 26, 12)


def stream(server: Server, input_ids: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """Ask for one greedy completion and yield its parts as they arrive; closing the iterator hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    body = {
        "input_ids": input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def ask_streaming(server: Server, input_ids: list[int], tokens: int) -> tuple[int, ...]:
    """Return the tokens of a streamed completion; every part carries all tokens so far."""
    *_, last = stream(server, input_ids, tokens)
    return tuple(last["output_ids"])


def leave_early(server: Server, input_ids: list[int]) -> None:
    """Ask for a long completion and hang up after its first part."""
    parts = stream(server, input_ids, 400)
    next(parts)
    parts.close()


@pytest.fixture(scope="module")
def server(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = servers.arguments(target, draft, *servers.CHAIN, "--chunked-prefill-size", str(CHUNK))
    words += ["--max-total-tokens", str(POOL), "--decode-log-interval", "1"]
    with servers.serve(tmp_path_factory.mktemp("many") / "many.log", words) as started:
        yield started


@pytest.fixture(scope="module")
def questions(prompts: list[list[int]], answers: Recorder) -> list[tuple[list[int], int]]:
    """Prompts with their lengths: plain ones, ones longer than a chunk, and ones that share a long prefix."""
    plain = answers("baseline")
    asked = [list(p) for p in prompts[:8]]
    turns = [[*p, *a.ids] for p, a in zip(prompts[:4], plain, strict=False)]
    shared = [[*turns[0], *p] for p in prompts[4:8]]
    everything = [*asked, *turns, *shared]
    assert sum(len(p) > CHUNK for p in everything) >= 8
    return [(p, LENGTHS[i % len(LENGTHS)]) for i, p in enumerate(everything)]


def test_eight_clients_get_what_one_gets_alone(
    server: Server, questions: list[tuple[list[int], int]], answers: Recorder
) -> None:
    alone = [servers.complete(server, *question).ids for question in questions]
    # Not only each other: speculation itself changes no token.
    plain = [a.ids for a in answers("baseline")]
    assert all(got == plain[i][: len(got)] for i, got in enumerate(alone[:8]))

    def ask(i: int) -> tuple[int, ...]:
        if i % 5 == 4:
            leave_early(server, questions[i][0])
        if i % 2:
            return ask_streaming(server, *questions[i])
        return servers.complete(server, *questions[i]).ids

    order = [*range(len(questions)), *reversed(range(len(questions)))]
    with ThreadPoolExecutor(CLIENTS) as clients:
        together = list(clients.map(ask, order))
    assert together == [alone[i] for i in order]

    log = Path(server.log).read_text()
    assert max(int(n) for n in re.findall(r"#running-req: (\d+)", log)) >= CLIENTS - 2, (
        "hardly anything ran side by side"
    )
    # Prompts are longer than that: they came in chunks.
    assert max(int(n) for n in re.findall(r"#new-token: (\d+)", log)) <= CHUNK
    assert any("#cached-token: " in line and "#cached-token: 0" not in line for line in log.splitlines())


def test_the_server_is_whole_afterwards(server: Server, questions: list[tuple[list[int], int]]) -> None:
    """Those who left hold nothing: a prompt that takes nearly the whole pool still fits."""
    prompt = [token for question, _ in questions for token in question]
    prompt = (prompt * POOL)[: POOL - 300]
    assert len(servers.complete(server, prompt, 4).ids) == 4
