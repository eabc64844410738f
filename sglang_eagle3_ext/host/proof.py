"""Prove at start that the target hands the draft the states that the plan names.

Two short prefills run through the loaded target before any CUDA graph is captured, on every rank. What would reach the
draft is compared, number by number, with the residual stream as ``residual_batch.snapshot`` sees it at the entry of
every layer and behind the last one; the state after the final norm is what the logits processor is given. The
observation shares nothing with ``host.capture`` but the search for the stack of layers.

All rows are written to the padding slot of the pool under the padding row of the request table, and no request exists
yet: a server that passes is as it was before.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import UnsupportedError, first_line
from sglang_eagle3_ext.host import capture
from sglang_eagle3_ext.host.switches import read_switches
from sglang_eagle3_ext.spec import AssemblyPlan, Boundary

logger = logging.getLogger(__name__)

_TOKENS = 6
"""Tokens of one prefill, more where rows are dealt out to ranks."""

_ADVICE = (
    "The draft would be fed other states than it was trained on, so the server stops. Please report it with the "
    "server's flags; EAGLE3_EXT_PROOF=off serves without this proof."
)


@dataclass(frozen=True)
class Verdict:
    """What the proof found.

    Attributes:
        text: one line for the start-up block.
        problems: a message for each state that is not what the plan names; empty when all are.
    """

    text: str
    problems: tuple[str, ...] = ()

    def check(self) -> None:
        """Stop the start unless every state came as planned.

        Raises:
            UnsupportedError: holds every problem.
        """
        if self.problems:
            raise UnsupportedError("\n".join(self.problems))


class Pass(NamedTuple):
    """One prefill: what would reach the draft [T, K*M], and the stream at each boundary [T, M] where it can be seen."""

    handed: torch.Tensor | None
    seen: Mapping[Boundary, torch.Tensor]


def prove(draft_worker: Any, plan: AssemblyPlan) -> Verdict:
    """Compare captured states with the target's residual stream, and with what SGLang sizes the draft's buffers for.

    Args:
        draft_worker: SGLang's worker of the draft, which knows that of the target. Weights, pools and attention
            backends of both are in place, no graph is captured.
        plan: what the draft is to be fed.

    Returns:
        The verdict; switched off, it holds no problem and says so.

    Raises:
        UnsupportedError: the target cannot run a prefill of a few tokens, or no states come of it.
    """
    if not read_switches().proof:
        return Verdict("off (EAGLE3_EXT_PROOF=off)")
    started = time.perf_counter()
    runner = draft_worker.target_worker.model_runner
    try:
        passes = [run_pass(runner, ids) for ids in _token_ids(runner, plan)]
    except UnsupportedError:  # says itself what helps
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{plan.target.path}: the proof of captured states: got {type(error).__name__}: {first_line(error)}; "
            f"expected a prefill of a few tokens to run. {_ADVICE}"
        ) from error
    problems = [*compare(plan, passes, runner.dtype), *size_problems(plan, runner.dtype, draft_worker.draft_runner)]
    if problems:
        return failed(*problems)
    unseen = [assembly.spell(b, plan.target.num_layers) for b in plan.capture if b not in passes[0].seen]
    if unseen:
        logger.warning(
            "sglang-eagle3: %s: %s cannot be observed on %s; expected to prove what is captured there. Compare this "
            "draft's acceptance with what it reached before.",
            plan.target.path,
            ", ".join(unseen),
            type(runner.model).__name__,
        )
    rows = sum(len(p.handed) for p in passes if p.handed is not None)
    text = f"{len(plan.capture) - len(unseen)} of {len(plan.capture)} state(s) equal the residual stream, {rows} tokens"
    return Verdict(f"{text}, {time.perf_counter() - started:.2f} s")


def failed(*problems: str) -> Verdict:
    """Make the verdict of a rank that found problems."""
    return Verdict("FAILED", tuple(_of_this_rank(problem) for problem in problems))


def of_all_ranks(verdict: Verdict) -> Verdict:
    """Join what every rank's proof found, so that all of them stop where one must.

    Args:
        verdict: of this rank; every rank has to call this, with its own.

    Returns:
        This rank's where no rank found a problem, else one with the problems of all.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1:
        return verdict
    found: list[tuple[str, ...]] = [()] * parallel.tp_size
    torch.distributed.all_gather_object(found, verdict.problems, group=parallel.tp_group.cpu_group)
    problems = tuple(problem for of_rank in found for problem in of_rank)
    return Verdict("FAILED", problems) if problems else verdict


def _of_this_rank(problem: str) -> str:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return f"rank {parallel.tp_rank}: {problem}" if parallel.tp_size > 1 else problem


