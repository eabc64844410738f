"""Let SGLang's own engine write greedily and keep every state of its target: ``sglang-eagle3 probe --sglang``.

A server is started whose schedulers put a capture point at every boundary (``capture``). Nothing of that goes through
SGLang's own hidden states: those travel as Python lists from process to process, and would need some forty bytes for
every number of a state. Here the first rank writes the rows of each forward pass into the mapped file, each at its
place: a request's id says where its rows begin and end.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.host import contract, doctor, serve
from sglang_eagle3_ext.host.flags import handed_on_problems
from sglang_eagle3_ext.host.servers import Server, ServerError, running
from sglang_eagle3_ext.spec import Boundary, TargetFacts

if TYPE_CHECKING:
    import torch

RUNNING = 64
"""Most requests at once: as many as fill a batch, while the pool of keys and values stays small."""

CHUNK_BYTES = 512 << 20
"""States of one forward pass that are held on the device."""

_OURS_TO_SET = ("--model-path", "--model", "--revision", "--host", "--port")
_READ = ("--dtype",)

_TRIAL = 4
"""Decode steps by which the time is estimated."""


def write_states(
    target: Path,
    prompts: Sequence[Sequence[int]],
    new: int,
    file: Path,
    at: int,
    *,
    dtype: torch.dtype,
    flags: Sequence[str],
    say: Callable[[str], object],
    progress: Callable[[int], object],
) -> list[list[int]]:
    """Answer prompts greedily in a server of their own, which writes the states [R, n + 2, M] into a file.

    Args:
        target: folder of the target.
        prompts: token ids of each prompt.
        new: tokens to write to each, whatever ends an answer.
        file: the file, large enough.
        at: byte at which the states begin.
        dtype: of the target's activations, and of the states.
        flags: SGLang's flags; they win over those chosen here.
        say: takes a remark.
        progress: is called with the number of prompts that were answered since the last call.

    Returns:
        For each prompt the tokens of its answer.

    Raises:
        CheckpointError: a flag names what is settled here.
        UnsupportedError: the server did not start, or did not answer, or SGLang would not find this package.
    """
    instead = "--target and --target-revision say what may be chosen"
    wrong = list(handed_on_problems(flags, "--sglang", _OURS_TO_SET, _READ, instead))
    if wrong:
        raise CheckpointError("\n".join(wrong))
    filters = doctor.filters()
    if filters.status == "FAIL":
        raise UnsupportedError(f"environment: {filters.text}")
    facts = formats.read_target(target)
    at_once = min(RUNNING, len(prompts))
    starts = [0, *accumulate(len(prompt) + new for prompt in prompts)]
    row = (facts.num_layers + 2) * facts.hidden_size * dtype.itemsize
    words = [
        *("--model-path", str(target)),
        *("--max-running-requests", str(at_once)),
        *("--max-total-tokens", str(at_once * (max(map(len, prompts)) + new) + 512)),
        *("--chunked-prefill-size", str(max(64, CHUNK_BYTES // row // 64 * 64))),
        *("--skip-server-warmup", "--sleep-on-idle"),
    ]
    environment = {"EAGLE3_EXT": "on"}
    if not serve.find_machine().has_accelerator:
        words += ["--device", "cpu"]
        environment["SGLANG_PLATFORM"] = "eagle3_ext"
    # Rows that are read from a cache, or computed by a graph, never pass through our capture.
    fixed = ["--disable-radix-cache", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
    fixed += ["--dtype", str(dtype).removeprefix("torch.")]
    place = json.dumps([str(file), at, starts[-1], str(dtype).removeprefix("torch.")])
    with tempfile.TemporaryDirectory(prefix="sglang-eagle3-") as folder:
        launch = [sys.executable, "-m", "sglang_eagle3_ext.host.features", place, *words, *flags, *fixed]
        server = Server("features", launch, Path(folder) / "server.log", environment)
        try:
            # The server goes first: what waits for its answers then ends at once.
            with ThreadPoolExecutor(at_once) as pool, running([server], timeout_s=3600.0):

                def ask_all(some: Sequence[int], tokens: int, name: str) -> dict[int, list[int]]:
                    ids = {i: name.format(starts[i], starts[i + 1]) for i in some}
                    asked = {pool.submit(_ask, server, prompts[i], tokens, ids[i]): i for i in some}
                    answers = {}
                    try:
                        for done in as_completed(asked):
                            answers[asked[done]] = done.result()
                            if name == _ROWS:
                                progress(1)
                    except BaseException:
                        for waiting in asked:
                            waiting.cancel()
                        raise
                    return answers

                batch, seconds = range(at_once), []
                for tokens in (1, 1 + _TRIAL):
                    began = time.perf_counter()
                    ask_all(batch, tokens, f"trial-{tokens}-{{}}-{{}}")
                    seconds.append(time.perf_counter() - began)
                step = max(0.0, seconds[1] - seconds[0]) / _TRIAL
                total = -(-len(prompts) // at_once) * (seconds[0] + step * new)
                say(f"SGLang is up: about {total / 60:.1f} min for {len(prompts)} answers, {at_once} at once")
                answers = ask_all(range(len(prompts)), new, _ROWS)
        except ServerError as error:
            raise UnsupportedError(
                f"{target}: {error}\nCorrect the flags behind --sglang if they are the reason."
            ) from error
    return [answers[i] for i in range(len(prompts))]


_ROWS = "eagle3-rows-{}-{}"
"""The id of a request whose rows are kept: where they begin, and where they end."""


def _ask(server: Server, prompt: Sequence[int], tokens: int, rid: str) -> list[int]:
    body = {
        "input_ids": list(prompt),
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{server.url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            ids: list[int] = json.load(response)["output_ids"]
    except urllib.error.HTTPError as error:
        raise server.error(f"refused a prompt: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, ValueError) as error:
        raise server.error(f"did not answer, got {error}") from error
    if len(ids) != tokens:
        raise server.error(f"wrote {len(ids)} tokens where {tokens} were asked for")
    return ids


# ---- in the server ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EveryState:
    """What ``capture.install`` reads of a plan, where there is no draft: all states of a target.

    Attributes:
        target: the target.
    """

    target: TargetFacts

    @property
    def capture(self) -> tuple[Boundary, ...]:
        """List boundaries 0..n and the state after the final norm."""
        return (*range(self.target.num_layers + 1), "final_norm")


@dataclass(frozen=True)
class Place:
    """Where states go.

    Attributes:
        file: the file.
        at: byte at which they begin.
        rows: how many there are.
        dtype: their dtype, by its name.
    """

    file: str
    at: int
    rows: int
    dtype: str

    def map(self, shape: Sequence[int]) -> torch.Tensor:
        """Map the states [rows, *shape] into memory; what is written there goes to the file."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        size = self.at + self.rows * math.prod(shape) * dtype.itemsize
        mapped = torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8)
        return mapped[self.at :].view(dtype).view(self.rows, *shape)


