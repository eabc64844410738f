"""The watch: its statistics against closed forms, its verdict on measured texts, its counts against SGLang's own."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_eagle3_ext.host import watch
from sglang_eagle3_ext.host.watch import Spread, Watch, comparable
from sglang_eagle3_ext.spec import Expected

SEQUENCES = Path(__file__).parents[2] / "benchmarks" / "watch" / "sequences.json"
PROBE = Path(__file__).parents[2] / "benchmarks" / "results" / "probe.json"
TEXTS = json.loads(SEQUENCES.read_text())["texts"]
RECORDED = 5000
"""Verify steps that a recorded value rests on, about those of all these texts."""


def counts(assembly: str) -> list[list[int]]:
    """Return the accepted drafts per verify step of every measured text."""
    return [[int(c) for c in text["counts"][assembly]] for text in TEXTS]


def acceptance(texts: list[list[int]], positions: int = 3) -> tuple[float, ...]:
    steps = list(itertools.chain.from_iterable(texts))
    return tuple(sum(drafts >= i for drafts in steps) / len(steps) for i in range(1, positions + 1))


def fired(watching: Watch, texts: list[list[int]], limit: int, seed: int = 0) -> float:
    """Serve the texts one after the other in random order, again and again; return when the watch fires."""
    rng = random.Random(seed)
    for request in itertools.count():
        for drafts in texts[rng.randrange(len(texts))]:
            if watching.count([request], [drafts]) is not None:
                return watching.verify_steps
            if watching.verify_steps >= limit:
                return math.inf
    raise AssertionError


# ---- the spread of a stream -------------------------------------------------------------------------------


def test_error_of_independent_texts_is_that_of_their_mean():
    rng = random.Random(1)
    texts = [(50, sum(rng.random() < 0.4 for _ in range(50))) for _ in range(7)]  # one scale only
    spread = Spread()
    for text in texts:
        spread.add(*text)
    shares = [accepted / 50 for _, accepted in texts]
    assert spread.mean == pytest.approx(statistics.mean(shares))
    assert spread.error() == pytest.approx(statistics.stdev(shares) / math.sqrt(7))


def test_error_knows_that_neighbours_are_alike():
    """Runs of 8 like texts: the error is that of runs, found without being told where they begin."""
    rng = random.Random(2)
    alike, shuffled = Spread(), Spread()
    texts = [(40, share) for _ in range(16) for share in [rng.randrange(8, 24)] * 8]
    for text in texts:
        alike.add(*text)
    for text in rng.sample(texts, len(texts)):
        shuffled.add(*text)
    runs = [texts[i][1] / 40 for i in range(0, len(texts), 8)]
    assert alike.error() >= statistics.stdev(runs) / math.sqrt(len(runs)) * 0.999
    assert alike.error() > 1.8 * shuffled.error()


def test_no_error_is_claimed_for_few_texts():
    spread = Spread()
    for _ in range(3):
        spread.add(10, 4)
        assert spread.error() == math.inf
    assert math.isnan(Spread().mean)


# ---- the verdict on measured texts ------------------------------------------------------------------------


@pytest.mark.parametrize("assembly", ["stock_default", "story", "order_210", "last"])
def test_floor_fires_for_a_wrong_assembly(assembly: str):
    watching = Watch([watch.FLOOR], recorded_steps=None)
    assert fired(watching, counts(assembly), 1000) <= 1000
    assert watching.alarm is not None
    assert watching.alarm.accept_per_position == pytest.approx((watching.alarm.got,))


@pytest.mark.parametrize("assembly", ["right", "weak"])
def test_floor_spares_a_draft_that_is_right_or_weak(assembly: str):
    assert fired(Watch([watch.FLOOR], recorded_steps=None), counts(assembly), 10000) == math.inf


@pytest.mark.parametrize("assembly", ["stock_default", "story", "order_210", "order_021", "last", "residual"])
def test_recorded_value_tells_a_wrong_assembly(assembly: str):
    expected = acceptance(counts("right"))
    assert fired(Watch(expected, recorded_steps=RECORDED), counts(assembly), 1000) <= 1000


@pytest.mark.parametrize("seed", range(5))
def test_recorded_value_spares_the_right_assembly(seed: int):
    expected = acceptance(counts("right"))
    assert fired(Watch(expected, recorded_steps=RECORDED), counts("right"), 10000, seed) == math.inf


@pytest.mark.parametrize("first", sorted({text["category"] for text in TEXTS} - {"seen", "unseen"}))
def test_right_assembly_may_begin_with_any_category(first: str):
    """Each of the eight categories in turn, any of them first; the harder ones lie a third below the easier."""
    watching = Watch(acceptance(counts("right")), recorded_steps=RECORDED)
    categories = sorted({text["category"] for text in TEXTS} - {"seen", "unseen"}, key=lambda c: (c != first, c))
    for request, (category, text) in enumerate(itertools.product(categories, TEXTS)):
        if text["category"] == category:
            for drafts in text["counts"]["right"]:
                assert watching.count([request], [int(drafts)]) is None
    assert watching.verify_steps > 3000


def test_recurrent_passes_are_judged_on_their_own():
    """The wrong recurrent state leaves the first draft as it is."""
    watching = Watch(acceptance(counts("right")), recorded_steps=RECORDED)
    assert fired(watching, counts("recurrent_state"), 1000) <= 1000
    assert watching.alarm is not None
    assert watching.alarm.passes == "recurrent"


@pytest.mark.parametrize("assembly", ["right", "story", "order_021", "residual", "recurrent_state"])
def test_what_the_probe_recorded_on_its_own_texts_serves_on_others(assembly: str):
    """Which get more of their first drafts accepted than the probe's did, as texts differ."""
    best = json.loads(PROBE.read_text())["default"]["result"]["best"]
    recorded = {"expected": best["accept_per_position"], "recorded_steps": best["verify_steps"]}
    within = [fired(Watch(**recorded), counts(assembly), 10000, seed) for seed in range(5)]
    if assembly == "right":
        assert within == [math.inf] * 5
    else:
        assert max(within) <= 5000


