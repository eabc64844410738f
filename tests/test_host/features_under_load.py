"""What a draft is fed when SGLang's scheduler has much to do at once; run by ``test_runtimes.py``.

The scheduler is SGLang's own, brought up in this process and stepped from here: prompts in chunks, prefixes out of
the radix cache, requests of different lengths in one batch, requests that leave in the middle, and a pool so small
that requests are retracted and start over. Two more are forked, as the two ranks of another server with the same
requests. Beside them stands transformers with the same weights, one text at a time.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import functools
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import kimi
import pytest
import torch
import workers
from simulated_trees import simulate_tree

from sglang_eagle3_ext import reference
from sglang_eagle3_ext.host import capture

pytestmark = pytest.mark.host

CLOSE = 2e-5
"""Two float32 computations of one state lie nearer than this, in units of its largest value, 32 layers deep."""

CHUNK, POOL = 16, 220
"""Tokens of a prompt that one pass takes, and tokens that all requests together may hold."""

STEPS, TOPK, DRAFT_TOKENS = 3, 2, 6

LAYERS = 34
SOURCES, BOUNDARIES = ("layer31", "embed", "layer3"), (32, 0, 4)
"""What the draft is trained on, in another order than the target's layers run in."""


class Pair(NamedTuple):
    """A target, as files and in transformers, and a draft trained on it."""

    target: Path
    model: Any
    draft: Path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    model = kimi.make_target(LAYERS)
    target = kimi.write_target(folder / "target", model)
    prompts = torch.randint(3, kimi.VOCAB, (96, 6), generator=torch.Generator().manual_seed(1))
    draft = kimi.write_draft(folder / "draft", "grouped", SOURCES)
    kimi.train(draft, target, kimi.write_texts(model, prompts, 20, BOUNDARIES), updates=150)
    return Pair(target, model, draft)


