"""``host.proof`` on a target and a draft as SGLang's own workers hold them; run by ``test_runtimes.py``.

The target, its pool, its attention backend and the draft are SGLang's own, brought up in the order of its scheduler.
Each fault is put where a target hands its states out, and the proof has to name it.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import workers
from checkpoints import DELETE, write_draft, write_target

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import capture, proof
from sglang_eagle3_ext.spec import AssemblyPlan

pytestmark = pytest.mark.host

M, E, VOCAB, LAYERS = 32, 24, 96, 8
"""Width of the target and of the draft, the vocabulary, and the target's layers."""

SOURCES = ["layer5", "embed", "final_norm", "last", "layer2"]
CAPTURED = (0, 3, 6, 8, "final_norm")


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Bring target and draft up as a scheduler does, to just before its CUDA graphs."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", hidden=M, num_layers=LAYERS, vocab=VOCAB)
    draft = write_draft(
        folder / "draft",
        hidden=E,
        target_hidden=M,
        num_sources=len(SOURCES),
        vocab=VOCAB,
        tensor_changes={"embed_tokens.weight": torch.randn(VOCAB, E)},
        config_changes={"eagle3_ext": {"sources": SOURCES}},
    )
    flags = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    with workers.pair(target, draft, **flags) as worker:
        yield worker


@pytest.fixture
def runner(worker: Any) -> Any:
    return worker.target_worker.model_runner


@pytest.fixture
def plan(runner: Any) -> AssemblyPlan:
    plan = runner.spec_aux_config.eagle_aux_hidden_state_layer_ids
    assert isinstance(plan, AssemblyPlan)
    assert plan.capture == CAPTURED
    return plan


# ---- a healthy server ---------------------------------------------------------------------------------------------


def test_every_state_is_proved_in_time(worker: Any, plan: AssemblyPlan) -> None:
    started = time.perf_counter()
    verdict = proof.prove(worker, plan)
    assert time.perf_counter() - started < 2
    assert verdict.problems == ()
    assert verdict.text.startswith("5 of 5 state(s) equal the residual stream, 12 tokens, ")
    verdict.check()


