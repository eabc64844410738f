"""The draft's rotary embedding, in the three spellings that configs use, and as latent attention has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from sglang_eagle3_ext.formats.eagle3_ext import PRODUCERS
from sglang_eagle3_ext.formats.reading import LatentConfig, Reading
from sglang_eagle3_ext.spec import Rope

_BASE = 10000.0
"""The base of the rotary embedding where nothing says another."""

_ROPE_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "default": (),
    "linear": (("factor",),),
    "dynamic": (("factor", "alpha"),),
    "yarn": (("factor",),),
    "deepseek_yarn": (("factor",),),
    "llama3": (
        ("factor",),
        ("low_freq_factor",),
        ("high_freq_factor",),
        ("original_max_position_embeddings",),
    ),
    "longrope": (("short_factor",), ("long_factor",)),
    "su": (("short_factor",), ("long_factor",)),
}
"""Kinds of rope scaling and, for each, the keys it needs (of a group, one)."""

_LATENT_KINDS = ("default", "yarn", "deepseek_yarn")
"""Kinds that latent attention can be served with: SGLang takes every other for yarn."""


def read_rope(r: Reading) -> Rope:
    declared = r.folder.declared
    stored = _stored_rope(r)
    trained = _trained(r, stored)
    theta, scaling = trained.theta, trained.scaling
    if not isinstance(r.ext.rope_theta, msgspec.UnsetType):
        theta = float(r.ext.rope_theta)
        r.origins["rope_theta"] = declared.origins["rope_theta"]
    if not isinstance(r.ext.rope_scaling, msgspec.UnsetType):
        scaling = _scaling(r, r.ext.rope_scaling, "config.json:eagle3_ext.rope_scaling")
        r.origins["rope_scaling"] = declared.origins["rope_scaling"]
    if (theta, scaling) != (stored.theta, stored.scaling):
        r.differences.append(f"stock turns the rotary embedding with theta {stored.theta:g} and the config's scaling")
    rope = Rope(theta, scaling, stored.partial_rotary_factor)
    return rope if r.dialect.latent is None else _latent_rope(r, rope, r.dialect.latent)


def _latent_rope(r: Reading, rope: Rope, keys: LatentConfig) -> Rope:
    """Settle which elements are rotated together, and check what latent attention cannot do."""
    place, scaling = r.dialect.layer_place, rope.scaling or {}
    kind = "mrope" if "mrope_section" in scaling else scaling.get("rope_type", "default")
    if isinstance(kind, str) and kind not in _LATENT_KINDS:
        r.folder.add(
            "error",
            "rope_type",
            f"{place}rope_scaling",
            f"got rope_type {kind!r} for latent attention; expected one of {', '.join(_LATENT_KINDS)}. Such a draft "
            "cannot be served.",
        )
    if rope.partial_rotary_factor != 1.0:
        r.report_value(
            f"{place}partial_rotary_factor",
            rope.partial_rotary_factor,
            "1 or nothing, since qk_rope_head_dim says how much of a head is rotated",
        )
    factors = {key: scaling.get(key) for key in ("mscale", "mscale_all_dim")}
    odd = {key: value for key, value in factors.items() if not isinstance(value, int | float | None)}
    for key, value in odd.items():
        r.report_value(f"{place}rope_scaling.{key}", value, "a number")
    absent = [key for key, value in factors.items() if value is None]
    if len(absent) == 1 and kind in ("yarn", "deepseek_yarn"):
        r.folder.add(
            "warning",
            "rope_mscale",
            f"{place}rope_scaling",
            f"got mscale {factors['mscale']} and mscale_all_dim {factors['mscale_all_dim']}; expected both or neither. "
            "The absent one was taken as mscale 1 and mscale_all_dim 0, as stock does; transformers ignores the other "
            "one as well. Write both.",
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
            f"got {keys.rope_interleave!r} beside a tensor kv_a_proj; this is TorchSpec's name from when it rotated "
            "element i with element i + width / 2, and the draft is read so. If training rotated neighbours, rename "
            "the tensor to kv_a_proj_with_mqa.",
        )
        r.differences.append("stock rotates neighbouring elements together")
    return replace(rope, interleaved=False)


def _trained(r: Reading, stored: Rope) -> Rope:
    """Take what the trainer made of the keys, where it is known for not reading all of them."""
    declared, scaling = r.folder.declared, stored.scaling
    name = r.ext.producer if isinstance(r.ext.producer, str) else r.dialect.producer
    producer = PRODUCERS.get(name or "")
    if producer is None or "mrope_section" in (scaling or {}):
        return stored
    if not producer.reads_mscale and r.dialect.latent is not None:
        return _without_mscale(r, stored, str(name))
    if producer.reads_rope_theta:
        return stored
    if scaling is not None and scaling["rope_type"] == "dynamic":
        # Its trainer goes by the factor alone, and a factor of one scales nothing.
        scaling = {key: value for key, value in scaling.items() if key != "alpha"}
        scaling = None if scaling.get("factor") in (None, 1) else scaling
    trained = Rope(_BASE, scaling, stored.partial_rotary_factor)
    if trained == stored:
        return stored
    for key, changed in (("rope_theta", stored.theta != _BASE), ("rope_scaling", scaling != stored.scaling)):
        if changed:
            r.origins[key] = declared.origins.get("producer", "default")
    if "rope_theta" not in declared.origins:
        r.folder.add(
            "info" if declared.producer is not None else "warning",
            "rope_not_as_written",
            f"{r.dialect.layer_place}rope_theta",
            f"got {stored.theta:g} with scaling {stored.scaling}, which {name} does not read in training; theta "
            f"{_BASE:g} with scaling {scaling} was taken. If this draft was trained otherwise, set "
            '"eagle3_ext": {"rope_theta": ...}.',
        )
    return trained


def _without_mscale(r: Reading, stored: Rope, producer: str) -> Rope:
    """Take the scaling of an MLA draft whose trainer stretches angles as yarn does and scales nothing else."""
    scaling = stored.scaling
    if scaling is None or scaling["rope_type"] not in ("yarn", "deepseek_yarn"):
        return stored
    # Zero is how yarn spells a factor of one.
    trained = {**scaling, "mscale": 0.0, "mscale_all_dim": 0.0}
    if trained == scaling:
        return stored
    declared = r.folder.declared
    r.origins["rope_scaling"] = declared.origins.get("producer", "default")
    if "rope_scaling" not in declared.origins:
        r.folder.add(
            "info" if declared.producer is not None else "warning",
            "rope_not_as_written",
            f"{r.dialect.layer_place}rope_scaling",
            f"got {dict(scaling)}, of which {producer} reads neither mscale nor mscale_all_dim in training; both were "
            'taken as 0. If this draft was trained otherwise, set "eagle3_ext": {"rope_scaling": ...}.',
        )
    return replace(stored, scaling=trained)


def _stored_rope(r: Reading) -> Rope:
    """Read the three spellings of rope; where two of them disagree, stock's choice is kept and reported."""
    layer, place = r.layer, r.dialect.layer_place
    new = layer.rope_parameters
    old = layer.rope_scaling
    if new is not None and any(isinstance(value, Mapping) for value in new.values()):
        r.folder.add(
            "error",
            "rope_per_layer_type",
            f"{place}rope_parameters",
            f"got one object per layer type ({', '.join(new)}); expected one rope for the draft. "
            'Set "eagle3_ext": {"rope_theta": ..., "rope_scaling": ...}.',
        )
        new = {key: value for key, value in new.items() if not isinstance(value, Mapping)}
    scaling = _scaling(
        r,
        new if new is not None else old,
        f"{place}{'rope_parameters' if new is not None else 'rope_scaling'}",
    )
    if new is not None and old is not None and _scaling(r, old, f"{place}rope_scaling") != scaling:
        r.folder.add(
            "warning",
            "rope_clash",
            f"{place}rope_parameters",
            f"got {new} beside rope_scaling {old}; expected both to agree. The first was taken, as stock does. "
            'Settle it with "eagle3_ext": {"rope_scaling": ...}.',
        )
    inner = [
        float(part["rope_theta"])
        for part in (new, old)
        if part is not None and isinstance(part.get("rope_theta"), int | float)
    ]
    thetas = [*inner, *([layer.rope_theta] if layer.rope_theta is not None else [])]
    if len(set(thetas)) > 1:
        r.folder.add(
            "warning",
            "rope_clash",
            f"{place}rope_theta",
            f"got {', '.join(f'{t:g}' for t in thetas)} at different places; expected one. {thetas[0]:g} was taken. "
            'Settle it with "eagle3_ext": {"rope_theta": ...}.',
        )
    theta = float(r.default("rope_theta", thetas[0] if thetas else None))
    r.origins["rope_scaling"] = "config" if scaling is not None else "default"
    partial = layer.partial_rotary_factor
    if partial is None and new is not None and isinstance(new.get("partial_rotary_factor"), int | float):
        partial = float(new["partial_rotary_factor"])
        if partial != 1.0:
            r.differences.append("stock turns whole heads, since partial_rotary_factor stands in rope_parameters")
    if partial is not None and not 0 < partial <= 1:
        r.report_value(f"{place}partial_rotary_factor", partial, "a share of the head, above 0 and at most 1")
    return Rope(theta, scaling, 1.0 if partial is None else float(partial))


