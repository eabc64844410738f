"""The key/value pool of the CPU platform."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """SGLang's own pool, moving slots with PyTorch indexing.

    With speculation on, the parent prepares a Triton copy kernel while it is constructed, even when it
    is told to move slots natively; it never gets to here.
    """

    def __init__(self, *args: Any, enable_kv_cache_copy: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, enable_kv_cache_copy=False, **kwargs)
        self.use_native_move_kv_cache = True

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slot ``src_loc[i]`` to slot ``tgt_loc[i]`` in every layer; all reads come before all writes.

        Args:
            tgt_loc: [N] slot numbers.
            src_loc: [N] slot numbers. A pair of equal numbers is a no-op (a chain moves nothing, and the
                unused tail of both lists is padded with zeros).
        """
        moved = tgt_loc != src_loc
        if bool(moved.any()):
            super().move_kv_cache(tgt_loc[moved], src_loc[moved])