# ---- running ------------------------------------------------------------------------------------------------------


def _token_ids(runner: Any, plan: AssemblyPlan) -> list[torch.Tensor]:
    """Choose the tokens of two prefills, different at every position, without drawing random numbers."""
    from sglang.srt.runtime_context import get_parallel

    share = get_parallel().attn_tp_size
    count = -(-_TOKENS // share) * share
    step = max(1, plan.target.vocab_size // (count + 1))
    ids = torch.arange(1, count + 1, device=runner.device) * step % plan.target.vocab_size
    return [ids, ids.roll(1)]


def run_pass(runner: Any, ids: torch.Tensor) -> Pass:
    """Run one prefill through the target and watch its residual stream.

    Args:
        runner: SGLang's model runner of the target.
        ids: [T] int64 token ids.
    """
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_exec, get_model

    batch = _prefill(runner, ids)
    with (
        torch.no_grad(),
        _watching(runner.model) as seen,
        get_model().override(shared_experts=runner.model.shared_experts_config),
        # A fused sum over ranks rounds otherwise than the separate one by which the stream is observed.
        get_exec().comm.override(flashinfer_allreduce_fusion_backend=None, enable_aiter_allreduce_fusion=False),
        forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch),
    ):
        runner._prepare_eager_forward_batch(batch)
        runner.attn_backend.init_forward_metadata(batch)
        out = runner.model.forward(batch.input_ids, batch.positions, batch)
    return Pass(out.hidden_states, seen)


def _prefill(runner: Any, ids: torch.Tensor) -> Any:
    """Make the batch of one new request whose every row goes to the padding slot."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import require_mlp_sync, require_mlp_tp_gather

    count, device = len(ids), ids.device
    positions = torch.arange(count, device=device)
    lengths = torch.tensor([count], dtype=torch.int64, device=device)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=none,
        seq_lens=lengths,
        seq_lens_cpu=lengths.cpu(),
        seq_lens_sum=count,
        orig_seq_lens=lengths.int(),
        out_cache_loc=torch.zeros(count, dtype=torch.int64, device=device),
        positions=positions,
        mrope_positions=positions.repeat(3, 1),
        extend_num_tokens=count,
        extend_seq_lens=lengths.int(),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens=none.int(),
        extend_prefix_lens_cpu=[0],
        extend_start_loc=none.int(),
        extend_logprob_start_lens_cpu=[count],
        spec_algorithm=runner.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        global_forward_mode=ForwardMode.EXTEND,
        is_extend_in_batch=True,
        lora_ids=[None],
    )
    if require_mlp_sync():
        ranks = get_parallel().num_dp_ranks if require_mlp_tp_gather() else 1
        batch.original_global_num_tokens_cpu = batch.global_num_tokens_cpu = [count] * ranks
        batch.global_num_tokens_for_logprob_cpu = [1] * ranks
        batch.global_num_tokens_gpu = torch.tensor([count] * ranks, device=device)
        batch.global_num_tokens_for_logprob_gpu = torch.ones(ranks, dtype=torch.int64, device=device)
    batch._init_num_token_non_padded(device=device, is_draft_worker=False)
    if runner.lora_manager is not None:
        runner.lora_manager.prepare_lora_batch(batch)
    runner.kv_index_translator.bind_runner_slots(batch)
    return runner.prepare_dummy_forward_batch(batch)


# ---- observing ----------------------------------------------------------------------------------------------------


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[Boundary, torch.Tensor]]:
    """Collect the stream at every boundary of the passes that run inside the ``with`` block."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    seen: dict[Boundary, torch.Tensor] = {}

    def before(boundary: int) -> Any:
        def look(layer: nn.Module, args: Any, kwargs: Any) -> None:
            given = _given(layer, args, kwargs)
            _see(seen, boundary, given["hidden_states"], given.get("residual"), given["forward_batch"])

        return look

    def behind(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = _given(layer, args, kwargs)
        hidden_states, *rest = output if isinstance(output, tuple) else (output,)
        residual = rest[0] if "residual" in inspect.signature(layer.forward).parameters else None
        _see(seen, len(layers), hidden_states, residual, given["forward_batch"])

    def normed(processor: nn.Module, args: Any, kwargs: Any) -> None:
        given = _given(processor, args, kwargs)
        seen["final_norm"] = given["hidden_states"].clone()

    found = capture.find_language_model(model)
    layers: Any = found[1].layers if found is not None else ()
    hooks = [layer.register_forward_pre_hook(before(b), with_kwargs=True) for b, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(behind, with_kwargs=True) for layer in layers[-1:]]
    hooks += [
        module.register_forward_pre_hook(normed, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, LogitsProcessor)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _given(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name the arguments of a call; some layers take the batch among keywords that their signature does not name."""
    return {**inspect.signature(module.forward).bind(*args, **kwargs).arguments, **kwargs}


def _see(
    seen: dict[Boundary, torch.Tensor], boundary: int, hidden_states: Any, residual: torch.Tensor | None, batch: Any
) -> None:
    """Store the stream at a boundary; where SGLang cannot show it, nothing."""
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    if batch.residual_stream is None:  # a class that carries the residual through its layers' own arguments
        seen[boundary] = hidden_states.clone() if residual is None else hidden_states + residual
        return
    try:
        seen[boundary] = residual_batch.snapshot(hidden_states, batch)
    except NotImplementedError:
        logger.debug("boundary %s: its residual update is no plain sum", boundary)


# ---- comparing ----------------------------------------------------------------------------------------------------


def compare(plan: AssemblyPlan, passes: list[Pass], dtype: torch.dtype) -> list[str]:
    """Compare what was handed out in each pass, once all of them have run, with the stream of the same pass.

    Args:
        plan: what was to be handed out.
        passes: prefills of one server, oldest first.
        dtype: of the target's activations.

    Returns:
        One message for each thing that is not as planned.
    """
    n, width = plan.target.num_layers, plan.target.hidden_size
    problems: dict[str, None] = {}
    for number, (handed, seen) in enumerate(passes):
        rows = len(seen["final_norm"])
        wanted = (rows, len(plan.capture) * width)
        if handed is None or tuple(handed.shape) != wanted or handed.dtype != dtype:
            got = "nothing" if handed is None else f"{list(handed.shape)} in {handed.dtype}"
            if handed is not None and not handed.shape[-1] % width:
                got += f" ({_name(plan, seen, handed.split(width, -1))})"
            problems[
                f"{plan.target.path}: captured states: got {got}; expected {list(wanted)} in {dtype}: "
                f"{', '.join(assembly.spell(b, n) for b in plan.capture)}. {capture.OTHER_ROWS}"
            ] = None
            continue
        for boundary, block in zip(plan.capture, handed.split(width, -1), strict=True):
            if boundary not in seen or _equal(block, seen[boundary]):
                continue
            later = [_equal(block, p.seen[boundary]) for p in passes[number + 1 :] if boundary in p.seen]
            came = (
                "the state of a later forward pass, which was written over it"
                if any(later)
                else _name(plan, seen, [block])
            )
            problems[
                f"{plan.target.path}: {assembly.spell(boundary, n)} (boundary {boundary}): got {came}; expected the "
                f"residual stream as it stands there. {_ADVICE}"
            ] = None
    return list(problems)


def size_problems(plan: AssemblyPlan, dtype: torch.dtype, draft_runner: Any) -> Iterator[str]:
    """Report buffers that SGLang makes for states of another width or type than it gets.

    CUDA graphs copy states into such buffers, prefill sends them to decode in such buffers, and a rank without
    requests makes its rows by them.

    Args:
        plan: what the draft is fed.
        dtype: of the target's activations.
        draft_runner: SGLang's model runner of the draft.
    """
    from sglang.srt.speculative.eagle_utils import (
        get_draft_input_from_target_hidden_dim,
        get_draft_recurrent_hidden_state_spec,
    )

    fed = len(plan.capture) * plan.target.hidden_size
    recurring, draft_dtype = get_draft_recurrent_hidden_state_spec(draft_runner)
    for what, got, wanted in (
        ("columns of the captured states", get_draft_input_from_target_hidden_dim(draft_runner), fed),
        ("columns of the draft's own state", recurring, plan.spec.hidden_size),
        ("type of both", draft_dtype, dtype),
    ):
        if got != wanted:
            yield (
                f"{plan.spec.path}: SGLang's buffers: got {got} for the {what}; expected {wanted}. Drop keys of "
                "--json-model-override-args that contradict the draft, and give --dtype where draft and target differ."
            )


def _name(plan: AssemblyPlan, seen: Mapping[Boundary, torch.Tensor], blocks: Any) -> str:
    """Say which states some blocks are."""
    return ", ".join(
        next(
            (assembly.spell(b, plan.target.num_layers) for b, state in seen.items() if _equal(block, state)),
            "a state that stands at no boundary",
        )
        for block in blocks
    )


def _equal(some: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two states are equal, not-a-numbers at the same places included."""
    if some.shape != other.shape:
        return False
    other = other.to(some.dtype)
    return bool(((some == other) | (some.isnan() & other.isnan())).all())