def main(argv: Sequence[str] | None = None) -> None:
    """Launch SGLang's server as its own command line does, with schedulers that keep every state.

    Args:
        argv: a JSON list of the fields of ``Place``, then SGLang's flags.
    """
    place, *words = sys.argv[1:] if argv is None else argv
    problems = contract.problems("start", "features")
    if problems:
        raise SystemExit("\n".join(problems))
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(words)
    wrong = flag_problems(server_args)
    if wrong:
        raise SystemExit("\n".join(wrong))
    facts = formats.read_target(server_args.model_path)
    try:
        # By its importable name: this module is __main__ here.
        from sglang_eagle3_ext.host.features import Place, run_scheduler

        launch_server(server_args, run_scheduler_process_func=partial(run_scheduler, facts, Place(*json.loads(place))))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def flag_problems(server_args: Any) -> list[str]:
    """List the flags with which the rows of a request would not all pass through the first rank, or through no target.

    Args:
        server_args: SGLang's, as given.
    """
    wanted = (
        ("speculative_algorithm", None, "no draft, since states are taken from every forward pass of the target alone"),
        ("pp_size", 1, "one stage, since the others hold layers of their own. Use --tp-size"),
        ("dp_size", 1, "one replica, since each would write rows of its own. Use --tp-size"),
        ("attn_dp_size", 1, "every row on every rank. Use --tp-size"),
        ("nnodes", 1, "one node"),
        ("enable_two_batch_overlap", False, "one batch at a time"),
    )
    problems = []
    for name, value, why in wanted:
        got = getattr(server_args, name)
        if got != value:
            problems.append(f"--{name.replace('_', '-')}: got {got}; expected {why}. Leave it out.")
    return problems