# ---- the scheduler ------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """One request, and what was seen of it.

    Attributes:
        prompt: its tokens.
        new_tokens: how many to write.
        arrives: step of the scheduler before which it is handed in.
        leaves: when it is aborted; never unless given.
        req: SGLang's own record of it; once it is served, what is kept of that.
        fed: for every feature row of the draft that belongs to it: position, token read, states [K*M].
        cache: keys of the draft [T, HKV, D] that the last step found for it, one row for every committed token.
        passes: feature passes of its prompt.
        has_left: whether it was aborted.
    """

    prompt: list[int]
    new_tokens: int
    arrives: int = 0
    leaves: Callable[[Request], bool] | None = None
    req: Any = None
    fed: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    cache: torch.Tensor | None = None
    passes: int = 0
    has_left: bool = False

    @property
    def ids(self) -> list[int]:
        """Its tokens: prompt and answer."""
        return [*self.prompt, *(self.req.output_ids if self.req is not None else ())]


class Record(NamedTuple):
    """What is kept of SGLang's record of a request, under its names, and can be handed on to another process.

    Attributes:
        written: tokens of the answer up to its end.
        aborted: whether that was SGLang's kind of end.
    """

    output_ids: list[int]
    cached_tokens: int
    retraction_count: int
    spec_verify_ct: int
    spec_correct_drafts_histogram: list[int]
    written: int
    aborted: bool


def keep(req: Any) -> Record:
    return Record(
        list(req.output_ids),
        req.cached_tokens,
        req.retraction_count,
        req.spec_verify_ct,
        list(req.spec_correct_drafts_histogram),
        len(req.output_ids_through_stop),
        type(req.finished_reason).__name__ == "FINISH_ABORT",
    )


class Load:
    """SGLang's scheduler, and what its draft is fed on the way."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, Request] = {}
        self.batch: Any = None
        self.widest = 0
        """Requests of different lengths that one batch held."""
        drafting = scheduler.draft_worker.draft_worker.draft_runner
        self._pool, self._table = drafting.token_to_kv_pool, drafting.req_to_token_pool.req_to_token
        forward, create = drafting.model.forward, scheduler._create_generation_req

        def watched(input_ids: Any, positions: Any, forward_batch: Any, *rest: Any, **more: Any) -> Any:
            self._note(input_ids, positions, forward_batch)
            return forward(input_ids, positions, forward_batch, *rest, **more)

        def created(received: Any, *args: Any, **more: Any) -> Any:
            req = create(received, *args, **more)
            self.requests[received.rid].req = req
            return req

        drafting.model.forward, scheduler._create_generation_req = watched, created

    def _note(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> None:
        """Keep every row of a feature pass that is not a rejected draft's."""
        mode, info = forward_batch.forward_mode, forward_batch.spec_info
        if not mode.is_extend(include_draft_extend_v2=True):
            return
        counts = forward_batch.extend_seq_lens.tolist()
        assert len(counts) == len(self.batch.reqs)
        assert sum(counts) == len(input_ids) == len(info.hidden_states)
        kept = info.num_accept_tokens.tolist() if mode.is_draft_extend_v2() else counts
        start = 0
        for req, count, keep in zip(self.batch.reqs, counts, kept, strict=True):
            request = self.requests[req.rid]
            request.passes += not mode.is_draft_extend_v2()
            for row in range(start, start + keep):
                request.fed.append((int(positions[row]), int(input_ids[row]), info.hidden_states[row].clone()))
            start += count

    def _look_into_cache(self) -> None:
        keys = self._pool.get_key_buffer(0)
        rows = zip(self.batch.reqs, self.batch.req_pool_indices.tolist(), self.batch.seq_lens.tolist(), strict=True)
        for req, row, length in rows:
            self.requests[req.rid].cache = keys[self._table[row, :length].long()].clone()

    def serve(self, requests: Mapping[str, Request]) -> dict[str, Request]:
        """Step the scheduler until nobody is left; return the requests with what was seen of them."""
        from sglang.srt.utils.common import DynamicGradMode

        return DynamicGradMode()(self._serve)(dict(requests))

    def _serve(self, requests: dict[str, Request]) -> dict[str, Request]:
        from sglang.srt.managers.io_struct import AbortReq

        scheduler, step = self.scheduler, 0
        self.requests = requests
        while True:
            arriving = [r for r in requests.items() if r[1].arrives == step]
            scheduler.process_input_requests([received(name, request) for name, request in arriving])
            for name, request in requests.items():
                if request.leaves is not None and not request.has_left and request.leaves(request):
                    request.has_left = True
                    scheduler.process_input_requests([AbortReq(rid=name)])
            # What the scheduler's own loop does in a step.
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, self.batch = plan.running_batch, plan.batch_to_run
            if self.batch:
                self.widest = max(self.widest, len(set(self.batch.seq_lens.tolist())))
                if self.batch.forward_mode.is_decode():
                    self._look_into_cache()
                scheduler.process_batch_result(self.batch, scheduler.run_batch(self.batch))
            elif all(request.arrives < step for request in requests.values()):
                for request in requests.values():
                    request.req, request.leaves = keep(request.req), None
                return requests
            scheduler.last_batch = self.batch
            step += 1
            assert step < 500, "the scheduler does not come to an end"


def received(name: str, request: Request) -> Any:
    """Write a request as the scheduler receives it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_new_tokens=request.new_tokens)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", request.prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def make_load(pair: Pair, ranks: int = 1, rank: int = 0, port: int | None = None) -> Load:
    """Bring up SGLang's scheduler with a target and its draft, as its process does."""
    settings = workers.settings(
        pair.target,
        pair.draft,
        tp_size=ranks,
        speculative_num_steps=STEPS,
        speculative_eagle_topk=TOPK,
        speculative_num_draft_tokens=DRAFT_TOKENS,
        chunked_prefill_size=CHUNK,
        max_total_tokens=POOL,
        max_running_requests=6,
        schedule_conservativeness=0.01,  # admit more than there is room for
    )

    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs

    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    ports = PortArgs.init_new(settings)
    ports.nccl_port = port or ports.nccl_port
    return Load(Scheduler(settings, ports))


class Seen(NamedTuple):
    """What one rank of a server saw of the scenario, and how many lengths one batch held."""

    ranks: int
    rank: int
    requests: dict[str, Request]
    widest: int


def run_rank(pair: Pair, ranks: int, rank: int, port: int) -> Seen:
    """Serve the scenario as one rank of several."""
    load = make_load(pair, ranks, rank, port)
    return Seen(ranks, rank, load.serve(scenario()), load.widest)


@pytest.fixture(scope="session")
def two_ranks(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Run both ranks of a server of two."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # What every rank needs, imported once.
    import sglang.srt.managers.scheduler  # noqa: F401

    work = {"load": functools.partial(run_rank, pair._replace(model=None))}
    return workers.on_ranks(work, tmp_path_factory.mktemp("seen"), sizes=[2])["load"][2]


@pytest.fixture(scope="session")
def load(pair: Pair, two_ranks: list[Seen]) -> Iterator[Load]:
    """Bring the scheduler up in this process, which can fork no more ranks behind it."""
    yield make_load(pair)
    torch.distributed.destroy_process_group()


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, kimi.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX = tokens(37, seed=20)
"""The beginning that several prompts share."""


def scenario() -> dict[str, Request]:
    """Make requests that meet everything at once."""
    return {
        "long": Request(tokens(53, seed=21), 10),
        "short": Request(tokens(3, seed=22), 26, arrives=1),
        "first_with_prefix": Request([*PREFIX, *tokens(4, seed=23)], 14, arrives=2),
        "leaves_in_prefill": Request(tokens(60, seed=24), 10, arrives=3, leaves=lambda r: r.passes == 2),
        "one": Request(tokens(1, seed=25), 24, arrives=4),
        "leaves_in_decode": Request(tokens(9, seed=26), 40, arrives=5, leaves=lambda r: len(r.ids) >= 15),
        "second_with_prefix": Request([*PREFIX, *tokens(11, seed=27)], 14, arrives=18),
        "third_with_prefix": Request([*PREFIX[:30], *tokens(6, seed=28)], 14, arrives=19),
        "late": Request(tokens(40, seed=29), 16, arrives=20),
        "later": Request(tokens(31, seed=30), 16, arrives=21),
    }


@pytest.fixture(scope="session")
def one_rank(load: Load) -> Seen:
    return Seen(1, 0, load.serve(scenario()), load.widest)


@pytest.fixture(params=["alone", "first_of_two", "second_of_two"], scope="session")
def seen(request: pytest.FixtureRequest, one_rank: Seen, two_ranks: list[Seen]) -> Seen:
    return {"alone": one_rank, "first_of_two": two_ranks[0], "second_of_two": two_ranks[1]}[request.param]


@pytest.fixture(scope="session")
def served(seen: Seen) -> dict[str, Request]:
    return seen.requests


# ---- what is compared ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, Any]]:
    """Collect what was found; kept in the file that ``LOAD_RESULTS`` names."""
    found: dict[str, Any] = {
        "layers": LAYERS,
        "sources": ", ".join(SOURCES),
        "draft_tokens": DRAFT_TOKENS,
        "chunk": CHUNK,
    }
    yield found
    if file := os.environ.get("LOAD_RESULTS"):
        Path(file).write_text(json.dumps(found, indent=1) + "\n")


def distance(some: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference in units of the largest value."""
    return float((some - other).abs().max() / other.abs().max())


States = Callable[[tuple[int, ...]], torch.Tensor]


@pytest.fixture(scope="session")
def plain(pair: Pair) -> States:
    """Run a text alone, once; give its states [T, K*M] in the order that the draft was trained on."""
    return functools.cache(functools.partial(kimi.states_of, pair.model, boundaries=BOUNDARIES))


def compare(served: Mapping[str, Request], plain: States) -> tuple[list[str], float]:
    """Compare every row fed to the draft with what a plain run of its text has at that position.

    Returns:
        A line for each row that is another one, and the largest difference of states.
    """
    found, worst = [], 0.0
    for name, request in served.items():
        ids = request.ids
        blocks = plain(tuple(ids)).split(kimi.M, -1)
        # Fed as the target's layers hand them out: fc's columns stand in that order since the weights were loaded.
        expected = torch.cat([blocks[BOUNDARIES.index(b)] for b in sorted(BOUNDARIES)], -1)
        for position, token, states in request.fed:
            # A request that was aborted is committed further than it was answered.
            if position + 1 < len(ids) and token != ids[position + 1]:
                found.append(f"{name}: position {position} reads token {token}; expected {ids[position + 1]}")
            if position < len(ids):
                off = float((states - expected[position]).abs().max() / expected.abs().max())
                worst = max(worst, off)
                if off > CLOSE:
                    found.append(f"{name}: states at position {position} are off by {off:.1e}")
    return found, worst


def test_it_was_a_load(seen: Seen, served: dict[str, Request], results: dict[str, Any]) -> None:
    """Everything that the scenario is for did happen."""
    counts = {
        "requests": len(served),
        "cached": sum(r.req.cached_tokens for r in served.values()),
        "widest": seen.widest,
        "retractions": sum(r.req.retraction_count for r in served.values()),
        "aborted": sum(r.req.aborted for r in served.values()),
    }
    results |= counts | results
    assert {key: results[key] for key in counts} == counts, "two ranks had another load than one"
    assert max(r.passes for r in served.values()) >= 4, "no prompt came in chunks"
    assert served["second_with_prefix"].req.cached_tokens >= 30, "no prefix came out of the cache"
    assert seen.widest >= 4, "nothing ran side by side"
    assert counts["retractions"] > 0, "nobody was retracted"
    for name in ("leaves_in_prefill", "leaves_in_decode"):
        assert served[name].req.aborted
    assert 0 < len(served["leaves_in_decode"].req.output_ids) < 40
    assert not served["leaves_in_prefill"].req.output_ids


def test_both_ranks_are_fed_the_same_bits(two_ranks: list[Seen]) -> None:
    first, second = (seen.requests for seen in two_ranks)
    for name, request in first.items():
        assert request.req == second[name].req
        for (*row, states), (*other, others) in zip(request.fed, second[name].fed, strict=True):
            assert row == other
            assert torch.equal(states, others)


def test_drafts_were_accepted(served: dict[str, Request]) -> None:
    """Else only one row of every verify step would have been fed."""
    steps = sum(r.req.spec_verify_ct for r in served.values())
    assert sum(len(r.req.output_ids) for r in served.values()) > 1.15 * steps


def test_tokens_are_those_without_speculation(pair: Pair, served: dict[str, Request]) -> None:
    for request in served.values():
        assert kimi.is_greedy(pair.model, request.ids, len(request.prompt))


def test_every_row_is_that_of_a_plain_run(plain: States, served: dict[str, Request], results: dict[str, Any]) -> None:
    found, worst = compare(served, plain)
    assert not found, "\n".join(found)
    results["rows"] = results.get("rows", 0) + sum(len(r.fed) for r in served.values())
    results["states"] = max(results.get("states", 0.0), float(f"{worst:.1e}"))


def test_no_position_is_left_out(served: dict[str, Request]) -> None:
    """What the radix cache had, an earlier request was fed."""
    for name, request in served.items():
        if name.startswith("leaves"):
            continue
        fed = {position for position, _, _ in request.fed}
        missing = set(range(len(request.ids) - 1)) - fed
        assert missing <= set(range(request.req.cached_tokens)) or request.req.retraction_count, name


def test_the_drafts_cache_is_that_of_a_plain_run(
    pair: Pair, plain: States, seen: Seen, results: dict[str, Any]
) -> None:
    """Also where rows came out of the radix cache or were moved after verification; each rank has heads of its own."""
    draft, rows, worst = reference.load(pair.draft, target=pair.target), 0, 0.0
    for name, request in seen.requests.items():
        if request.cache is None:
            continue
        ids = request.ids[: len(request.cache) + 1]
        assert len(ids) == len(request.cache) + 1
        _, cache = draft.feature_pass(draft.project(plain(tuple(ids))), torch.tensor(ids))
        off = distance(request.cache, cache.keys[0].chunk(seen.ranks, 1)[seen.rank])
        assert off <= CLOSE, name
        rows, worst = rows + len(request.cache), max(worst, off)
    results["cache_rows"] = results.get("cache_rows", 0) + rows
    results["keys"] = max(results.get("keys", 0.0), float(f"{worst:.1e}"))


def test_trees_are_accepted_as_the_reference_predicts(load: Load, pair: Pair, results: dict[str, Any]) -> None:
    answers, most = 4, 20
    prompts = torch.randint(3, kimi.VOCAB, (answers, 7), generator=torch.Generator().manual_seed(50))
    alone = [load.serve({"alone": Request(prompt, most)})["alone"].req for prompt in prompts.tolist()]
    counts = [req.spec_correct_drafts_histogram for req in alone]
    served = [sum(count[i] for count in counts if i < len(count)) for i in range(STEPS + 1)]
    draft = reference.load(pair.draft, target=pair.target)
    texts = kimi.write_texts(pair.model, prompts, most + STEPS, BOUNDARIES)
    written = [req.written for req in alone]  # some end before they are as long as they may be
    predicted = [
        simulate_tree(draft, text.ids, text.features, text.prompt, STEPS, TOPK, DRAFT_TOKENS, count)
        for text, count in zip(texts, written, strict=True)
    ]
    expected = [sum(column) for column in zip(*(one.histogram for one in predicted), strict=True)]
    assert sum(abs(a - b) for a, b in zip(served, expected, strict=True)) <= 0.01 * sum(served), (served, expected)
    assert sum(served[1:]) > 0.1 * sum(served)
    results["alone"] = {
        "answers": answers,
        "verify_steps": sum(served),
        "accept_length": round(sum(written) / sum(served), 3),
        "predicted": round(sum(written) / sum(expected), 3),
    }


# ---- and it would be seen -----------------------------------------------------------------------------------------


@contextmanager
def fault(load: Load, spoil: Callable[[torch.Tensor, Any], torch.Tensor]) -> Iterator[None]:
    """Spoil the states of every pass between the stack of layers and the logits processor."""
    found = capture.find_language_model(load.scheduler.tp_worker.model_runner.model)
    assert found is not None
    stack: Any = found[1]
    forward = stack.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        hidden_states, states = forward(*args, **kwargs)
        forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        return hidden_states, [spoil(s, forward_batch) for s in states]

    stack.forward = spoiled
    try:
        yield
    finally:
        stack.forward = forward


FAULTS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "rows of neighbours": lambda states, batch: states.roll(1, 0) if batch.batch_size > 1 else states,
    "rows behind a prefix": lambda states, batch: (
        states.roll(1, 0) if batch.extend_prefix_lens is not None and batch.extend_prefix_lens.any() else states
    ),
    "rows of verification": lambda states, batch: states.flip(0) if batch.forward_mode.is_target_verify() else states,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_a_plain_run_does_not_show_is_seen(name: str, load: Load, plain: States) -> None:
    load.scheduler.flush_cache()
    prompts = {"short": tokens(3, seed=41), "in chunks": tokens(25, seed=42)}
    with fault(load, FAULTS[name]):
        spoiled = load.serve({key: Request(prompt, 5) for key, prompt in prompts.items()})
    load.scheduler.flush_cache()
    assert compare(spoiled, plain)[0]
    assert compare(load.serve({"alone": Request(tokens(7, seed=40), 4)}), plain)[0] == []
