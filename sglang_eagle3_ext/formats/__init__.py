"""Read a checkpoint folder into a :class:`~sglang_eagle3_ext.spec.DraftSpec`, one dialect per file.

``folder``      what lies on disk: ``config.json``, headers of the tensors, values on demand
``eagle3_ext``  the object with which a draft's author settles what the dialect leaves open
``angelslim``, ``automodel``, ``deepseek``, ``eagle``, ``modelopt``, ``speculators``, ``torchspec``, ``vllm``
                one dialect each; a further one is one more file and one more line in ``READERS``
``flat``        what the dialects with all keys at the top level share: all of them but ``speculators``
``reading``     a checkpoint while it is read: the dialect's keys, the home of each tensor
``keys``        a JSON object's keys read into a struct, every wrong one reported
``layout``      what all dialects share: agreement between config, ``eagle3_ext`` and tensors; its parts
                are ``fc``, ``attention``, ``rope`` with its ``rope_kinds``, and ``vocab``
``traces``      what only one trainer writes
``values``      a stream over the values
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import angelslim, automodel, deepseek, eagle, modelopt, speculators, torchspec, vllm
from sglang_eagle3_ext.formats.eagle3_ext import OVERRIDE, Positive
from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE, FlatConfig, NestedConfig
from sglang_eagle3_ext.formats.folder import Folder, fatal, headers, load_tensors, locate, read_json
from sglang_eagle3_ext.formats.keys import read_keys, spell
from sglang_eagle3_ext.formats.reading import IGNORED, LayerConfig, convert
from sglang_eagle3_ext.formats.traces import declared_producer, find_traces
from sglang_eagle3_ext.formats.values import check_values
from sglang_eagle3_ext.spec import DraftSpec, Finding, TargetFacts, stock_reading

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

__all__ = [
    "ARCHITECTURES",
    "IGNORED",
    "READERS",
    "check_values",
    "read_draft",
    "read_target",
    "read_tensors",
]

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
    override_place: str = OVERRIDE,
    revision: str | None = None,
) -> DraftSpec:
    """Read everything a draft checkpoint says about how it was trained.

    Reads ``config.json``, the headers of the tensors and the values of ``d2t`` and ``t2d``; no other value.

    Args:
        path: local folder or Hub id (Hugging Face's cache and offline flag are honoured).
        override: the ``eagle3_ext`` object of ``--json-model-override-args``, merged key by key over the
            checkpoint's own.
        override_place: where that was given, for messages.
        revision: branch, tag or commit of a Hub id; ignored for a local folder.

    Returns:
        The draft's facts. Problems that leave them readable are in ``findings``.

    Raises:
        CheckpointError: the checkpoint cannot be read at all: nothing there, broken files, a key of the wrong type, an
            ``eagle3_ext`` that is not understood, or no dialect (or more than one) that claims it. It holds
            everything else that is wrong, too.
    """
    _refuse_whole_model(path, revision)
    folder = Folder.open(locate(path, revision), override, override_place)
    if folder.unreadable:
        _check_keys(folder)
        raise CheckpointError.from_findings([*folder.findings, *folder.unreadable])
    # Each with findings of its own, since only those of one dialect are kept.
    answers = {name: claim(replace(folder, findings=[*folder.findings])) for name, claim in READERS.items()}
    claimed = {name: answer for name, answer in answers.items() if isinstance(answer, DraftSpec)}
    if not claimed:
        _check_types(folder)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in answers.items())
        folder.add(
            "error",
            "dialect_unknown",
            "config.json",
            f"no dialect claims it ({reasons}); expected an EAGLE-3 draft in one of {', '.join(READERS)}. Check that "
            "the folder holds a draft.",
        )
        raise CheckpointError.from_findings(folder.findings)
    # An MLA draft is in its own dialect, whoever wrote it.
    traces = {} if "deepseek" in claimed else find_traces(folder)
    producer = declared_producer(folder)
    if producer in claimed:
        claimed, traces = {producer: claimed[producer]}, {}
    elif producer in traces:
        traces = {}
    if len({*claimed, *traces}) > 1:
        folder.findings = [*dict.fromkeys(f for spec in claimed.values() for f in spec.findings)]
        others = "".join(f", and {trace}" for name, trace in traces.items() if name not in claimed)
        folder.add(
            "error",
            "dialect_ambiguous",
            "config.json",
            f"{' and '.join(claimed)} claim{'s' * (len(claimed) == 1)} it{others}; expected exactly one dialect. "
            'Remove what is the other\'s, or name the trainer: "eagle3_ext": {"producer": ...}.',
        )
        raise CheckpointError.from_findings(folder.findings)
    spec = next(iter(claimed.values()))
    if any(finding.code in _UNREADABLE for finding in spec.findings):
        raise CheckpointError.from_findings(spec.findings, spec)
    return spec


def _check_keys(folder: Folder) -> None:
    """Report what is wrong with ``config.json`` by itself, where weights cannot be read."""
    is_claimed = False
    for claim in READERS.values():
        try:
            claim(folder)
        except CheckpointError:  # What it holds is among the folder's findings.
            is_claimed = True
    if not is_claimed:
        _check_types(folder)


def _check_types(folder: Folder) -> None:
    """Report the keys of the wrong type where no dialect could be asked."""
    config = folder.config
    convert(folder, config, FlatConfig, "config.json:")
    for key, kind in (("eagle_config", NestedConfig), ("transformer_layer_config", LayerConfig)):
        inner = config.get(key)
        if isinstance(inner, dict):
            convert(folder, inner, kind, f"config.json:{key}.")


_UNREADABLE = frozenset({"config_type", "eagle3_ext"})
"""Codes of problems that leave nothing to go by, though the rest was checked with the value taken for absent."""

_DRAFT_KEYS = frozenset({"draft_vocab_size", "eagle3_ext", "eagle_config", "speculators_model_type"})
"""Keys that only drafts have."""

_MOST_DRAFT_LAYERS = 4


def _is_draft(config: Mapping[str, Any]) -> bool:
    """Say whether a ``config.json`` is that of an EAGLE-3 draft, as far as it tells by itself."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return not _DRAFT_KEYS.isdisjoint(config) or (isinstance(first, str) and first in ARCHITECTURES)


def _refuse_whole_model(path: str | os.PathLike[str], revision: str | None) -> None:
    """Refuse a language model that was named as the draft, before its weights are fetched or looked at.

    Raises:
        CheckpointError: nothing in the config is a draft's, and it has the class and the depth of a target.
    """
    file = locate(path, revision, weights=False) / "config.json"
    try:
        config = read_json(file, "config_unreadable")
    except CheckpointError:
        if Path(path).expanduser().is_dir():
            return  # Its weights lie there as well, and what is wrong with either is told at once.
        raise
    names = config.get("architectures")
    layers = {**config, **_language_model(config)}.get("num_hidden_layers")
    if _is_draft(config) or not isinstance(names, list) or not isinstance(layers, int) or layers <= _MOST_DRAFT_LAYERS:
        return
    if names[:1] and isinstance(names[0], str) and stock_reading(names[0]) is not None and not _has_fc(file.parent):
        raise fatal(
            "dialect_unknown",
            f"{file}: describes a whole language model, got {names[0]} of {layers} layers as the draft; expected an "
            "EAGLE-3 draft. Where draft and target stand in each other's place, swap them.",
        )


def _has_fc(folder: Path) -> bool:
    """Say whether the weights that lie in a folder have an ``fc``, whose config then only looks like a target's."""
    try:
        return any(name.endswith("fc.weight") for name in headers(folder, []))
    except CheckpointError:
        return False


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

    num_hidden_layers: Positive
    hidden_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive | None = None


TARGET_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


def read_target(path: str | os.PathLike[str], *, revision: str | None = None) -> TargetFacts:
    """Read what the plan needs to know about a target from its ``config.json``.

    Args:
        path: local folder or Hub id.
        revision: branch, tag or commit of a Hub id; ignored for a local folder.

    Returns:
        The target's facts.

    Raises:
        CheckpointError: there is no such target, it is a draft itself, or keys of its config are missing or wrong.
    """
    file = locate(path, revision, weights=False) / "config.json"
    config = read_json(file, "target_unreadable")
    if _is_draft(config):
        raise fatal(
            "target_is_draft",
            f"{file}: is an EAGLE-3 draft, got it as the target; expected the model that the draft was trained for. "
            "Where draft and target stand in each other's place, swap them.",
        )
    inner = _language_model(config)
    names = config.get("architectures") or inner.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    sizes_given = {**config, **inner}
    if "num_layers" in sizes_given:  # LongCat's word
        sizes_given.setdefault("num_hidden_layers", sizes_given["num_layers"])
    if inner and any(key not in sizes_given for key in TARGET_SIZES):
        sizes_given = _left_out(config) | sizes_given
    read, wrong = read_keys(sizes_given, TargetConfig)
    findings = [
        Finding("error", "target_unreadable", f"{file}:{key}: {text}. Correct the value.") for key, text in wrong
    ]
    if not isinstance(architecture, str):
        findings.append(
            Finding(
                "error",
                "target_unreadable",
                f"{file}:architectures: got {spell(names or config.get('architectures'))}; expected a list with the "
                "class of the target. Correct the key.",
            )
        )
    if findings or not isinstance(architecture, str):
        raise CheckpointError.from_findings(findings)
    sizes = TargetConfig(**read)
    return TargetFacts(
        path=str(path),
        architecture=architecture,
        num_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        reading=stock_reading(architecture),
        context=sizes.max_position_embeddings,
    )


def _left_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the sizes that a wrapper's inner config does not hold: transformers writes none that its class defaults to.

    Empty where transformers is not installed or does not know the model.
    """
    try:
        from transformers import AutoConfig

        known = AutoConfig.for_model(**config).get_text_config()
    except Exception as error:
        # Whatever a model's own config class makes of the file; the sizes are then reported as missing.
        logger.info("sizes that the config leaves out: %s", error)
        return {}
    return {key: getattr(known, key) for key in TARGET_SIZES if hasattr(known, key)}


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the language model's keys where a multimodal wrapper keeps them one level down; empty elsewhere."""
    wrapped = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    return next((inner for inner in wrapped if isinstance(inner, dict)), {})