def test_the_stream_that_is_compared_is_the_targets(
    runner: Any, plan: AssemblyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observation itself has an oracle: the hidden states that transformers computes with the same weights."""
    from transformers import AutoModelForCausalLM

    ids, _ = proof._token_ids(runner, plan)
    prefill, table = proof._prefill, runner.req_to_token_pool.req_to_token
    slots = torch.arange(1, len(ids) + 1)

    def in_slots_of_its_own(*args: Any) -> Any:
        """Rows that share the padding slot read one another's keys; transformers' do not."""
        batch = prefill(*args)
        batch.out_cache_loc = slots
        return batch

    monkeypatch.setattr(proof, "_prefill", in_slots_of_its_own)
    table[0, : len(ids)] = slots.int()
    try:
        seen = proof.run_pass(runner, ids).seen
    finally:
        table[0] = 0
    model = AutoModelForCausalLM.from_pretrained(runner.model_config.model_path, dtype=torch.float32)
    last: dict[str, torch.Tensor] = {}
    model.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.update(out=out))
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
    out = last["out"][0] if isinstance(last["out"], tuple) else last["out"]
    expected = {**dict(enumerate(states[:-1])), LAYERS: out, "final_norm": states[-1]}
    assert set(seen) == set(expected) == {*range(LAYERS + 1), "final_norm"}
    for boundary, state in seen.items():
        torch.testing.assert_close(state, expected[boundary].view(-1, M), rtol=1e-5, atol=1e-5)


def test_nothing_of_the_server_is_changed(worker: Any, runner: Any, plan: AssemblyPlan) -> None:
    allocator = runner.token_to_kv_pool_allocator
    pools = runner.token_to_kv_pool, worker.draft_runner.token_to_kv_pool
    buffers = [b for pool in pools for b in (*pool.k_buffer, *pool.v_buffer)]
    for buffer in buffers:
        buffer.normal_()
    models = (runner.model, worker.draft_runner.model)

    def state() -> list[Any]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models for m in model.modules()]
        tensors = [*(b[1:] for b in buffers), runner.req_to_token_pool.req_to_token, allocator.free_pages]
        tensors += [p for model in models for p in model.parameters()]
        return [
            [t.clone() for t in tensors],
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            hooks,
            list(runner.req_to_token_pool.free_slots),
            allocator.available_size(),
            runner.forward_pass_id,
            torch.is_grad_enabled(),
        ]

    before = state()
    padding = [b[0].clone() for b in runner.token_to_kv_pool.k_buffer]
    assert proof.prove(worker, plan).problems == ()
    for some, other in zip(state(), before, strict=True):
        if isinstance(other, list) and other and isinstance(other[0], torch.Tensor):
            assert all(torch.equal(a, b) for a, b in zip(some, other, strict=True))
        else:
            assert torch.equal(some, other) if isinstance(other, torch.Tensor) else some == other
    # What it wrote, it wrote to the slot that no request is ever given.
    assert not any(torch.equal(b[0], old) for b, old in zip(runner.token_to_kv_pool.k_buffer, padding, strict=True))
    assert 0 not in allocator.free_pages.tolist()
    assert 0 not in runner.req_to_token_pool.free_slots


def test_the_block_says_what_was_proved(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        worker.init_attention_backends()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("  proof ")]
    assert "5 of 5 state(s) equal the residual stream" in line


def test_switched_off_no_pass_runs(
    worker: Any, plan: AssemblyPlan, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_EXT_PROOF", "off")
    monkeypatch.setattr(runner.model, "forward", None)
    assert proof.prove(worker, plan) == proof.Verdict("off (EAGLE3_EXT_PROOF=off)")


# ---- faults -------------------------------------------------------------------------------------------------------

States = list[torch.Tensor]


@contextmanager
def fault(runner: Any, spoil: Callable[[States], Any]) -> Iterator[None]:
    """Spoil the states of every pass between the stack of layers and the logits processor."""
    found = capture.find_language_model(runner.model)
    assert found is not None
    stack: Any = found[1]
    forward = stack.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        hidden_states, states = forward(*args, **kwargs)
        return hidden_states, spoil(list(states))

    stack.forward = spoiled
    try:
        yield
    finally:
        stack.forward = forward


def swap(states: States) -> States:
    states[0], states[1] = states[1], states[0]
    return states


def overwrite(states: States) -> States:
    states[2].add_(1)
    return states


_kept: dict[str, torch.Tensor] = {}


def reuse(states: States) -> torch.Tensor:
    """Hand out one buffer for all passes, as a graph does that nobody copies from."""
    packed = torch.cat(states, -1)
    return _kept.setdefault("buffer", torch.empty_like(packed)).copy_(packed)


FAULTS: dict[str, tuple[Callable[[States], Any], list[str]]] = {
    "another_boundary": (
        lambda states: [*states[:1], states[2], *states[2:]],
        ["layer 2 output (boundary 3): got layer 5 output; expected the residual stream"],
    ),
    "swapped": (
        swap,
        ["embedding (boundary 0): got layer 2 output;", "layer 2 output (boundary 3): got embedding;"],
    ),
    "normed_instead_of_last": (
        lambda states: [*states[:3], states[4], states[4]],
        ["layer 7 output (last) (boundary 8): got final norm;"],
    ),
    "missing": (
        lambda states: states[:2] + states[3:],
        ["got [6, 128] in torch.float32 (embedding, layer 2 output, layer 7 output (last), final norm); expected"],
    ),
    "one_too_many": (lambda states: [*states, states[0]], ["got [6, 192] in torch.float32"]),
    "narrow": (lambda states: [s[:, :-1] for s in states], ["got [6, 155] in torch.float32; expected [6, 160]"]),
    "more_rows": (lambda states: [torch.cat([s, s[:1]]) for s in states], ["got [7, 160] in torch.float32"]),
    "another_type": (lambda states: [s.bfloat16() for s in states], ["got [6, 160] in torch.bfloat16"]),
    "written_over_in_its_pass": (
        overwrite,
        ["layer 5 output (boundary 6): got a state that stands at no boundary;"],
    ),
    "written_over_by_the_next_pass": (
        reuse,
        ["layer 2 output (boundary 3): got the state of a later forward pass, which was written over it;"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_stops_the_server(name: str, worker: Any, runner: Any, plan: AssemblyPlan) -> None:
    spoil, words = FAULTS[name]
    with fault(runner, spoil):
        verdict = proof.prove(worker, plan)
    assert verdict.text == "FAILED"
    for word in words:
        assert any(word in problem for problem in verdict.problems), verdict.problems
    if name not in ("swapped", "written_over_by_the_next_pass"):
        assert len(verdict.problems) == 1
    # Without the proof a draft would still be fed the wrong state, and none at all with another shape.
    helps = "EAGLE3_EXT=off" if "expected [6, 160]" in verdict.problems[0] else "EAGLE3_EXT_PROOF=off"
    assert all(helps in problem for problem in verdict.problems)
    with pytest.raises(UnsupportedError) as caught:
        verdict.check()
    assert str(caught.value).splitlines() == list(verdict.problems)
    assert all(p.startswith(f"{plan.target.path}: ") for p in verdict.problems)
    assert proof.prove(worker, plan).problems == ()


def test_a_capture_point_on_the_wrong_layer_is_named(worker: Any, runner: Any, plan: AssemblyPlan) -> None:
    """The fault of the story, in the capture itself: a layer early."""
    layers = runner.model.model.layers
    wait = layers[5].attn_boundary
    prepare = wait.prepare
    taken: States = []

    def early(hidden_states: Any, forward_batch: Any, **call: Any) -> Any:
        def take(value: torch.Tensor, *, owned: bool = False) -> None:
            taken.append(value.clone())

        return prepare(hidden_states, forward_batch, **{**call, "capture": take})

    wait.prepare = early
    try:
        with fault(runner, lambda states: [*states[:2], taken.pop(), *states[3:]]):
            (problem,) = proof.prove(worker, plan).problems
    finally:
        wait.prepare = prepare
    assert "layer 5 output (boundary 6): got layer 4 output;" in problem


def test_a_state_that_never_comes_is_no_matter_of_the_proof(worker: Any, runner: Any, plan: AssemblyPlan) -> None:
    stage = runner.model.model.layers[3].attn_boundary
    waits = stage.prepare
    del stage.prepare  # SGLang's own, which captures nothing
    try:
        with pytest.raises(
            UnsupportedError, match=r"^\S+: captured states: got none for layer 2 output; expected"
        ) as caught:
            proof.prove(worker, plan)
    finally:
        stage.prepare = waits
    assert "sglang-eagle3 export DRAFT --for stock" in str(caught.value)
    assert "PROOF" not in str(caught.value)
    assert proof.prove(worker, plan).problems == ()


def test_the_stream_is_observed_without_fused_sums(
    worker: Any, runner: Any, plan: AssemblyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel may round otherwise than the sum that the observation makes by itself."""
    from sglang.srt.runtime_context import get_exec

    forward, seen, comm = runner.model.forward, [], get_exec().comm

    def forward_and_look(*args: Any, **kwargs: Any) -> Any:
        seen.append((comm.flashinfer_allreduce_fusion_backend, comm.enable_aiter_allreduce_fusion))
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner.model, "forward", forward_and_look)
    with comm.override(flashinfer_allreduce_fusion_backend="auto", enable_aiter_allreduce_fusion=True):
        assert proof.prove(worker, plan).problems == ()
        assert comm.flashinfer_allreduce_fusion_backend == "auto"
        assert comm.enable_aiter_allreduce_fusion is True
    assert seen == [(None, False), (None, False)]


