"""Stream over a draft's values: what headers cannot tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.folder import headers, load_tensors, locate
from sglang_eagle3_ext.spec import DraftSpec, Finding

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
    """Look at every value of a draft once, one tensor in memory at a time.

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
    import torch

    findings: list[Finding] = []
    folder = Path(spec.path)
    for name in progress(sorted(spec.tensors)):
        info = spec.tensors[name]
        _, tensor = next(load_tensors(folder, {name: info}))
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            odd = int((~torch.isfinite(tensor.float())).sum())
            findings.append(
                Finding(
                    "error",
                    "not_finite",
                    f"{folder}/{info.file}:{name}: got {odd} values that are NaN or infinite; expected numbers. Fetch "
                    "or export the checkpoint again.",
                )
            )
        if spec.embed == "own" and target is not None and spec.weights.get(name) == "embed_tokens.weight":
            findings += _compare_embedding(name, tensor, spec, target, target_revision)
        if spec.lm_head == "own" and spec.vocab.map == "offset" and spec.weights.get(name) == "lm_head.weight":
            findings += _check_head_rows(name, tensor, spec)
    return tuple(findings)


def _check_head_rows(name: str, head: Tensor, spec: DraftSpec) -> list[Finding]:
    """Find a head that was pruned with the offsets of ``d2t`` in the place of the tokens they lead to."""
    folder = Path(spec.path)
    _, offsets = next(
        load_tensors(folder, {n: spec.tensors[n] for n, canonical in spec.weights.items() if canonical == "d2t"})
    )
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
            f"{folder}/{spec.tensors[name].file}:{name}: got equal neighbouring rows wherever d2t repeats an offset; "
            "expected another row for every draft token. The head was pruned with the offsets instead of the tokens "
            "they lead to: prune it again from the full one.",
        )
    ]


def _compare_embedding(
    name: str, own: Tensor, spec: DraftSpec, target: str | os.PathLike[str], revision: str | None
) -> list[Finding]:
    """Say whether the draft's own embedding is a copy of the target's."""
    import torch

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
    if key is None or stored[key].shape != tuple(own.shape):
        got = "no embedding" if key is None else f"an embedding of shape {list(stored[key].shape)}"
        return [
            Finding(
                "info",
                "embedding_not_compared",
                f"{place}: got {got} in {target}; expected one of shape {list(own.shape)} to compare with. The "
                "draft's own is used; nothing to do.",
            )
        ]
    _, theirs = next(load_tensors(folder, {key: stored[key]}))
    if torch.equal(own, theirs.to(own.dtype)):
        return [
            Finding(
                "info",
                "embedding_is_copy",
                f"{place}: is equal to the target's embedding; sharing the target's saves "
                f"{own.numel() * own.element_size() / 2**20:.1f} MiB. Nothing to do.",
            )
        ]
    rows = int((own != theirs.to(own.dtype)).any(dim=1).sum())
    return [
        Finding(
            "info",
            "embedding_is_own",
            f"{place}: differs from the target's embedding in {rows} of {own.shape[0]} rows; the draft's own is used. "
            "Nothing to do.",
        )
    ]