def test_a_value_recorded_on_little_text_convinces_slowly():
    """What a few hundred verify steps recorded may lie a seventh off; 10,000 may not."""
    expected = [share * 1.15 for share in acceptance(counts("right"))]
    steps = [fired(Watch(expected, recorded_steps=recorded), counts("right"), 20000) for recorded in (300, 10_000)]
    assert steps[0] > 20000 > steps[1]
    assert Watch(expected, recorded_steps=10**9)._recorded_steps == watch.MOST_RECORDED_STEPS


def test_open_texts_bring_no_judgement_forward():
    watching = Watch([0.9], recorded_steps=None)
    short, long = list(range(8)), list(range(100, 160))
    for _ in range(5):
        assert watching.count([*short, *long], [0] * 68) is None
    # Eight texts have ended, with 40 steps of 340.
    for _ in range(3):
        assert watching.count(long, [0] * 60) is None
    alarm = watching.count([], [])
    assert alarm is not None
    assert alarm.verify_steps == 40 + 60 * 8 >= watch.FIRST_STEPS


def test_one_alarm_until_a_restart():
    watching = Watch([watch.FLOOR], recorded_steps=None)
    alarms = [watching.count([step // 20], [0]) for step in range(3000)]
    assert [alarm is not None for alarm in alarms].index(True) >= watch.FIRST_STEPS - 1
    assert sum(alarm is not None for alarm in alarms) == 1
    watching.restart()
    assert watching.verify_steps == 0
    assert any(watching.count([step // 20], [0]) for step in range(1000))


def test_order_of_requests_within_passes_does_not_matter():
    """The same texts one by one and eight at a time, in lockstep, give the same means."""
    texts = [text[:40] for text in counts("right") if len(text) >= 40][:8]
    single, batched = Watch([0.5, 0.2, 0.1], recorded_steps=RECORDED), Watch([0.5, 0.2, 0.1], recorded_steps=RECORDED)
    for request, text in enumerate(texts):
        for drafts in text:
            single.count([request], [drafts])
    for step in range(40):
        batched.count(range(8), [text[step] for text in texts])
    for watching in (single, batched):
        watching.count([], [])
    assert single.verify_steps == batched.verify_steps == 320
    assert (single._feature.mean, single._feature.texts) == (batched._feature.mean, batched._feature.texts)


@pytest.mark.parametrize(
    ("served", "positions"),
    [
        pytest.param((3, 1, 4), 3, id="same"),
        pytest.param((2, 1, 3), 2, id="shorter-chain"),
        pytest.param((5, 1, 6), 3, id="longer-chain"),
        pytest.param((3, 4, 8), 3, id="tree-over-chain"),
    ],
)
def test_comparable_positions(served: tuple[int, int, int], positions: int):
    expected = Expected(1.8, (0.5, 0.2, 0.1), 3, 1, 4)
    assert comparable(expected, *served)[0] == (0.5, 0.2, 0.1)[:positions]


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        pytest.param(None, "records none", id="nothing"),
        pytest.param(Expected(2.2, (0.6, 0.3, 0.2), 3, 4, 16), "larger tree", id="recorded-tree"),
        pytest.param(Expected(1.0, (), 3, 1, 4), "no position", id="no-positions"),
    ],
)
def test_what_does_not_compare_is_said(expected: Expected | None, words: str):
    values, why = comparable(expected, 3, 1, 4)
    assert values == ()
    assert words in why


# ---- in SGLang --------------------------------------------------------------------------------------------


def requests_and_processor(metrics: Any = None, top_k: int = 1) -> tuple[list[Any], Any]:
    """Build what SGLang's own method needs: real requests, and a processor whose other parts do nothing."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    requests = []
    for rid in ("a", "b", "c"):
        params = SamplingParams(max_new_tokens=64, temperature=0 if top_k == 1 else 1.0)
        params.normalize(None)
        request = Req(rid, "", [1, 2, 3], params)
        request.kv = SimpleNamespace(kv_committed_len=3)
        requests.append(request)
    nothing = SimpleNamespace(
        snapshot_spec_decode_metrics=lambda *_: None,
        current_scheduler_metrics_enabled=metrics is not None,
        metrics_collector=metrics,
    )
    processor = SimpleNamespace(
        metrics_reporter=nothing,
        model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
        advance_grammar_fsm=lambda *_: None,
    )
    return requests, processor


def verify(processor: Any, requests: list[Any], accepted: list[int], draft_tokens: int = 4) -> None:
    """Run SGLang's own counting of one verify step, then the hook, as HookRegistry calls it."""
    import torch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.utils import GenerationBatchResult

    result = GenerationBatchResult(
        next_token_ids=torch.zeros(len(requests) * draft_tokens, dtype=torch.int64),
        accept_lens=torch.tensor(accepted) + 1,
        speculative_num_draft_tokens=draft_tokens,
    )
    batch = SimpleNamespace(reqs=requests, has_grammar=False)
    method = SchedulerBatchResultProcessor._resolve_spec_v2_tokens
    original = getattr(method, "__wrapped__", method)
    tokens = original(processor, result, batch)
    assert watch.count(tokens, processor, result, batch) is None


def served(expected: Expected | None, **changes: Any) -> watch.Served:
    plan = SimpleNamespace(
        spec=SimpleNamespace(path="/drafts/my draft", expected=expected), target=SimpleNamespace(path="org/target")
    )
    return watch.Served(**({"plan": plan, "steps": 3, "topk": 1, "draft_tokens": 4, "warns": True} | changes))


def totals(name: str) -> dict[str, float]:
    import prometheus_client

    return {
        sample.labels["position"]: sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    }


@pytest.mark.host
def test_counters_agree_with_sglangs_histograms(monkeypatch: pytest.MonkeyPatch):
    """Requests that ended before the step was settled are left out, as SGLang's own histograms leave them out."""
    collector = SimpleNamespace(labels={"model_name": "m", "tp_rank": 0}, _counter_cls=None, _gauge_cls=None)
    requests, processor = requests_and_processor(collector)
    monkeypatch.setattr(watch, "_served", served(None))
    rng = random.Random(3)
    for step in range(60):
        if step == 40:
            requests[1].finished_reason = SimpleNamespace()
        if step == 50:
            requests[2].is_retracted = True
        verify(processor, requests, [rng.randrange(4) for _ in requests])
    histogram = [sum(r.spec_correct_drafts_histogram[k] for r in requests) for k in range(4)]
    assert sum(histogram) == 60 + 40 + 50
    prefix = "sglang:spec_num_"
    assert totals(f"{prefix}correct_drafts_per_position_total") == {str(i): sum(histogram[i:]) for i in (1, 2, 3)}
    assert totals(f"{prefix}proposed_drafts_per_position_total") == dict.fromkeys("123", 150)
    rates = totals("sglang:spec_accept_rate_per_position")
    assert rates["1"] == pytest.approx(sum(histogram[1:]) / 150, abs=0.1)
    assert watch._served is not None
    assert watch._served._floor.verify_steps == 150


@pytest.mark.host
def test_one_warning_names_the_command(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    requests, processor = requests_and_processor()
    monkeypatch.setattr(watch, "_served", served(None))
    for step in range(600):
        for request in requests:
            request.rid = f"{request.rid[0]}{step // 30}"
        verify(processor, requests, [int(step % 15 == 0), 0, 0])
    warnings = [record.getMessage() for record in caplog.records if record.name == watch.__name__]
    assert len(warnings) == 1
    assert warnings[0].endswith("Run: sglang-eagle3 probe '/drafts/my draft' --target org/target")
    assert "expected 0.15" in warnings[0]


@pytest.mark.host
@pytest.mark.parametrize(("top_k", "compared"), [(1, True), (-1, False)])
def test_recorded_value_speaks_of_greedy_requests_only(monkeypatch: pytest.MonkeyPatch, top_k: int, compared: bool):
    requests, processor = requests_and_processor(top_k=top_k)
    monkeypatch.setattr(watch, "_served", served(Expected(1.9, (0.9, 0.5, 0.3), 3, 1, 4)))
    for step in range(400):
        for request in requests:
            request.rid = f"{request.rid[0]}{step // 20}"
        verify(processor, requests, [step % 2, (step // 2) % 2, (step // 3) % 2])
    assert watch._served is not None
    assert watch._served._warned is compared
    assert watch._served._floor.verify_steps == (0 if compared else 1200)


@pytest.mark.parametrize(
    ("noted", "taken", "said"),
    [
        (300, 300, "measured on 300 verify steps"),
        (10**6, watch.MOST_RECORDED_STEPS, "measured on 1,000,000 verify steps, taken for 10,000"),
        (None, watch.RECORDED_STEPS, "measured on steps nobody noted, taken for 1,000"),
    ],
)
def test_on_how_much_a_recorded_value_rests(
    noted: int | None, taken: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", watch.__name__):
        made = served(Expected(1.9, (0.9, 0.5, 0.3), 3, 1, 4, noted))
    assert made._recorded is not None
    assert made._recorded._recorded_steps == taken
    assert said in caplog.text


@pytest.mark.host
def test_weight_update_leaves_the_floor_only(monkeypatch: pytest.MonkeyPatch):
    requests, processor = requests_and_processor()
    monkeypatch.setattr(watch, "_served", served(Expected(1.9, (0.9, 0.5, 0.3), 3, 1, 4)))
    verify(processor, requests, [1, 1, 1])
    watch.restart(None, processor, "2")
    assert watch._served is not None
    assert watch._served._floor.verify_steps == 0
    for step in range(400):
        for request in requests:
            request.rid = f"{request.rid[0]}{step // 20}"
        verify(processor, requests, [step % 2, 1, 0])
    assert not watch._served._warned


@pytest.mark.host
def test_a_failure_of_the_watch_ends_the_watch_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    requests, processor = requests_and_processor()
    processor.metrics_reporter.current_scheduler_metrics_enabled = True  # without a collector
    monkeypatch.setattr(watch, "_served", served(None))
    verify(processor, requests, [0, 1, 2])
    assert watch._served is None
    assert "The acceptance watch failed" in caplog.text


@pytest.mark.host
@pytest.mark.parametrize(("switch", "placed"), [("on", 3), ("off", 0)])
def test_hooks_follow_the_switch(monkeypatch: pytest.MonkeyPatch, switch: str, placed: int):
    from sglang_eagle3_ext.host import contract, plugin

    monkeypatch.setenv("EAGLE3_EXT_WATCH", switch)
    hooks = {(hook.seam, inspect.unwrap(hook.function)) for hook in plugin.all_hooks()}
    ours = {
        (contract.REPORT_SEAM, watch.start),
        (contract.ACCEPT_SEAM, watch.count),
        (contract.WEIGHTS_SEAM, watch.restart),
    }
    assert len(ours & hooks) == placed


@pytest.mark.host
@pytest.mark.parametrize(
    ("ranks", "warns"),
    [
        pytest.param({"tp_rank": 0, "dp_rank": None}, True, id="first"),
        pytest.param({"tp_rank": 1, "dp_rank": None}, False, id="second-rank"),
        pytest.param({"tp_rank": 0, "dp_rank": 1}, False, id="second-replica"),
    ],
)
def test_one_process_of_a_server_warns(monkeypatch: pytest.MonkeyPatch, ranks: dict[str, Any], warns: bool):
    import sglang.srt.runtime_context as context

    from sglang_eagle3_ext import assembly, formats
    from sglang_eagle3_ext.spec import TargetFacts

    llama = "LlamaForCausalLM"
    facts = TargetFacts("org/target", llama, 30, 576, 49152, assembly.stock_reading(llama))
    plan = assembly.plan(formats.read_draft(SEQUENCES.parents[1] / "demo" / "draft"), facts)
    flags = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(**ranks))
    monkeypatch.setattr(context, "get_spec", lambda: SimpleNamespace(**flags))
    monkeypatch.setattr(watch, "_served", None)
    worker = SimpleNamespace(draft_runner=SimpleNamespace(model=SimpleNamespace(plan=plan)))
    watch.start(None, worker)
    assert watch._served is not None
    first = watch._served
    watch.start(None, worker)
    assert watch._served is first
    requests, processor = requests_and_processor()
    for step in range(600):
        for request in requests:
            request.rid = f"{request.rid[0]}{step // 30}"
        verify(processor, requests, [0, 0, 0])
    assert first._warned is warns