def test_sglang_makes_backends_and_with_them_our_proof_before_its_graphs(runner: Any) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = MagicMock()
    scheduler.init_all_cuda_graphs.side_effect = InterruptedError
    with pytest.raises(InterruptedError):
        Scheduler.init_model_worker(scheduler)
    scheduler.init_all_attention_backends.assert_called_once_with()
    Scheduler.init_all_attention_backends(scheduler)
    scheduler.draft_worker.init_attention_backends.assert_called_once_with()


def test_a_failed_proof_is_in_the_block_and_stops_the_start(
    worker: Any, runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        fault(runner, swap),
        caplog.at_level(logging.INFO),
        pytest.raises(UnsupportedError, match="embedding .boundary 0.: got layer 2 output"),
    ):
        worker.init_attention_backends()
    assert any(r.getMessage().split() == ["proof", "FAILED"] for r in caplog.records)


def test_a_target_that_hands_out_nothing_stops_the_server(worker: Any, runner: Any, plan: AssemblyPlan) -> None:
    with fault(runner, lambda states: []), pytest.raises(UnsupportedError, match="expected a prefill of a few tokens"):
        proof.prove(worker, plan)


def test_states_with_nans_are_compared_too(worker: Any, runner: Any, plan: AssemblyPlan) -> None:
    """Weights that are still being loaded may hold anything."""
    weight = runner.model.model.embed_tokens.weight.data
    kept = weight.clone()
    try:
        weight[proof._token_ids(runner, plan)[0][0]] = float("nan")
        assert all(p.handed.isnan().any() for p in [proof.run_pass(runner, i) for i in proof._token_ids(runner, plan)])
        assert proof.prove(worker, plan).problems == ()
        with fault(runner, swap):
            assert len(proof.prove(worker, plan).problems) == 2
    finally:
        weight.copy_(kept)


