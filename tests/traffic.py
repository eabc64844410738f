"""Count the bytes that interpreted Triton kernels move.

``with Traffic() as traffic: wrapper(...)`` counts every load, store and atomic operation of every launch, by kernel
and argument. Three counts are kept:

- ``requested``: bytes of the active lanes;
- ``pulled``: distinct bytes per instruction and program, what one thread block has to get from the second-level cache
  (lanes of one tile that read the same address share the read);
- ``distinct``: distinct bytes per launch, what memory has to deliver if the second-level cache forgets nothing. It
  costs time and memory, so it is counted only where asked for.

The counts follow from the addresses alone: they are the same in every run, and the same with
``interpreter.skip_products``. Arguments that share memory are booked under one of their names.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import interpreter  # noqa: F401  (corrects the builder that is patched below)
import numpy as np
import torch
from triton.runtime import interpreter as triton_interpreter


@dataclass(frozen=True)
class Access:
    """What is counted under one name.

    Attributes:
        kernel: name of the Triton function.
        argument: name of its parameter whose memory is touched.
        kind: ``load``, ``store`` or ``atomic``.
    """

    kernel: str
    argument: str
    kind: str


@dataclass(frozen=True)
class Launch:
    """One launch: the name of the Triton function and its grid."""

    kernel: str
    grid: tuple[int, ...]


class Traffic:
    """A meter that counts while it is entered; several may be entered one after the other, not at once."""

    def __init__(self, *, distinct: bool = False) -> None:
        self.requested: collections.Counter[Access] = collections.Counter()
        self.pulled: collections.Counter[Access] = collections.Counter()
        self.launches: list[Launch] = []
        self.busy: collections.Counter[str] = collections.Counter()
        """Programs per kernel that stored something."""
        self._addresses: dict[Access, list[np.ndarray]] | None = collections.defaultdict(list) if distinct else None
        self._itemsize: dict[Access, int] = {}
        self._starts, self._names = np.empty(0, np.uint64), list[str]()
        self._stored_in: set[tuple[int, ...]] = set()

    def __enter__(self) -> Self:
        global _active
        if _active is not None:
            raise RuntimeError("a meter is running; expected one at a time. Leave it first.")
        _active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _active
        _active = None

    def bytes(
        self, *, kernel: str | None = None, arguments: Collection[str] | None = None, kind: str | None = None
    ) -> int:
        """Add up the pulled bytes of a kernel, of arguments, of a kind of access, or of all."""
        return sum(
            size
            for access, size in self.pulled.items()
            if kernel in (None, access.kernel)
            and (arguments is None or access.argument in arguments)
            and kind in (None, access.kind)
        )

    def distinct(self, kernel: str, arguments: Collection[str]) -> int:
        """Add up the distinct bytes that launches of a kernel touched behind some arguments."""
        if self._addresses is None:
            raise RuntimeError("distinct bytes were not counted. Make the meter with distinct=True.")
        return sum(
            np.unique(np.concatenate(parts)).size * self._itemsize[access]
            for access, parts in self._addresses.items()
            if access.kernel == kernel and access.argument in arguments
        )

    def start(self, kernel: str, tensors: dict[str, torch.Tensor], grid: tuple[int, ...]) -> None:
        """Note a launch and where its arguments live."""
        self.launches.append(Launch(kernel, grid))
        spans = sorted((t.data_ptr(), name) for name, t in tensors.items())
        self._starts = np.array([start for start, _ in spans], dtype=np.uint64)
        self._names = [name for _, name in spans]
        self._stored_in = set()

    def finish(self) -> None:
        """Close the books on a launch."""
        self.busy[self.launches[-1].kernel] += len(self._stored_in)

    def count(self, kind: str, pointers: Any, mask: Any, program: tuple[int, ...]) -> None:
        """Note one instruction of one program."""
        addresses = pointers.data
        lanes = addresses[np.broadcast_to(mask, addresses.shape)]
        if lanes.size == 0:
            return
        if kind != "load":
            self._stored_in.add(program)
        at = int(np.searchsorted(self._starts, lanes.flat[0], side="right")) - 1
        access = Access(self.launches[-1].kernel, self._names[at], kind)
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        unique = np.unique(lanes)
        self._itemsize[access] = itemsize
        self.requested[access] += lanes.size * itemsize
        self.pulled[access] += unique.size * itemsize
        if self._addresses is not None:
            parts = self._addresses[access]
            parts.append(unique)
            if len(parts) > 256:
                parts[:] = [np.unique(np.concatenate(parts))]


_active: Traffic | None = None


def _watch_interpreter() -> None:
    """Have every access of an interpreted kernel reported to the meter that runs, if one does."""
    builder = triton_interpreter.InterpreterBuilder
    executor = triton_interpreter.GridExecutor

    def watched(kind: str, access: Callable[..., Any], pointers_at: int, mask_at: int | None) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            if _active is not None:
                mask = True if mask_at is None else args[mask_at].data
                _active.count(kind, args[pointers_at], mask, self.grid_idx)
            return access(self, *args)

        return call

    for name, kind, pointers_at, mask_at in (
        ("create_masked_load", "load", 0, 1),
        ("create_masked_store", "store", 0, 2),
        ("create_atomic_rmw", "atomic", 1, 3),
        ("create_atomic_cas", "atomic", 0, None),
    ):
        setattr(builder, name, watched(kind, getattr(builder, name), pointers_at, mask_at))

    launch = executor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active is None:
            return launch(self, *args, **kwargs)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = {name: given[name] for name in self.arg_names if isinstance(given.get(name), torch.Tensor)}
        grid = self.grid(given) if callable(self.grid) else self.grid
        _active.start(self.fn.__name__, tensors, tuple(int(n) for n in grid))
        try:
            return launch(self, *args, **kwargs)
        finally:
            _active.finish()

    executor.__call__ = launched


_watch_interpreter()


def extrapolate(bytes_of: Callable[[int], int], lengths: Sequence[int]) -> float:
    """Say what a kernel moves for long requests, which grows in proportion to each one's context, from short ones.

    Args:
        bytes_of: what it moves for one request of so many committed tokens.
        lengths: the long requests.
    """
    first, second, third = (bytes_of(length) for length in (512, 1024, 2048))
    per_token = (second - first) / 512
    assert third - second == 1024 * per_token
    return len(lengths) * (first - 512 * per_token) + sum(lengths) * per_token