def run_scheduler(facts: TargetFacts, place: Place, *args: Any, **kwargs: Any) -> None:
    """Be one of SGLang's schedulers, with a target whose states are kept.

    Args:
        facts: the target.
        place: where its states go.
        args: those of SGLang's own function; ``kwargs`` likewise.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def keep(_result: Any, *, model: Any, **_call: Any) -> None:
        install(model, facts, place)

    # Before SGLang loads its plugins, with which it applies this hook.
    HookRegistry.register(contract.CAPTURE_SEAM, keep, HookType.AFTER)
    run_scheduler_process(*args, **kwargs)


def install(model: Any, facts: TargetFacts, place: Place) -> None:
    """Keep every state of a target's forward passes in a file, and leave the passes as they are.

    All ranks capture, since a state may have to be summed over them; the first one writes.

    Args:
        model: the target as SGLang loaded it.
        facts: what is known of it.
        place: where the states go.

    Raises:
        UnsupportedError: this class does not let every state be captured.
    """
    from sglang.srt.runtime_context import get_parallel

    from sglang_eagle3_ext.host import capture

    found = capture.find_language_model(model)
    had: Any = found is not None and found[0].capture_aux_hidden_states
    every: Any = EveryState(facts)
    capture.install(model, every)
    if found is None:  # refused above
        return
    owner, stack = found
    hands_out: Any = stack.forward
    keeper = Keeper(place, facts) if get_parallel().tp_rank == 0 else None

    @functools.wraps(hands_out)  # SGLang reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden_states, states = hands_out(*args, **kwargs)
        if keeper is not None:
            keeper.keep(states, kwargs["forward_batch"] if "forward_batch" in kwargs else args[2])
        return hidden_states

    stack.forward = forward
    owner.capture_aux_hidden_states = had


class Keeper:
    """Write the rows of forward passes to their places.

    Args:
        place: where they go.
        facts: the target.
    """

    def __init__(self, place: Place, facts: TargetFacts) -> None:
        self._place, self._facts = place, facts
        self._states: torch.Tensor | None = None

    def keep(self, states: Sequence[torch.Tensor], batch: Any) -> None:
        """Write what one pass computed for requests whose id asks for it.

        Args:
            states: [T, M] of each boundary, then after the final norm; rows beyond those of the batch are padding.
            batch: SGLang's batch.
        """
        import torch

        if batch.forward_mode.is_idle() or batch.rids is None:
            return
        lengths = batch.extend_seq_lens_cpu if batch.forward_mode.is_extend() else [1] * len(batch.rids)
        asked = [rid.rsplit("-", 2) for rid in batch.rids]
        prefix = _ROWS.split("-{}", 1)[0]
        if not any(name == prefix for name, *_ in asked):
            return
        positions = batch.positions.cpu()
        rows, places = [], []
        for (first, last), (name, *span) in zip(pairwise([0, *accumulate(lengths)]), asked, strict=True):
            if name != prefix:
                continue
            begin, end = map(int, span)
            here = begin + positions[first:last]
            # A pass that was under way when the answer ended computes a row beyond it.
            inside = here < end
            rows.append(torch.arange(first, last)[inside])
            places.append(here[inside])
        if self._states is None:
            self._states = self._place.map((len(states), self._facts.hidden_size))
            if states[0].dtype != self._states.dtype:
                raise RuntimeError(
                    f"{self._facts.path}: got states in {states[0].dtype}; expected {self._states.dtype}, as the file "
                    f"is laid out for. Give --dtype {str(states[0].dtype).removeprefix('torch.')} behind --sglang."
                )
        chosen = torch.cat(rows).to(states[0].device)
        to = torch.cat(places)
        for boundary, state in enumerate(states):
            self._states[to, boundary] = state[chosen].cpu()


if __name__ == "__main__":
    main()