def _scaling(r: Reading, stored: Mapping[str, Any] | None, place: str) -> Mapping[str, Any] | None:
    """Bring a scaling object into the ``rope_type`` spelling; ``None`` where it changes nothing."""
    if stored is None:
        return None
    scaling = {
        key: value for key, value in stored.items() if key not in ("rope_theta", "partial_rotary_factor", "type")
    }
    kind = scaling.setdefault("rope_type", stored.get("type", "default"))
    if kind == "default" and set(scaling) == {"rope_type"}:
        return None
    if kind == "mrope":
        scaling["rope_type"] = "default"
    elif not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        r.folder.add(
            "error",
            "rope_type",
            place,
            f"got rope_type {kind!r}; expected one of {', '.join(_ROPE_NEEDS)}. Correct the key, or set "
            '"eagle3_ext": {"rope_scaling": ...}.',
        )
    else:
        needed = _ROPE_NEEDS[kind]
        absent = ["/".join(keys) for keys in needed if not any(scaling.get(k) is not None for k in keys)]
        odd = [k for keys in needed for k in keys if not isinstance(scaling.get(k), int | float | list | None)]
        if absent or odd:
            wrong = " and ".join(
                [f"without {', '.join(absent)}"] * bool(absent) + [f"with {scaling[k]!r} as {k}" for k in odd]
            )
            r.folder.add(
                "error",
                "rope_type",
                place,
                f"got rope_type {kind!r} {wrong}; expected these keys to be numbers. Add or correct them.",
            )
    return scaling
