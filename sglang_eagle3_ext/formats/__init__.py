"""Read a checkpoint folder into a :class:`~sglang_eagle3_ext.spec.DraftSpec`, one dialect per file.

``folder``      what lies on disk: ``config.json``, headers of the tensors, values on demand
``eagle3_ext``  the object with which a draft's author settles what the dialect leaves open
``angelslim``, ``automodel``, ``deepseek``, ``eagle``, ``modelopt``, ``speculators``, ``torchspec``, ``vllm``
                one dialect each; a further one is one more file and one more line in ``READERS``
``flat``        what the dialects with all keys at the top level share: all of them but ``speculators``
``reading``     a checkpoint while it is read: the dialect's keys, the home of each tensor
``layout``      what all dialects share: agreement between config, ``eagle3_ext`` and tensors; its parts
                are ``fc``, ``attention``, ``rope`` and ``vocab``
``values``      a stream over the values
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_eagle3_ext.formats import angelslim, automodel, deepseek, eagle, modelopt, speculators, torchspec, vllm
from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE
from sglang_eagle3_ext.formats.folder import Folder, fatal, load_tensors, locate, read_json
from sglang_eagle3_ext.formats.reading import IGNORED, convert
from sglang_eagle3_ext.formats.values import check_values
from sglang_eagle3_ext.spec import DraftSpec, TargetFacts, stock_reading

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ARCHITECTURES", "IGNORED", "READERS", "check_values", "read_draft", "read_target", "read_tensors"]

READERS: dict[str, Callable[[Folder], DraftSpec | str]] = {
    "angelslim": angelslim.claim_and_read,
    "automodel": automodel.claim_and_read,
    "deepseek": deepseek.claim_and_read,
    "eagle": eagle.claim_and_read,
    "modelopt": modelopt.claim_and_read,
    "speculators": speculators.claim_and_read,
    "torchspec": torchspec.claim_and_read,
    "vllm": vllm.claim_and_read,
}
"""Dialect -> its one function. It takes the opened checkpoint and returns the draft's facts, or the reason why the
dialect refuses the folder; it raises ``CheckpointError`` where the folder is in this dialect and cannot be read."""

ARCHITECTURES = frozenset(
    {STOCK_ARCHITECTURE, automodel.ARCHITECTURE, *deepseek.ARCHITECTURES, modelopt.DEEP, *vllm.ARCHITECTURES}
)
"""Architecture strings that only EAGLE-3 drafts carry (the EAGLE repository's own files call themselves Llamas)."""


def read_draft(
    path: str | os.PathLike[str],
    *,
    override: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> DraftSpec:
    """Read everything a draft checkpoint says about how it was trained.

    Reads ``config.json``, the headers of the tensors and the values of ``d2t`` and ``t2d``; no other value.

    Args:
        path: local folder or Hub id (Hugging Face's cache and offline flag are honoured).
        override: the ``eagle3_ext`` object of ``--json-model-override-args``, merged key by key over the
            checkpoint's own.
        revision: branch, tag or commit of a Hub id; ignored for a local folder.

    Returns:
        The draft's facts. Problems that leave them readable are in ``findings``.

    Raises:
        CheckpointError: the checkpoint cannot be read at all: nothing there, broken files, an ``eagle3_ext``
            that is not understood, or no dialect (or more than one) that claims it.
    """
    folder = Folder.open(locate(path, revision), override)
    answers = {name: claim(folder) for name, claim in READERS.items()}
    claimed = {name: answer for name, answer in answers.items() if isinstance(answer, DraftSpec)}
    if len(claimed) > 1:
        raise fatal(
            "dialect_ambiguous",
            f"{folder.path}/config.json: {' and '.join(claimed)} claim it; expected exactly one dialect. Remove the "
            "keys of the other.",
        )
    if not claimed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in answers.items())
        raise fatal(
            "dialect_unknown",
            f"{folder.path}/config.json: no dialect claims it ({reasons}); expected an EAGLE-3 draft in one of "
            f"{', '.join(READERS)}. Check that the folder holds a draft.",
        )
    return next(iter(claimed.values()))


def read_tensors(spec: DraftSpec, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Load a draft's tensors one by one on the CPU.

    Args:
        spec: the draft.
        names: canonical names to load; ``None`` loads all that are not left out on purpose.

    Returns:
        An iterator over canonical names and tensors, each file opened once.
    """
    wanted = {
        name: info
        for name, info in spec.tensors.items()
        if name in spec.weights
        and (not spec.weights[name].startswith(IGNORED) if names is None else spec.weights[name] in names)
    }
    for name, tensor in load_tensors(Path(spec.path), wanted):
        yield spec.weights[name], tensor


class TargetConfig(msgspec.Struct, frozen=True):
    """The sizes of a language model in Hugging Face's words."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None = None


def read_target(path: str | os.PathLike[str], *, revision: str | None = None) -> TargetFacts:
    """Read what the plan needs to know about a target from its ``config.json``.

    Args:
        path: local folder or Hub id.
        revision: branch, tag or commit of a Hub id; ignored for a local folder.

    Returns:
        The target's facts.

    Raises:
        CheckpointError: there is no such target, or its config lacks a size.
    """
    folder = locate(path, revision, weights=False)
    config = read_json(folder / "config.json", "target_unreadable")
    # Multimodal wrappers keep the language model's sizes one level down.
    inner: dict[str, Any] = next(
        (config[k] for k in ("text_config", "llm_config", "language_config") if isinstance(config.get(k), dict)),
        {},
    )
    sizes: TargetConfig = convert({**config, **inner}, TargetConfig, f"{folder}/config.json", "target_unreadable")
    architectures = config.get("architectures") or inner.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise fatal(
            "target_unreadable",
            f"{folder}/config.json:architectures: got {architectures!r}; expected the class of the target. Add the "
            "key.",
        )
    return TargetFacts(
        path=str(path),
        architecture=architectures[0],
        num_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        reading=stock_reading(architectures[0]),
        context=sizes.max_position_embeddings,
    )
