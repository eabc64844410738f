"""The kinds of rotary scaling that are served, the keys of each and what they may hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_eagle3_ext.formats.reading import LONGEST


class Value(NamedTuple):
    """What a key of a scaling object may hold.

    Attributes:
        expected: in words; ``{pairs}`` stands for the number of pairs that are rotated.
        accepts: says so of a value, given the number of pairs, ``None`` where that is unknown.
    """

    expected: str
    accepts: Callable[[Any, int | None], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MOST = 1e6
"""What a factor or weight is at most, and one over it at least; beyond, powers and logarithms of it overflow."""


def is_list(value: object, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(accepts, value))


def _is_factor(value: Any) -> bool:
    return _is_number(value) and 1 / _MOST <= value <= _MOST


def is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LONGEST


# A table of positions that is longer than this many times the trained one fits into no memory.
STRETCH = Value("a number from 1 to 1048576", lambda v, _: _is_number(v) and 1 <= v <= 2**20)
FACTOR = Value(f"a number above 0, from {1 / _MOST:g} to {_MOST:g}", lambda v, _: _is_factor(v))
WEIGHT = Value(f"a number of at least 0, up to {_MOST:g}", lambda v, _: _is_number(v) and 0 <= v <= _MOST)
_LENGTH = Value(f"an integer from 2 to {LONGEST}", lambda v, _: is_count(v, 2))
_FLAG = Value("true or false", lambda v, _: isinstance(v, bool))
TRUE = Value("true or nothing, since nothing here computes the other one", lambda v, _: v is True)
FALSE = Value("false or nothing, since nothing here computes the other one", lambda v, _: v is False)
_NOTHING = Value("nothing, since nothing here computes it with latent attention", lambda v, _: False)
FACTORS = Value(
    f"{{pairs}} numbers above 0, from {1 / _MOST:g} to {_MOST:g}, one for each rotated pair",
    lambda v, n: is_list(v, _is_factor) and n in (None, len(v)),
)
_SECTIONS = Value(
    "three positive integers with the sum {pairs}, the number of rotated pairs",
    lambda v, n: is_list(v, is_count) and len(v) == 3 and n in (None, sum(v)),
)

# With a base of one every pair turns alike, and yarn divides by its logarithm.
THETA = Value("a number above 1", lambda v, _: _is_number(v) and 1 < v <= sys.float_info.max)
SHARE = Value("a share of the head, above 0 and at most 1", lambda v, _: _is_number(v) and 0 < v <= 1)

MROPE = {"mrope_section": _SECTIONS, "mrope_interleaved": _FLAG, "mrope_interleaved_glm": _FLAG, "video_rope": FALSE}
_YARN = {
    "factor": STRETCH,
    "original_max_position_embeddings": _LENGTH,
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "mscale": WEIGHT,
    "mscale_all_dim": WEIGHT,
}

KINDS: dict[str, dict[str, Value]] = {
    "default": MROPE | {"use_fope": FALSE},
    "linear": {"factor": STRETCH},
    "dynamic": {"factor": STRETCH, "alpha": FACTOR},
    "yarn": _YARN | MROPE | {"attention_factor": FACTOR, "truncate": _FLAG},
    "llama3": {
        "factor": STRETCH,
        "low_freq_factor": FACTOR,
        "high_freq_factor": FACTOR,
        "original_max_position_embeddings": _LENGTH,
    },
    "longrope": {
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "factor": STRETCH,
        "attention_factor": FACTOR,
        "original_max_position_embeddings": _LENGTH,
    },
}
"""Kinds of scaling that are served, and their keys. Whatever else stands in the object is reported as unread."""

_LATENT_YARN = _YARN | {
    "mrope_section": _NOTHING,
    "attention_factor": _NOTHING,
    "truncate": TRUE,
    "apply_yarn_scaling": TRUE,
    "apply_scale": TRUE,
}
LATENT_KINDS: dict[str, dict[str, Value]] = {
    "default": {"mrope_section": _NOTHING},
    "yarn": _LATENT_YARN,
    "deepseek_yarn": _LATENT_YARN,
}
"""The same for latent attention: SGLang takes every other kind for yarn."""

NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "deepseek_yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
    "mrope": ("mrope_section",),
}
"""Keys without which a kind says nothing."""

BESIDE = {"rope_theta", "partial_rotary_factor"}
"""Keys that may stand in a scaling object and are no part of it."""

ALIASES = {"mrope": "default", "deepseek_yarn": "yarn"}
"""Kinds that turn as another one does."""

ORDERED = (("low_freq_factor", "high_freq_factor", 1.0, 4.0), ("beta_slow", "beta_fast", 1.0, 32.0))
"""Keys of which the first may not be above the second, and what they are without the key."""

NOT_STOCKS = {"yarn": ("attention_factor",), "longrope": ("attention_factor", "factor")}
"""Keys of a kind that stock does not read."""

STOCKS_OWN = ("attn_factor", "extrapolation_factor", "short_mscale", "long_mscale")
"""Keys that stock reads and no trainer does."""
