"""The ``eagle3_ext`` object: what an author or a deployment says about a draft, above its dialect."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import Expected, Finding, IdMeaning, Order, Origin, Source, parse_source

# Bounded above as well: JSON reads 1e999 as infinity.
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class ExpectedAcceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The acceptance measured for the draft when it was known to be served right."""

    accept_length: NonNegative
    accept_per_position: list[NonNegative]
    steps: Positive
    topk: Positive
    draft_tokens: Positive

    def freeze(self) -> Expected:
        """Turn into the noun of ``spec``."""
        return Expected(self.accept_length, tuple(self.accept_per_position), self.steps, self.topk, self.draft_tokens)


class Eagle3Ext(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of ``eagle3_ext``; ``UNSET`` means that the dialect decides."""

    sources: list[str] | msgspec.UnsetType = msgspec.UNSET
    order: Literal["as_listed", "ascending"] | msgspec.UnsetType = msgspec.UNSET
    layer_ids: Literal["output", "boundary"] | msgspec.UnsetType = msgspec.UNSET
    producer: str | msgspec.UnsetType = msgspec.UNSET
    vocab_map: Literal["offset", "absolute"] | msgspec.UnsetType = msgspec.UNSET
    residual: Literal["pre_norm", "post_norm"] | msgspec.UnsetType = msgspec.UNSET
    recurrent_state: Literal["pre_norm", "post_norm"] | msgspec.UnsetType = msgspec.UNSET
    norms: Literal["none", "per_source", "concatenation"] | msgspec.UnsetType = msgspec.UNSET
    rope_theta: Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)] | msgspec.UnsetType = msgspec.UNSET
    rope_scaling: dict[str, Any] | None | msgspec.UnsetType = msgspec.UNSET
    embed: Literal["own", "target"] | msgspec.UnsetType = msgspec.UNSET
    lm_head: Literal["own", "target"] | msgspec.UnsetType = msgspec.UNSET
    expected: ExpectedAcceptance | msgspec.UnsetType = msgspec.UNSET
    strict: bool | msgspec.UnsetType = msgspec.UNSET


class Producer(NamedTuple):
    """What one trainer means by keys that trainers use with different meanings.

    Attributes:
        layer_ids: the meaning of a plain id.
        order: whether the concatenation follows the list or the depth.
        norm_output_recycles: whether ``norm_output`` says which state is recycled; otherwise it says
            whether the head reads through the final norm, and the state before it is recycled.
        reads_rope_theta: whether training turned the rotary embedding as ``rope_theta`` says; otherwise with
            base 10000, unless the scaling is a multimodal one.
        reads_mscale: whether training of an MLA draft also scaled rotation and softmax as yarn's ``mscale`` and
            ``mscale_all_dim`` say; otherwise with neither.
    """

    layer_ids: IdMeaning
    order: Order
    norm_output_recycles: bool = True
    reads_rope_theta: bool = True
    reads_mscale: bool = True


PRODUCERS: dict[str, Producer] = {
    "angelslim": Producer("output", "as_listed", reads_rope_theta=False),
    "automodel": Producer("output", "as_listed", reads_mscale=False),
    "eagle": Producer("boundary", "ascending"),
    "modelopt": Producer("output", "ascending"),
    "specforge": Producer("output", "ascending", norm_output_recycles=False),
    "speculators": Producer("boundary", "ascending"),
    "torchspec": Producer("output", "as_listed"),
}


class Declared(NamedTuple):
    """The merged ``eagle3_ext`` object with the origin of each key that is set in it."""

    ext: Eagle3Ext
    sources: tuple[Source, ...] | None
    origins: Mapping[str, Origin]
    present: bool

    @property
    def producer(self) -> Producer | None:
        """Look up what the named trainer means, ``None`` when none is named."""
        return PRODUCERS[self.ext.producer] if isinstance(self.ext.producer, str) else None


def merge(stored: object, override: Mapping[str, Any] | None, place: str) -> Declared:
    """Merge a checkpoint's own object with the command line's, key by key.

    Args:
        stored: the value of ``eagle3_ext`` in the checkpoint's ``config.json``, ``None`` when absent.
        override: the value of ``eagle3_ext`` in ``--json-model-override-args``.
        place: ``<file>:eagle3_ext``, for messages.

    Returns:
        The merged object.

    Raises:
        CheckpointError: an unknown key, a value of the wrong type, an unknown producer or a source that is
            not in the grammar; every one of them in one error.
    """
    problems: list[Finding] = []

    def problem(key: str, wrong: str, advice: str) -> None:
        problems.append(Finding("error", "eagle3_ext", f"{key}: {wrong}. {advice}"))

    parts: list[tuple[Origin, str, Mapping[str, Any]]] = []
    for origin, where, value in (
        ("eagle3_ext", place, stored),
        ("override", "--json-model-override-args:eagle3_ext", override),
    ):
        if value is None:
            continue
        if not isinstance(value, Mapping):
            problem(where, f"got {value!r}; expected an object", "See docs/formats.md for its keys.")
            continue
        parts.append((origin, where, value))  # type: ignore[arg-type]

    merged: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    known = ", ".join(Eagle3Ext.__struct_fields__)
    for origin, where, value in parts:
        for key, entry in value.items():
            if key not in Eagle3Ext.__struct_fields__:
                problem(f"{where}.{key}", f"unknown key; expected one of {known}", "Correct or remove it.")
                continue
            try:
                # One key at a time, so that every wrong value is reported, not only the first.
                msgspec.convert({key: entry}, Eagle3Ext)
            except msgspec.ValidationError as error:
                problem(
                    f"{where}.{key}",
                    f"{error}; see docs/formats.md for what is expected",
                    "Correct the value.",
                )
                continue
            if key == "sources":
                for text in entry:
                    try:
                        parse_source(text)
                    except ValueError as error:
                        problem(f"{where}.sources", str(error), "Correct the spelling.")
            if key == "producer" and entry not in PRODUCERS:
                problem(
                    f"{where}.producer",
                    f"got {entry!r}; expected one of {', '.join(PRODUCERS)}",
                    "Leave it out and set layer_ids, order and recurrent_state instead.",
                )
            merged[key] = entry
            origins[key] = origin
    if problems:
        raise CheckpointError.from_findings(problems)
    ext = msgspec.convert(merged, Eagle3Ext)
    sources = None if ext.sources is msgspec.UNSET else tuple(parse_source(text) for text in ext.sources)
    return Declared(ext, sources, origins, bool(parts))
