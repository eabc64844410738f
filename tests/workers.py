"""SGLang brought up in this process as its scheduler does it, on the CPU platform.

For tests that ``test_host/test_runtimes.py`` gives a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
