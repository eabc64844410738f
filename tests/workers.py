"""SGLang brought up in this process as its scheduler does it, on the CPU platform.

For tests that ``test_host/test_runtimes.py`` gives a process of their own.
"""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sglang_eagle3_ext.host.servers import free_port

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker


def settings(target: Path, draft: Path | None = None, **flags: Any) -> ServerArgs:
    """Make a float32 server's settings; with a draft, those of a small server of EAGLE-3."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.server_args import ServerArgs

    if draft is not None:
        flags = {
            "speculative_draft_model_path": str(draft),
            "speculative_algorithm": "EAGLE3",
            "max_total_tokens": 128,
            "max_running_requests": 4,
        } | flags
    return ServerArgs(model_path=str(target), device="cpu", dtype="float32", skip_tokenizer_init=True, **flags)


def join(settings: ServerArgs, port: int, rank: int = 0) -> None:
    """Publish the settings and join the groups of all ranks."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(
        world_size=settings.tp_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    initialize_model_parallel()
    current_platform.init_backend()


def make_workers(settings: ServerArgs, port: int, rank: int = 0) -> EagleDraftWorker:
    """Bring target and draft up, to just before the target's CUDA graphs."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    target = TpModelWorker(server_args=settings, gpu_id=rank, nccl_port=port)
    draft = EagleDraftWorker(settings, rank, port, target)
    target.alloc_memory_pool()
    pool, allocator = target.get_memory_pool()
    draft.alloc_memory_pool(target.model_runner.memory_pool_config, pool, allocator)
    target.init_attention_backends()
    draft.init_attention_backends()
    return draft


@contextmanager
def runtime(target: Path) -> Iterator[None]:
    """Run one rank that serves nothing: plugins, settings, groups, operators."""
    join(settings(target), free_port())
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def pair(target: Path, draft: Path, **flags: Any) -> Iterator[EagleDraftWorker]:
    """Run one rank with a target and its draft."""
    chosen, port = settings(target, draft, **flags), free_port()
    join(chosen, port)
    yield make_workers(chosen, port)
    torch.distributed.destroy_process_group()


Work = Callable[[int, int, int], Any]
"""What one process does, of how many ranks, as which one, at which port; what it returns is pickled."""


def on_ranks(work: Mapping[str, Work], folder: Path, sizes: Sequence[int] = (1, 2)) -> dict[str, dict[int, list[Any]]]:
    """Fork a process for every rank of a group of each size, and have each group do each work.

    What all of them import is better imported before; no runtime may be up in this process. A rank that fails takes
    the others along, which would wait for it, and ends the run of the tests.

    Args:
        work: what to do, by name; every piece has groups of its own.
        folder: for the files in which the ranks leave what they found.
        sizes: how many ranks a group has.

    Returns:
        For each work and each size what its ranks returned, by rank.
    """
    gc.freeze()
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    running: dict[int, tuple[str, Any]] = {}
    found: dict[str, dict[int, list[Path]]] = {}
    for name, do in work.items():
        for size in sizes:
            port = free_port()
            files = [folder / f"{name}-{size}-{rank}.pt" for rank in range(size)]
            found.setdefault(name, {})[size] = files
            for rank, file in enumerate(files):
                process = context.Process(target=_be_rank, args=(do, size, rank, port, file))
                process.start()
                running[process.sentinel] = f"{name}, rank {rank} of {size}", process
    problems = []
    try:
        while running and not problems:
            ended = [running.pop(sentinel) for sentinel in wait(list(running), timeout=600)]
            if not ended:
                problems = [f"{name}: not done yet" for name, _ in running.values()]
            for name, process in ended:
                process.join()
                if process.exitcode:
                    problems.append(f"{name}: ended with {process.exitcode}")
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    if problems:
        pytest.exit("\n".join([*problems, *(f.read_text() for f in sorted(folder.glob("*.txt")))]), returncode=1)
    return {
        name: {size: [torch.load(f, weights_only=False) for f in files] for size, files in groups.items()}
        for name, groups in found.items()
    }


def _be_rank(do: Work, size: int, rank: int, port: int, file: Path) -> None:
    """Work as one rank and leave the result in a file; what went wrong is left beside it."""
    torch.set_num_threads(1)
    try:
        torch.save(do(size, rank, port), file)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException:
        file.with_suffix(".txt").write_text(traceback.format_exc())
        raise
