"""The SGLang platform ``eagle3_ext``: a CPU without any compiled kernel package."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import CpuArchEnum, PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.cpu import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.platforms.interface import KVPoolKind

SPECULATIVE_ALGORITHMS = ("EAGLE", "EAGLE3")

FLOAT_KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "float16", "float32")


class Eagle3CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on plain PyTorch, with EAGLE-3 chains and trees.

    ``capabilities`` says that there is no Triton: SGLang then takes its own PyTorch allocators and
    request-table writers, and the operators that have no such fall-back come from this package.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        super().__init__()
        _compile_nothing_unless_asked()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose the attention backend; refuse, before anything loads, what would be served wrongly.

        Raises:
            UnsupportedError: names every setting that is not served, not only the first.
        """
        problems = unsupported_settings(server_args)
        if torch.cuda.is_available():
            problems.append(
                "SGLANG_PLATFORM: got eagle3_ext where there is a GPU, whose kernels SGLang would then pick; expected "
                "a process in which PyTorch sees none. Set CUDA_VISIBLE_DEVICES= (empty), or leave SGLANG_PLATFORM "
                "out."
            )
        if problems:
            raise UnsupportedError("\n".join(problems))
        if server_args.attention_backend in (None, self._backend_of_sglang):
            server_args.attention_backend = BACKEND
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        if ranks > 1:
            # Without it SGLang serves no more ranks than there are NUMA nodes.
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", share_cores(sorted(os.sched_getaffinity(0)), ranks))

    @property
    def _backend_of_sglang(self) -> str:
        """Name the backend that SGLang has put in by now, on any CPU, where the user named none."""
        return "torch_native" if self.cpu_arch == CpuArchEnum.ARM else "intel_amx"

    def get_device(self, device_id: int = 0) -> str:
        """Name the device, as server settings spell it."""
        return self.device_type

    def get_default_attention_backend(self) -> str:
        """Name the one attention backend of this platform."""
        return BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Admit the EAGLE family with one draft model."""
        return algorithm in SPECULATIVE_ALGORITHMS

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Run the draft with the target's backend."""
        return BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Admit no other backend for the draft."""
        return backend == BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return the gather of slot numbers that target verification writes to."""
        from sglang_eagle3_ext.host.cpu.cache_locs import gather_extend_cache_locs

        return gather_extend_cache_locs

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Return the pool whose slots move without a Triton kernel."""
        if kind != "mha":
            return None
        from sglang_eagle3_ext.host.cpu.kv_pool import CpuKVPool

        return CpuKVPool

    def get_dispatch_key_name(self) -> str:
        """Let SGLang's fused operators run their PyTorch form, except those registered below."""
        return "native"

    def init_backend(self) -> None:
        """Put this package's operators where SGLang looks for them, once per worker process.

        Raises:
            UnsupportedError: this SGLang lacks what the platform relies on.
        """
        from sglang_eagle3_ext.host import contract
        from sglang_eagle3_ext.host.cpu import attention, hooks, operators

        contract.require("cpu")
        attention.register_backend()
        operators.register_operators()
        hooks.install()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pack the weights of every plain linear layer, of the target and of the draft alike."""
        from sglang_eagle3_ext.host.cpu.linear_methods import pack_model

        pack_model(model)


def share_cores(cores: Sequence[int], ranks: int) -> str:
    """Share cores out between ranks, as SGLang spells it: ``0,1|2,3``; with fewer cores than ranks some share one."""
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def unsupported_settings(server_args: Any) -> list[str]:
    """List the server settings that this platform does not serve, one message each."""
    problems = []
    page_size = server_args.page_size
    if page_size not in (None, 1):
        problems.append(
            f"--page-size: got {page_size}; expected 1, since the CPU platform serves pages of one token. Leave it out."
        )
    kv_cache_dtype = server_args.kv_cache_dtype
    if kv_cache_dtype not in (None, *FLOAT_KV_CACHE_DTYPES):
        problems.append(
            f"--kv-cache-dtype: got {kv_cache_dtype}; expected one of {', '.join(FLOAT_KV_CACHE_DTYPES)}, in which the "
            "CPU platform keeps keys and values. Leave it out."
        )
    for flag, value, plain in (
        ("--ep-size", server_args.ep_size, 1),
        ("--moe-dense-tp-size", server_args.moe_dense_tp_size, None),
        ("--moe-a2a-backend", server_args.moe_a2a_backend, "none"),
    ):
        if value not in (None, plain):
            problems.append(
                f"{flag}: got {value}; expected none, since the CPU platform deals out neither experts nor rows to its "
                "ranks. Leave it out: --tp-size splits every expert."
            )
    if server_args.speculative_use_rejection_sampling:
        problems.append(
            "--speculative-use-rejection-sampling: got it on the CPU platform; expected it to be off, since its "
            "sampler exists in Triton only. Leave it out: the tree sampler keeps the target's distribution too."
        )
    return problems


def _compile_nothing_unless_asked() -> None:
    """Turn ``torch.compile`` off, unless ``TORCHDYNAMO_DISABLE`` says otherwise.

    SGLang decorates a few small functions with it; on a CPU each would call a C++ compiler in the
    middle of the first request that needs it, and fail where there is none.
    """
    if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
        config: Any = sys.modules.get("torch._dynamo.config")
        if config is not None:  # for functions that were decorated before
            config.disable = True
