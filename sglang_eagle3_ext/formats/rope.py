"""The draft's rotary embedding, in the three spellings that configs use, and as latent attention has it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from sglang_eagle3_ext.formats.eagle3_ext import PRODUCERS, Producer
from sglang_eagle3_ext.formats.keys import shown, spell
from sglang_eagle3_ext.formats.reading import LatentConfig, Reading
from sglang_eagle3_ext.formats.rope_kinds import (
    ALIASES,
    BESIDE,
    FACTOR,
    FACTORS,
    FALSE,
    KINDS,
    LATENT_KINDS,
    NEEDS,
    NOT_STOCKS,
    ORDERED,
    SHARE,
    STOCKS_OWN,
    STRETCH,
    THETA,
    TRUE,
    WEIGHT,
    Value,
    is_count,
    is_list,
)
from sglang_eagle3_ext.spec import Attention, Rope, Severity

_BASE = 10000.0
"""The base of the rotary embedding where nothing says another."""

_LENGTH_KEY = "original_max_position_embeddings"
_SETTLE_THETA = '"eagle3_ext": {"rope_theta": ...}.'


def read_rope(r: Reading, attention: Attention, max_positions: int) -> Rope:
    """Read how the draft's queries and keys are rotated.

    Args:
        r: the checkpoint being read.
        attention: its attention, which says how wide a head is.
        max_positions: its ``max_position_embeddings``, which some kinds of scaling start from.

    Returns:
        The rotation that the draft was trained with, of values that can be computed with; the others are reported.
    """
    return _RopeReader(r, attention, max_positions).read()


class _RopeReader:
    """Reads one checkpoint's rotary embedding."""

    def __init__(self, r: Reading, attention: Attention, max_positions: int) -> None:
        self.r = r
        self.place = r.dialect.layer_place
        self.theta_place, self.scaling_place = f"{self.place}rope_theta", f"{self.place}rope_scaling"
        """Where the base and the scaling that are taken stand."""
        self.latent = r.dialect.latent
        self.kinds = KINDS if self.latent is None else LATENT_KINDS
        self.max_positions = max_positions
        self.head_dim = attention.head_dim if attention.latent is None else attention.latent.qk_rope_head_dim
        self.pairs = None if r.is_partial else self.head_dim // 2
        own = r.ext.rope_scaling
        self.is_settled = not isinstance(own, msgspec.UnsetType)
        """Whether ``eagle3_ext`` says the scaling, so that the config's need not be clear."""
        self.own = dict(own) if isinstance(own, Mapping) else {}
        self.own_place = r.folder.own_place("rope_scaling")
        self.is_theta_settled = isinstance(r.ext.rope_theta, float) or self.own.get("rope_theta") is not None
        """Whether it says the base."""

    def read(self) -> Rope:
        r, declared = self.r, self.r.folder.declared
        stored = self._stored()
        # What the trainer makes of it hangs on the number of pairs.
        trained = stored if self.pairs is None else self._trained(stored)
        theta, scaling = trained.theta, trained.scaling
        if self.is_settled:
            scaling = self._scaling(self.own, self.own_place)
            r.origins["rope_scaling"] = declared.origins["rope_scaling"]
        said = [
            (r.folder.own_place("rope_theta"), r.ext.rope_theta),
            (f"{self.own_place}.rope_theta", self.own.get("rope_theta")),
        ]
        if thetas := list(self._numbers("rope_theta", said, THETA, "Remove one of the two.")):
            theta = thetas[0]
            r.origins["rope_theta"] = declared.origins.get("rope_theta") or declared.origins["rope_scaling"]
        if self.is_settled and scaling is not None and scaling["rope_type"] == "dynamic":
            self._refuse_dynamic(theta, scaling)
            scaling = None
        rope = Rope(theta, scaling, stored.partial_rotary_factor)
        stocks = stored.scaling
        if stocks is not None and stocks["rope_type"] == "dynamic" and _stocks_stretch(stocks) == 1.0:
            stocks = None
        if (rope.theta, rope.scaling) != (stored.theta, stocks):
            self._differ(f"stock turns the rotary embedding with theta {stored.theta:g} and the config's scaling")
        return rope if self.latent is None else self._latent_rope(rope, self.latent)

    def _differ(self, sentence: str) -> None:
        """Note what stock makes of it otherwise, once where two objects of the config say the same."""
        if sentence not in self.r.differences:
            self.r.differences.append(sentence)

    def _refuse(self, place: str, got: object, expected: str) -> None:
        """Report a value that cannot be computed with, once where two objects are completed by the same key."""
        if not self.r.folder.is_reported(place):
            self.r.report_value(place, got, expected)

    def _is_set_aside(self, place: str) -> bool:
        """Say whether ``eagle3_ext`` has the scaling in the place of what stands here."""
        return self.is_settled and place != self.own_place

    # ---- what is written -------------------------------------------------------------------------------------

    def _stored(self) -> Rope:
        """Read the three spellings of rope; where two of them disagree, stock's choice is kept and reported."""
        r, layer = self.r, self.r.layer
        spelled = (("rope_scaling", layer.rope_scaling), ("rope_parameters", layer.rope_parameters))
        # An empty one says nothing; of two, transformers, and so stock, takes the older name.
        objects = {f"{self.place}{key}": self._flat(f"{self.place}{key}", value) for key, value in spelled if value}
        partial, partial_place = self._partial(objects)
        self._count_pairs(partial, partial_place)
        written = list(objects.items())
        if len(written) == 2 and _scaling_keys(written[0][1]) == _scaling_keys(written[1][1]):
            del written[1]  # SpecForge's exports write one scaling under both names
        scalings = [self._scaling(value, place) for place, value in written]
        if len(scalings) == 2 and scalings[0] != scalings[1] and not self.is_settled:
            r.folder.add(
                "warning",
                "rope_clash",
                f"{self.place}rope_parameters",
                f"got {spell(layer.rope_parameters)} beside rope_scaling {spell(layer.rope_scaling)}; expected both to "
                'agree. rope_scaling was taken, as stock does. Settle it with "eagle3_ext": {"rope_scaling": ...}.',
            )
        said = [(f"{place}.rope_theta", value.get("rope_theta")) for place, value in objects.items()]
        said.insert(1, (f"{self.place}rope_theta", layer.rope_theta))
        advice = None if self.is_theta_settled else f"Settle it with {_SETTLE_THETA}"
        found = self._numbers("rope_theta", said, THETA, advice)
        thetas = list(found)
        theta = thetas[0] if thetas else r.default("rope_theta", None)
        self.theta_place = found.get(theta, self.theta_place)
        self.scaling_place = next(iter(objects), self.scaling_place)
        r.origins["rope_theta"] = "config" if thetas else "default"
        scaling = scalings[0] if scalings else None
        r.origins["rope_scaling"] = "config" if scaling is not None else "default"
        return Rope(float(theta), scaling, partial)

    def _numbers(
        self, key: str, said: Iterable[tuple[str, object]], rule: Value, advice: str | None
    ) -> dict[float, str]:
        """Check the numbers that stand at these places, stock's choice first; with advice, they have to agree.

        Without advice they have been settled in another place, and a wrong one is only what stock stumbles over.

        Returns:
            The good ones, each with the first place that says it.
        """
        found: dict[float, str] = {}
        for place, value in said:
            if value is None or isinstance(value, msgspec.UnsetType):
                continue
            if rule.accepts(value, self.pairs):
                found.setdefault(float(value), place)  # type: ignore[arg-type]
            elif advice is not None:
                self.r.report_value(place, value, rule.expected)
            else:
                self._differ(f"stock reads {key} as it stands, which eagle3_ext replaces")
        if len(found) > 1 and advice is not None:
            self.r.folder.add(
                "warning",
                "rope_clash",
                list(found.values())[-1],
                f"got {', '.join(f'{number:g}' for number in found)} at different places; expected one {key}. "
                f"{next(iter(found)):g} was taken. {advice}",
            )
        return found

    def _flat(self, place: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse an object per layer type, and go on with what stands beside them."""
        known = {key for keys in self.kinds.values() for key in keys}
        known |= {"rope_type", "type", *BESIDE}
        nested = [key for key, inner in value.items() if isinstance(inner, Mapping) and key not in known]
        if nested and self.is_settled:
            self._differ("stock reads the config's scaling as it stands, which eagle3_ext replaces")
        elif nested and not any(finding.code == "rope_per_layer_type" for finding in self.r.folder.findings):
            self.r.folder.add(
                "error",
                "rope_per_layer_type",
                place,
                f"got one object per layer type ({shown(nested)}); expected one rope for the draft. "
                'Set "eagle3_ext": {"rope_theta": ..., "rope_scaling": ...}.',
            )
        return {key: inner for key, inner in value.items() if key not in nested}

    def _partial(self, objects: Mapping[str, Mapping[str, Any]]) -> tuple[float, str]:
        """Read the share of a head that is rotated, and where it stands."""
        key, stocks = "partial_rotary_factor", self.r.layer.partial_rotary_factor
        said = [
            (f"{self.place}{key}", stocks),
            *((f"{place}.{key}", value.get(key)) for place, value in objects.items()),
        ]
        advice = "Remove what training did not use."
        own = self._numbers(key, [(f"{self.own_place}.{key}", self.own.get(key))], SHARE, advice)
        stored = self._numbers(key, said, SHARE, None if own else advice)
        share, place = next(iter((own or stored or {1.0: f"{self.place}{key}"}).items()))
        if share != (1.0 if stocks is None else stocks):
            part = "whole heads" if stocks is None else f"{stocks:g} of a head"
            self._differ(f"stock turns {part}, since it reads {key} at the top level only")
        return share, place

    def _count_pairs(self, partial: float, place: str) -> None:
        """Count the pairs of a head that are rotated."""
        if self.latent is not None or self.pairs is None:
            return
        width = int(self.head_dim * partial)
        self.pairs = width // 2
        if width % 2 or not width:
            self.r.report_value(
                f"{self.place}head_dim" if partial == 1.0 else place,
                self.head_dim if partial == 1.0 else partial,
                f"one with which an even number of elements of a head is rotated, not {width} of {self.head_dim}",
            )

    def _scaling(self, stored: Mapping[str, Any], place: str) -> Mapping[str, Any] | None:
        """Bring a scaling object into the ``rope_type`` spelling, with values that can be computed with.

        Returns:
            ``None`` where it scales nothing, and where what it says has been reported as wrong.
        """
        r, length = self.r, self.r.layer.original_max_position_embeddings
        said = {key: value for key, value in stored.items() if value is not None}
        named = [said.pop(key) for key in ("rope_type", "type") if key in said]
        kind = named[0] if named else "default"
        if len({spell(ALIASES.get(str(name), name)) for name in named}) > 1 and not self._is_set_aside(place):
            settle = 'Settle it with "eagle3_ext": {"rope_scaling": ...}.'
            r.folder.add(
                "warning",
                "rope_clash",
                f"{place}.type",
                f"got {spell(named[1])} beside rope_type {spell(kind)}; expected both to agree. rope_type was taken, "
                f"as stock does. {'Remove one of the two.' if place == self.own_place else settle}",
            )
        base = "default" if kind == "mrope" and self.latent is None else kind
        if not isinstance(kind, str) or base not in self.kinds:
            if self._is_set_aside(place):
                self._differ("stock reads the config's scaling as it stands, which eagle3_ext replaces")
            else:
                r.folder.add(
                    "error",
                    "rope_type",
                    place,
                    f"got rope_type {kind!r}{' for latent attention' if self.latent else ''}; expected one of "
                    f'{", ".join(self.kinds)}. Correct the key, or set "eagle3_ext": {{"rope_scaling": ...}}.',
                )
            return None
        keys, inner = self.kinds[base], said.get(_LENGTH_KEY)
        places = {key: f"{place}.{key}" for key in keys}
        if _LENGTH_KEY in keys and length is not None and (place != self.own_place or inner is None):
            # The config's own key has the last word, in stock and in transformers.
            said[_LENGTH_KEY] = length
            places[_LENGTH_KEY] = f"{self.place}{_LENGTH_KEY}"
            if inner not in (None, length) and not self._is_set_aside(place):
                r.folder.add(
                    "warning",
                    "rope_clash",
                    f"{place}.{_LENGTH_KEY}",
                    f"got {spell(inner)} beside {length} at the top level; expected one. {length} was taken, as stock "
                    "does. Remove what training did not use.",
                )
        if kind == "default" and place != self.own_place:
            self._leave_out_sections(said, place)
        absent = [key for key in NEEDS.get(kind, ()) if key not in said]
        wrong = {key for key, rule in keys.items() if key in said and not rule.accepts(said[key], self.pairs)}
        # Null is false to who asks for the key, and not for its absence.
        wrong |= {key for key, rule in keys.items() if rule is TRUE and stored.get(key, True) is None}
        if self._is_set_aside(place) and (
            absent or wrong or self._disorder({key: said[key] for key in said if key in keys})
        ):
            self._differ("stock reads the config's scaling as it stands, which eagle3_ext replaces")
            return None
        if absent:
            r.folder.add(
                "error",
                "rope_type",
                place,
                f"got rope_type {kind!r} without {', '.join(absent)}; expected these keys. Add them.",
            )
        for key in sorted(wrong):
            self._refuse(places[key], said.get(key), keys[key].expected.format(pairs=self.pairs or "N"))
        scaling: dict[str, Any] = {"rope_type": base}
        scaling |= {key: _computed(said[key], rule) for key, rule in keys.items() if key in said and key not in wrong}
        scaling = {key: value for key, value in scaling.items() if keys.get(key) not in (TRUE, FALSE)}
        if base == "linear" and isinstance(said.get("factor"), int) and place != self.own_place:
            self._differ("stock stops at a linear factor that is written as a whole number")
        if base == "yarn" and self.latent is None and ("mscale" in scaling) != ("mscale_all_dim" in scaling):
            # Read only together, by stock and by transformers.
            keys = {key: rule for key, rule in keys.items() if key not in ("mscale", "mscale_all_dim")}
            scaling = {key: value for key, value in scaling.items() if key == "rope_type" or key in keys}
        self._report_unread(place, kind, sorted(set(said) - set(keys) - BESIDE))
        if absent or wrong:
            return None
        if disorder := self._disorder(scaling):
            low, bound, high, most = disorder
            r.report_value(f"{place}.{low}", bound, f"a number of at most {high}, which is {most:g}")
            return None
        if base == "default" and "mrope_section" not in scaling:
            return None
        lost = [key for key in NOT_STOCKS.get(base, ()) if key in scaling]
        lost += ["yarn beside mrope_section"] if base == "yarn" and "mrope_section" in scaling else []
        if lost:
            self._differ(f"stock does not read {', '.join(lost)} of the rotary embedding")
        if base in ("yarn", "deepseek_yarn", "longrope"):
            scaling.setdefault(_LENGTH_KEY, self.max_positions)
        return scaling

    @staticmethod
    def _disorder(scaling: Mapping[str, Any]) -> tuple[str, float, str, float] | None:
        """Find a pair of keys that bound a range, the lower one above the upper one."""
        for low, high, least, most in ORDERED:
            bounds = scaling.get(low, least), scaling.get(high, most)
            if (low in scaling or high in scaling) and bounds[0] > bounds[1]:
                return low, bounds[0], high, bounds[1]
        return None

    def _leave_out_sections(self, said: dict[str, Any], place: str) -> None:
        """Take the plain rotation where sections that were made for another head stand beside kind ``default``."""
        sections = said.get("mrope_section")
        is_other = is_list(sections, is_count) and len(sections) == 3 and sum(sections) != self.pairs  # type: ignore[arg-type]
        if self.pairs is None or self.latent is not None or not is_other:
            return
        del said["mrope_section"]
        if not self._is_set_aside(place):
            self.r.folder.add(
                "warning",
                "rope_clash",
                f"{place}.mrope_section",
                f"got {spell(sections)} beside heads of which {self.pairs} pairs are rotated; expected three positive "
                f"integers with the sum {self.pairs}. The plain rotation was taken, which is the same over text. "
                'Settle it with "eagle3_ext": {"rope_scaling": ...}.',
            )

    def _report_unread(self, place: str, kind: str, unread: list[str]) -> None:
        if not unread:
            return
        self.r.folder.add(
            "info",
            "unread_keys",
            place,
            f"got {shown(unread, 12)}, which nothing reads with rope_type {kind!r}; expected keys of this kind. Check "
            "that none of them changes what the draft computes.",
        )
        if stocks := [key for key in unread if key in STOCKS_OWN]:
            self._differ(f"stock reads {', '.join(stocks)} of the rotary embedding, which no trainer does")

    # ---- what was trained ------------------------------------------------------------------------------------

    def _trained(self, stored: Rope) -> Rope:
        """Take what the trainer made of the keys, where it is known for not reading all of them."""
        r, declared = self.r, self.r.folder.declared
        name = r.ext.producer if isinstance(r.ext.producer, str) else r.dialect.producer
        producer = PRODUCERS.get(name or "")
        severity: Severity = "info" if declared.producer is not None else "warning"
        rope = stored if self.is_settled else self._undo_dynamic(stored, producer, str(name), severity)
        if producer is not None and self.latent is None:
            self._note_unclear_theta(stored, rope, producer, str(name))
        kind = _kind(stored)
        if producer is None and r.dialect.architecture == "LlamaForCausalLM":
            self._note_eagles_theta(stored, kind)
        if producer is not None and producer.scalings and kind not in ("none", *producer.scalings):
            if not self.is_settled:
                self._note_unknown_kind(kind, str(name), producer)
            return rope
        if producer is None or "mrope_section" in (rope.scaling or {}):
            return rope
        if not producer.reads_mscale and self.latent is not None:
            return self._without_mscale(rope, str(name))
        if producer.reads_rope_theta or rope.theta == _BASE:
            return rope
        r.origins["rope_theta"] = declared.origins.get("producer", "default")
        if "rope_theta" not in declared.origins:
            r.folder.add(
                severity,
                "rope_not_as_written",
                self.theta_place,
                f"got {stored.theta:g}, which {name} does not read in training; {_BASE:g} was taken. If this draft was "
                f"trained otherwise, set {_SETTLE_THETA}",
            )
        return replace(rope, theta=_BASE)

    def _undo_dynamic(self, rope: Rope, producer: Producer | None, name: str, severity: Severity) -> Rope:
        """Take the one base that dynamic scaling comes to over all positions that a draft was trained on.

        transformers changes the base only beyond ``max_position_embeddings``, and so do the trainers whose table of
        rotations ends there (AngelSlim). SpecForge's and TorchSpec's is longer, so that their base is stretched at
        every position; SGLang stretches it at every position by another power.
        """
        scaling = rope.scaling
        if scaling is None or scaling["rope_type"] != "dynamic":
            return rope
        r, length = self.r, max(self.max_positions, 1)
        longest = max(trainer.table_beyond for trainer in PRODUCERS.values())
        beyond = longest if producer is None else producer.table_beyond
        if not beyond and scaling["factor"] == scaling.get("alpha", 1.0) == 1.0:
            return replace(rope, scaling=None)
        stretched = self._stretched(rope.theta, 1.0 + scaling["factor"] * beyond / length)
        stocks = self._stretched(rope.theta, _stocks_stretch(scaling))
        everywhere = f'stretched everywhere, as stock has it, set "eagle3_ext": {{"rope_theta": {stocks:.9g}}}.'
        beyond_reading = (
            f" No reading is known beyond {length} positions: serve with --context-length {length} to rule them out."
        )
        if self.is_theta_settled:
            what = "in the place of which eagle3_ext has the base that it comes to."
        elif producer is None:
            names = " and ".join(key for key, trainer in PRODUCERS.items() if trainer.table_beyond)
            what = (
                f"which transformers does not apply up to max_position_embeddings; theta {rope.theta:g} and no scaling "
                f"were taken. {names} train with a base stretched to {stretched:.9g} at every position: for their "
                f'drafts set "eagle3_ext": {{"rope_theta": {stretched:.9g}}}, or name the producer. If this draft was '
                f"trained with a base that is {everywhere}"
            )
        elif beyond:
            what = (
                f"which {name} applies to the {length + beyond} positions of its table; theta {stretched:.9g} and no "
                f'scaling were taken. If this draft was trained with the base as written, set "eagle3_ext": '
                f'{{"rope_theta": {rope.theta:.9g}}}; with one {everywhere}'
            )
        else:
            what = "which scales nothing up to max_position_embeddings in training; none was taken."
            if stocks != rope.theta:
                what += f" If this draft was trained with a base that is {everywhere}"
        origin = r.folder.declared.origins.get("producer", "default")
        r.origins["rope_scaling"] = origin
        if producer is not None and beyond:
            r.origins["rope_theta"] = origin
        r.folder.add(
            "info" if self.is_theta_settled else severity,
            "rope_not_as_written",
            self.scaling_place,
            f"got {spell(dict(scaling))}, {what}{beyond_reading}",
        )
        return replace(rope, theta=rope.theta if producer is None else stretched, scaling=None)

    def _refuse_dynamic(self, theta: float, scaling: Mapping[str, Any]) -> None:
        """Refuse dynamic scaling as an author's last word, since there are three readings of it."""
        # By how much hangs on the number of pairs.
        stocks = "..." if self.pairs is None else f"{self._stretched(theta, _stocks_stretch(scaling)):.9g}"
        self.r.folder.add(
            "error",
            "rope_type",
            self.own_place,
            "got rope_type 'dynamic', which trainers and stock read differently; expected the stretched rope_theta. "
            f'As stock does it, set "eagle3_ext": {{"rope_theta": {stocks}, "rope_scaling": null}}.',
        )

    def _stretched(self, theta: float, by: float) -> float:
        """Stretch a base so that the slowest pair turns that much slower, as dynamic scaling does (NTK-aware)."""
        width = 2 * (self.pairs or 0)
        if width <= 2:
            return theta
        # Factors are bounded, so that only a base that is absurd by itself could leave the range of floats.
        return min(float(theta * by ** (width / (width - 2))), sys.float_info.max)

    def _note_unclear_theta(self, stored: Rope, rope: Rope, producer: Producer, name: str) -> None:
        """Name both bases where versions of a trainer are known not to hand ``rope_theta`` to this kind of scaling."""
        kind = _kind(stored)
        if self.is_settled or self.is_theta_settled or stored.theta == _BASE or kind not in producer.theta_unclear:
            return
        other = rope.theta / stored.theta * _BASE
        self.r.folder.add(
            "warning",
            "rope_not_as_written",
            self.theta_place,
            f"got {stored.theta:g}, in whose place versions of {name} train with {_BASE:g} under "
            f"{'no scaling' if kind == 'none' else f'rope_type {kind!r}'}; {rope.theta:.9g} was taken. Settle it with "
            f'"eagle3_ext": {{"rope_theta": {rope.theta:.9g}}}, or {other:.9g} for the other reading.',
        )

    def _note_unknown_kind(self, kind: str, name: str, producer: Producer) -> None:
        """Say that a trainer's code has no such scaling, so that another one's must have trained the draft."""
        self.r.folder.add(
            "warning",
            "rope_not_as_written",
            self.scaling_place,
            f"got rope_type {kind!r}, which {name} has no code for; expected {' or '.join(producer.scalings)}. Base "
            "and scaling were taken as they are written; check who trained the draft, or settle them in eagle3_ext.",
        )

    def _note_eagles_theta(self, stored: Rope, kind: str) -> None:
        """Name both bases of the EAGLE repository's layout, whose training code knows one base only."""
        # With a scaling that its code does not have, someone else's trained the draft.
        if self.is_theta_settled or stored.theta == _BASE or kind not in ("none", *PRODUCERS["eagle"].scalings):
            return
        reads = "trains" if kind == "none" else "trains and infers"
        but = " and infers with what stands there" if kind == "none" else ""
        self.r.folder.add(
            "warning",
            "rope_not_as_written",
            self.theta_place,
            f"got {stored.theta:g} in the layout of the EAGLE repository, whose code {reads} with {_BASE:g} whatever "
            f"stands there{but}; {stored.theta:g} was taken, as stock does. For the other reading set "
            '"eagle3_ext": {"producer": "eagle"}, else settle it with {"rope_theta": ...}.',
        )

    def _without_mscale(self, stored: Rope, producer: str) -> Rope:
        """Take the scaling of an MLA draft whose trainer stretches angles as yarn does and scales nothing else."""
        r, scaling = self.r, stored.scaling
        if scaling is None or scaling["rope_type"] not in ("yarn", "deepseek_yarn"):
            return stored
        # Zero is how yarn spells a factor of one.
        trained = {**scaling, "mscale": 0.0, "mscale_all_dim": 0.0}
        if trained == scaling:
            return stored
        declared = r.folder.declared
        r.origins["rope_scaling"] = declared.origins.get("producer", "default")
        if not self.is_settled:
            r.folder.add(
                "info" if declared.producer is not None else "warning",
                "rope_not_as_written",
                self.scaling_place,
                f"got {spell(dict(scaling))}, of which {producer} reads neither mscale nor mscale_all_dim in training; "
                'both were taken as 0. If this draft was trained otherwise, set "eagle3_ext": {"rope_scaling": ...}.',
            )
        return replace(stored, scaling=trained)

    # ---- latent attention ------------------------------------------------------------------------------------

    def _latent_rope(self, rope: Rope, keys: LatentConfig) -> Rope:
        """Settle which elements are rotated together, and check what latent attention cannot do."""
        r, place, scaling = self.r, self.place, rope.scaling or {}
        if rope.partial_rotary_factor != 1.0:
            r.report_value(
                f"{place}partial_rotary_factor",
                rope.partial_rotary_factor,
                "1 or nothing, since qk_rope_head_dim says how much of a head is rotated",
            )
        factors = {key: scaling.get(key) for key in ("mscale", "mscale_all_dim")}
        absent = [key for key, value in factors.items() if value is None]
        if len(absent) == 1:
            r.folder.add(
                "warning",
                "rope_mscale",
                f"{place}rope_scaling",
                f"got mscale {factors['mscale']} and mscale_all_dim {factors['mscale_all_dim']}; expected both or "
                "neither. The absent one was taken as mscale 1 and mscale_all_dim 0, as stock does; transformers "
                "ignores the other one as well. Write both.",
            )
        if not r.dialect.rope_halves:
            r.origins["rope_interleave"] = "default" if keys.rope_interleave is None else "config"
            if keys.rope_interleave is False:
                r.differences.append("stock rotates halves of a head with CUDA only")
            return replace(rope, interleaved=keys.rope_interleave is not False)
        r.origins["rope_interleave"] = "weights"
        if keys.rope_interleave is not False:
            r.folder.add(
                "warning" if keys.rope_interleave else "info",
                "rope_halves",
                f"{place}rope_interleave",
                f"got {keys.rope_interleave!r} beside a tensor kv_a_proj; this is TorchSpec's name from when it "
                "rotated element i with element i + width / 2, and the draft is read so. If training rotated "
                "neighbours, rename the tensor to kv_a_proj_with_mqa.",
            )
            r.differences.append("stock rotates neighbouring elements together")
        return replace(rope, interleaved=False)


def _scaling_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what stands in a scaling object and scales nothing, and spell its kind in one way."""
    kind = {"rope_type": value.get("rope_type", value.get("type"))}
    return kind | {key: inner for key, inner in value.items() if key not in {"rope_type", "type", *BESIDE}}


def _kind(rope: Rope) -> str:
    """Name the kind of scaling of a rotation, ``none`` where it has none."""
    if rope.scaling is None:
        return "none"
    kind: str = rope.scaling["rope_type"]
    return "mrope" if kind == "default" else kind


def _stocks_stretch(scaling: Mapping[str, Any]) -> float:
    """Say by how much stock stretches the base of a dynamic scaling, as SGLang's ``get_rope`` builds it."""
    factor = scaling["factor"]
    return float(scaling.get("alpha", factor * factor - (factor - 1)))


def _computed(value: Any, rule: Value) -> Any:
    """Return numbers as the floats that are computed with, since SGLang takes some whole ones for another kind."""
    if rule in (STRETCH, FACTOR, WEIGHT):
        return float(value)
    return [float(part) for part in value] if rule is FACTORS else value
