"""The ``eagle3_ext`` object: what an author or a deployment says about a draft, above its dialect."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from sglang_eagle3_ext.formats.keys import WrongKey, read_keys, spell
from sglang_eagle3_ext.spec import Expected, Finding, IdMeaning, Order, Origin, Source, parse_source

# Bounded above as well: JSON reads 1e999 as infinity.
Length = Annotated[float, msgspec.Meta(ge=1, le=sys.float_info.max)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

OVERRIDE = "--json-model-override-args:eagle3_ext"
"""Where the server's command line has the object, for messages."""


class ExpectedAcceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The acceptance measured for the draft when it was known to be served right."""

    accept_length: Length
    accept_per_position: list[Share]
    steps: Positive
    topk: Positive
    draft_tokens: Positive
    verify_steps: Positive | None = None

    def problems(self) -> Iterator[WrongKey]:
        """List the figures that contradict each other, so that nothing can have been measured like them."""
        longest = min(self.steps + 1, self.draft_tokens)
        if self.accept_length > longest:
            yield WrongKey(
                "accept_length",
                f"got {self.accept_length} with {self.steps} steps and {self.draft_tokens} draft tokens; expected at "
                f"most {longest}, the longest that a verify step can accept",
            )
        shares = self.accept_per_position
        if len(shares) != self.steps:
            yield WrongKey(
                "accept_per_position",
                f"got {len(shares)} shares for {self.steps} steps; expected one for each draft step",
            )
        if shares != sorted(shares, reverse=True):
            yield WrongKey(
                "accept_per_position",
                f"got {spell(shares)}, which rises; expected shares of all verify steps, where no position is accepted "
                "more often than the one before it",
            )

    def freeze(self) -> Expected:
        """Turn into the noun of ``spec``."""
        return Expected(
            self.accept_length,
            tuple(self.accept_per_position),
            self.steps,
            self.topk,
            self.draft_tokens,
            self.verify_steps,
        )


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
        theta_unclear: kinds of scaling, or none, under which versions of the trainer are known to turn with base
            10000 instead.
        scalings: the kinds of scaling that its training code has beside none; empty where it has all.
        table_beyond: positions beyond ``max_position_embeddings`` in the table of rotations that training builds, and
            with them the length from which it stretches the base of a dynamic scaling, at all positions.
        reads_mscale: whether training of an MLA draft also scaled rotation and softmax as yarn's ``mscale`` and
            ``mscale_all_dim`` say; otherwise with neither.
    """

    layer_ids: IdMeaning
    order: Order
    norm_output_recycles: bool = True
    reads_rope_theta: bool = True
    theta_unclear: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    table_beyond: int = 0
    reads_mscale: bool = True


PRODUCERS: dict[str, Producer] = {
    "angelslim": Producer("output", "as_listed", reads_rope_theta=False),
    "automodel": Producer("output", "as_listed", reads_mscale=False),
    "eagle": Producer("boundary", "ascending", reads_rope_theta=False, scalings=("linear", "dynamic")),
    "modelopt": Producer("output", "ascending"),
    "specforge": Producer(
        "output",
        "ascending",
        norm_output_recycles=False,
        theta_unclear=("none", "linear", "dynamic", "llama3"),
        table_beyond=20,
    ),
    "speculators": Producer("boundary", "ascending"),
    "torchspec": Producer("output", "as_listed", theta_unclear=("linear", "dynamic", "yarn", "mrope"), table_beyond=20),
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


def merge(
    stored: object, override: object, place: str, override_place: str = OVERRIDE
) -> tuple[Declared, list[Finding]]:
    """Merge a checkpoint's own object with the command line's, key by key.

    Args:
        stored: the value of ``eagle3_ext`` in the checkpoint's ``config.json``, ``None`` when absent.
        override: the value of ``eagle3_ext`` on a command line.
        place: ``<file>:eagle3_ext``, for messages.
        override_place: where the override was given, for messages.

    Returns:
        The merged object, and an error for every unknown key, value of the wrong type or out of its bounds, unknown
        producer and source that is not in the grammar; what is wrong is absent from the object.
    """
    findings: list[Finding] = []

    def report(key: str, wrong: str, advice: str) -> None:
        findings.append(Finding("error", "eagle3_ext", f"{key}: {wrong}. {advice}"))

    merged: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    objects: tuple[tuple[Origin, str, object], ...] = (
        ("eagle3_ext", place, stored),
        ("override", override_place, override),
    )
    for origin, where, value in objects:
        if value is None:
            continue
        if not isinstance(value, Mapping):
            report(where, f"got {spell(value)}; expected an object", "See docs/formats.md for its keys.")
            continue
        read, wrong = read_keys(value, Eagle3Ext)
        for key, text in wrong:
            report(f"{where}.{key}", text, "Correct or remove it.")
        for key in list(read):
            for name, problem, advice in _value_problems(key, read[key]):
                report(f"{where}.{name}", problem, advice)
                read.pop(key, None)
        merged |= read
        origins |= dict.fromkeys(read, origin)
    ext = Eagle3Ext(**merged)
    sources = None if ext.sources is msgspec.UNSET else tuple(parse_source(text) for text in ext.sources)
    return Declared(ext, sources, origins, any(isinstance(value, Mapping) for _, _, value in objects)), findings


def _value_problems(key: str, entry: Any) -> Iterator[tuple[str, str, str]]:
    """List what a key's type does not say about its value: the key, what is wrong, what to do."""
    if key == "sources":
        for text in entry:
            try:
                parse_source(text)
            except ValueError as error:
                yield key, str(error), "Correct the spelling."
    elif key == "producer" and entry not in PRODUCERS:
        yield (
            key,
            f"got {spell(entry)}; expected one of {', '.join(PRODUCERS)}",
            "Leave it out and set layer_ids, order and recurrent_state instead.",
        )
    elif key == "expected":
        yield from ((f"{key}.{name}", wrong, "Record what was measured.") for name, wrong in entry.problems())