def test_what_cannot_be_observed_is_said(
    worker: Any, plan: AssemblyPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    def refuse(*_args: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(residual_batch, "snapshot", refuse)
    verdict = proof.prove(worker, plan)
    assert verdict.problems == ()
    assert verdict.text.startswith("1 of 5 state(s) equal")
    assert "layer 7 output (last) cannot be observed on LlamaForCausalLM" in caplog.text


# ---- SGLang's buffers ---------------------------------------------------------------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"


def draft_runner(folder: Path, override: Mapping[str, Any] | None = None) -> Any:
    """Make what SGLang's buffer sizes are read off: a draft's config as SGLang itself reads it, through our hooks."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config = ModelConfig(
        str(folder),
        dtype="float32",
        is_draft_model=True,
        speculative_algorithm="EAGLE3",
        model_override_args=json.dumps(override or {}),
    )
    return SimpleNamespace(model_config=config, spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE3"))


def sizes(runner: Any) -> tuple[int, int | None]:
    """Return the columns that SGLang reserves for the target's states and for the draft's own."""
    from sglang.srt.speculative import eagle_utils

    carried, _ = eagle_utils.get_draft_recurrent_hidden_state_spec(runner)
    # Prefill and decode servers agree on their wire by the same number, read off the config alone.
    wire, _ = eagle_utils.get_draft_recurrent_hidden_state_spec_from_config(runner.model_config, runner.spec_algorithm)
    assert carried == wire
    return eagle_utils.get_draft_input_from_target_hidden_dim(runner), carried


NAMES = ["embed", "layer2", "layer5", "last", "final_norm", "layer1", "layer3", "layer4"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "stale",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_aux_hidden_states": DELETE, "eagle_config": DELETE}, id="nothing_declared"),
        pytest.param({IDS: [1, 2, 3, 4]}, id="top_level_list_of_another_length"),
        pytest.param({"target_hidden_size": DELETE}, id="no_target_width"),
    ],
)
def test_buffers_have_the_width_of_the_resolved_sources(
    worker: Any, tmp_path: Path, count: int, stale: Mapping[str, Any]
) -> None:
    sources = {"sources": NAMES[:count]}
    # One source of the draft's own width has no fc to tell it by, so the draft is as wide as its target where keys go.
    hidden = M if "target_hidden_size" in stale else E
    embed = {"embed_tokens.weight": torch.randn(VOCAB, E)} if hidden == E else None
    folder = write_draft(
        tmp_path / "draft",
        hidden=hidden,
        target_hidden=M,
        num_sources=count,
        vocab=VOCAB,
        tensor_changes=embed,
        config_changes={**stale, "eagle3_ext": sources},
    )
    assert sizes(draft_runner(folder)) == (count * M, hidden)


def test_stock_derives_the_width_otherwise(worker: Any, tmp_path: Path) -> None:
    """The case that the normalised config is for: stock's two readings of one file, both wrong."""
    ids = {"num_aux_hidden_states": DELETE, "eagle_config": DELETE, IDS: [2, 4, 5, 6, 7]}
    folder = write_draft(tmp_path / "draft", target_hidden=M, vocab=VOCAB, num_sources=2, config_changes=ids)
    declared = {**ids, "eagle3_ext": {"sources": ["embed", "last"]}}
    runner = draft_runner(write_draft(tmp_path / "ours", vocab=VOCAB, num_sources=2, config_changes=declared))
    stock = SimpleNamespace(**vars(runner))
    stock.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(**json.loads((folder / "config.json").read_text())), hidden_size=M, spec_hidden_size=M
    )
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    assert get_draft_input_from_target_hidden_dim(stock) == 5 * M
    assert sizes(runner) == (2 * M, M)


def test_a_speculators_draft_gets_the_width_of_its_list(worker: Any, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", "speculators", num_sources=2, vocab=VOCAB, config_changes={IDS: [2, 5]})
    assert sizes(draft_runner(folder)) == (2 * M, M)


def test_buffers_that_the_command_line_made_too_narrow_stop_the_server(worker: Any, plan: AssemblyPlan) -> None:
    """SGLang takes overrides into the config after the package has; the draft would read past the buffer."""
    folder = Path(plan.spec.path)
    narrow = draft_runner(folder, {"num_aux_hidden_states": 3})
    stand_in = SimpleNamespace(target_worker=worker.target_worker, draft_runner=narrow)
    (problem,) = proof.prove(stand_in, plan).problems
    assert problem.startswith(f"{folder}: SGLang's buffers: got {3 * M} for the columns of the captured states; ")
    assert f"expected {5 * M}." in problem
