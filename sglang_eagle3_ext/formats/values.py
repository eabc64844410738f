"""Stream over a draft's values: what headers cannot tell."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_eagle3_ext.errors import CheckpointError, first_line
from sglang_eagle3_ext.formats.folder import headers, load_parts, load_tensors, locate
from sglang_eagle3_ext.formats.reading import FLOATS
from sglang_eagle3_ext.spec import DraftSpec, Finding, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDINGS = ("model.embed_tokens.weight", "language_model.embed_tokens.weight", "embed_tokens.weight")


def check_values(
    spec: DraftSpec,
    target: str | os.PathLike[str] | None = None,
    *,
    target_revision: str | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> tuple[Finding, ...]:
    """Look at every floating point value of a draft once, one tensor in memory at a time.

    Args:
        spec: the draft.
        target: local folder or Hub id of the target, to compare the draft's own embedding with the target's;
            weights that are not on this machine are not fetched for it.
        target_revision: branch, tag or commit of a Hub id; ignored for a local folder.
        progress: wraps the tensors' names while they are read, to show progress.

    Returns:
        Findings: values that are no numbers, a head whose rows belong to other tokens, and whether an own embedding
        is only a copy of the target's, or what keeps the target's from being read.
    """
    findings: list[Finding] = []
    folder = Path(spec.path)
    # Only floating numbers can be none; weights of other types are an error by their headers.
    infos = {name: info for name, info in spec.tensors.items() if info.dtype in FLOATS}
    names = sorted(infos, key=lambda name: (infos[name].file, name))
    try:
        for name, parts in zip(progress(names), _parts(folder, infos, names), strict=True):
            findings += not_finite(f"{folder}/{infos[name].file}:{name}", parts)
            canonical = spec.weights.get(name)
            if spec.embed == "own" and target is not None and canonical == "embed_tokens.weight":
                try:
                    findings += _compare_embedding(name, spec, target, target_revision)
                except CheckpointError as error:  # the target's; the draft is looked at all the same
                    message = (
                        f"{folder}/{infos[name].file}:{name}: cannot be compared, got an embedding of {target} that "
                        "cannot be read; expected one to compare with. The draft's own is used; nothing to do. It said "
                        f"{first_line(error)}"
                    )
                    findings.append(Finding("info", "embedding_not_compared", message))
            if spec.lm_head == "own" and spec.vocab.map == "offset" and canonical == "lm_head.weight":
                findings += _check_head_rows(name, spec)
    except CheckpointError as error:
        findings += error.findings
    return tuple(findings)


_CHUNK = 1 << 22
"""Values looked at together, so that what is read and computed of them stays small beside the tensor."""


def _parts(folder: Path, infos: Mapping[str, TensorInfo], names: Sequence[str]) -> Iterator[Iterable[Tensor]]:
    """Load tensors in the given order, by file, each in parts."""
    for file, inside in itertools.groupby(names, key=lambda name: infos[name].file):
        if file.endswith(".safetensors"):
            yield from (load_parts(folder, name, infos[name], _CHUNK) for name in inside)
        else:
            yield from (in_parts(tensor) for _, tensor in load_tensors(folder, {name: infos[name] for name in inside}))


def in_parts(tensor: Tensor) -> Iterable[Tensor]:
    """Cut a tensor into what is looked at together."""
    parts: Iterable[Tensor] = tensor.reshape(-1).split(_CHUNK)
    return parts


def not_finite(place: str, parts: Iterable[Tensor]) -> list[Finding]:
    """Find values of a tensor that are no numbers.

    Args:
        place: ``<file>:<tensor>``, for the message.
        parts: the tensor in parts, of any shapes and type.

    Returns:
        One error, or nothing.
    """
    import torch

    odd = 0
    for part in parts:
        if not part.is_floating_point() or not part.numel():
            continue
        # The bounds take in what is no number, and are found several times as fast as each such value.
        if not all(math.isfinite(bound) for bound in torch.aminmax(part)):
            odd += int((~torch.isfinite(part)).sum())
    if not odd:
        return []
    return [
        Finding(
            "error",
            "not_finite",
            f"{place}: got {odd} values that are NaN or infinite; expected numbers. Fetch or export the checkpoint "
            "again.",
        )
    ]


def _load(spec: DraftSpec, name: str) -> Tensor:
    return next(load_tensors(Path(spec.path), {name: spec.tensors[name]}))[1]


def _check_head_rows(name: str, spec: DraftSpec) -> list[Finding]:
    """Find a head that was pruned with the offsets of ``d2t`` in the place of the tokens they lead to."""
    head = _load(spec, name)
    offsets = _load(spec, next(stored for stored, canonical in spec.weights.items() if canonical == "d2t"))
    if head.dim() != 2 or offsets.shape != head.shape[:1]:
        return []
    # Such a head repeats a row wherever an offset repeats, and nowhere else; a few columns show it.
    repeats = (head[1:, :64] == head[:-1, :64]).all(dim=1)
    if not bool(repeats.any()) or not bool((repeats == (offsets[1:] == offsets[:-1])).all()):
        return []
    return [
        Finding(
            "error",
            "head_rows_by_offset",
            f"{spec.path}/{spec.tensors[name].file}:{name}: got equal neighbouring rows wherever d2t repeats an offset"
            "; expected another row for every draft token. The head was pruned with the offsets instead of the tokens "
            "they lead to: prune it again from the full one.",
        )
    ]


def _compare_embedding(
    name: str, spec: DraftSpec, target: str | os.PathLike[str], revision: str | None
) -> list[Finding]:
    """Say whether the draft's own embedding is a copy of the target's."""
    place = f"{spec.path}/{spec.tensors[name].file}:{name}"
    folder = locate(target, revision, weights=False)
    try:
        stored = headers(folder, [])
    except CheckpointError as error:
        if {f.code for f in error.findings} - {"no_weights", "shard_absent"}:
            return list(error.findings)
        return [
            Finding(
                "info",
                "embedding_not_compared",
                f"{place}: got no weights of {target} on this machine; expected them to compare with. The draft's own "
                "is used; to compare, name a local folder of the target with its weights.",
            )
        ]
    key = next((key for key in stored if key.endswith(_EMBEDDINGS)), None)
    shape = spec.tensors[name].shape
    if key is None or stored[key].shape != shape or len(shape) != 2:
        got = "no embedding" if key is None else f"an embedding of shape {list(stored[key].shape)}"
        return [
            Finding(
                "info",
                "embedding_not_compared",
                f"{place}: got {got} in {target}; expected one of shape {list(shape)} to compare with. The "
                "draft's own is used; nothing to do.",
            )
        ]
    own, (_, theirs) = _load(spec, name), next(load_tensors(folder, {key: stored[key]}))
    rows = max(1, _CHUNK // max(1, shape[1]))
    pairs = zip(own.split(rows), theirs.split(rows), strict=True)
    changed = sum(int((mine != other.to(mine.dtype)).any(dim=-1).sum()) for mine, other in pairs)
    if not changed:
        return [
            Finding(
                "info",
                "embedding_is_copy",
                f"{place}: is equal to the target's embedding; sharing the target's saves "
                f"{own.numel() * own.element_size() / 2**20:.1f} MiB. Nothing to do.",
            )
        ]
    return [
        Finding(
            "info",
            "embedding_is_own",
            f"{place}: differs from the target's embedding in {changed} of {own.shape[0]} rows; the draft's own is "
            "used. Nothing to do.",
        )
    ]
