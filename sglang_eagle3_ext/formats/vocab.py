"""The draft's vocabulary, its map to the target's, its embedding and its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from sglang_eagle3_ext.formats.reading import IGNORED, Reading
from sglang_eagle3_ext.spec import Vocab


def read_vocab(r: Reading, vocab_size: int) -> Vocab:
    d, ext = r.dialect, r.ext
    r.origins["draft_vocab_size"] = "config"
    draft = d.draft_vocab_size
    if draft is None:
        rows = [shape[0] for name in ("lm_head.weight", "d2t") if (shape := r.shape(name)) and shape[0] > 0]
        draft = rows[0] if rows else vocab_size
        r.origins["draft_vocab_size"] = "weights" if rows else "default"
    r.origins["vocab_map"] = "default"
    has_map = "d2t" in r.by_canonical
    kind: Literal["offset", "absolute", "none"] = "offset" if has_map else "none"
    if has_map and not isinstance(ext.vocab_map, msgspec.UnsetType):
        kind = ext.vocab_map
        r.origins["vocab_map"] = r.folder.declared.origins["vocab_map"]
    if kind == "absolute":
        r.differences.append("stock reads d2t as offsets, not as target ids")
    if not isinstance(ext.vocab_map, msgspec.UnsetType) and not has_map:
        r.folder.add(
            "error",
            "vocab_map_missing",
            r.folder.own_place("vocab_map"),
            f"got {ext.vocab_map!r}, and the file has no d2t; expected the map that it speaks of. Remove the key.",
        )
    elif draft != vocab_size and not has_map:
        r.folder.add(
            "error",
            "vocab_map_missing",
            "config.json:draft_vocab_size",
            f"got {draft} of {vocab_size} and no d2t tensor, so that draft ids cannot be turned into target ids; "
            "expected d2t. Export the draft again with its vocabulary map.",
        )
    if draft > vocab_size:
        r.folder.add(
            "error",
            "vocab_rows",
            "config.json:draft_vocab_size",
            f"got {draft} for a target vocabulary of {vocab_size}; expected at most that. Correct the key.",
        )
    return Vocab(vocab_size, draft, kind)


def read_embed(r: Reading, hidden_size: int, target_hidden_size: int) -> Literal["own", "target"]:
    ext, has = r.ext, "embed_tokens.weight" in r.by_canonical
    r.origins["embed"] = "weights"
    if not isinstance(ext.embed, msgspec.UnsetType):
        r.origins["embed"] = r.folder.declared.origins["embed"]
        if ext.embed == "target":
            r.leave_out("embed_tokens.weight")
        value = ext.embed
    else:
        # A target's embedding of another width fits nowhere: the draft needs its own.
        value = "own" if has or target_hidden_size != hidden_size else "target"
    shared = r.dialect.target_hidden_size in (None, hidden_size)
    if value == "own" and shared:
        r.differences.append("stock puts the target's embedding in the place of the draft's own")
    return value


def read_lm_head(
    r: Reading, vocab: Vocab, hidden_size: int, target_hidden_size: int
) -> Literal["own", "target", "tied"]:
    ext, has, tie = r.ext, "lm_head.weight" in r.by_canonical, r.layer.tie_word_embeddings
    r.origins["lm_head"] = "weights"
    full = vocab.draft == vocab.target
    value: Literal["own", "target", "tied"]
    if not isinstance(ext.lm_head, msgspec.UnsetType):
        r.origins["lm_head"] = r.folder.declared.origins["lm_head"]
        value = ext.lm_head
        if value == "target":
            r.leave_out("lm_head.weight")
    elif has:
        value = "own"
    elif tie and full:
        r.origins["lm_head"] = "config"
        value = "tied"
    else:
        value = "target"
    if has and value == "own" and tie:
        r.folder.add(
            "warning",
            "tied_with_head",
            f"{r.dialect.layer_place}tie_word_embeddings",
            "got true beside a stored lm_head.weight; expected false. The stored head is used; correct the key.",
        )
        r.differences.append("stock ties the head to the embedding and drops the stored one")
    if value == "target" and not full:
        r.folder.add(
            "error",
            "head_missing",
            "config.json:draft_vocab_size",
            f"got {vocab.draft} of {vocab.target} without a head of the draft's own; expected lm_head.weight of "
            f"{vocab.draft} rows, which the target's head cannot stand in for. Export the draft again with its head.",
        )
    elif value == "target" and target_hidden_size != hidden_size:
        r.folder.add(
            "error",
            "head_missing",
            "config.json:target_hidden_size",
            f"got {target_hidden_size} for a draft of width {hidden_size} without a head of its own; expected "
            "lm_head.weight, since the target's has another width. Export the draft again with its head.",
        )
    elif value == "target" and not has:
        r.folder.add(
            "info",
            "head_from_target",
            "config.json:draft_vocab_size",
            f"covers the whole vocabulary ({vocab.target}) and the file has no lm_head.weight; the target's head is "
            "used. Nothing to do if the draft was trained so.",
        )
    if value == "target" and r.dialect.draft_vocab_size is not None:
        r.differences.append("stock leaves the head random, since draft_vocab_size is given and no head stored")
    return value


def check_map_values(r: Reading, vocab: Vocab) -> Vocab:
    """Check that the vocabulary map gives every draft token another token of the target.

    Returns:
        The vocabulary, without a map where the stored one changes nothing.
    """
    name = r.by_canonical.get("d2t")
    t2d_name = r.by_canonical.get("t2d")
    t2d = r.integers(t2d_name, vocab.target) if t2d_name else None
    if name is None:
        return vocab
    d2t = r.integers(name, vocab.draft)
    if d2t is None:
        return vocab
    offset = [i + shift for i, shift in enumerate(d2t)]
    targets = offset if vocab.map == "offset" else d2t
    kept = None if t2d is None else {i for i, flag in enumerate(t2d) if flag}
    problem = _map_problem(targets, vocab.target, kept)
    if problem is not None:
        other, other_name = (d2t, "absolute") if vocab.map == "offset" else (offset, "offset")
        fits = _map_problem(other, vocab.target, kept) is None
        advice = (
            f'Read as {other_name} it fits: set "eagle3_ext": {{"vocab_map": "{other_name}"}}.'
            if fits
            else "Export the draft again with its vocabulary map."
        )
        code, text = problem
        r.folder.add(
            "error",
            code,
            f"{r.folder.tensors[name].file}:{name}",
            f"read as {vocab.map}, {text}; expected every draft token to be another token of the target. {advice}",
        )
    elif vocab.draft == vocab.target and targets == list(range(vocab.target)):
        r.folder.add(
            "info",
            "identity_map",
            f"{r.folder.tensors[name].file}:{name}",
            "maps every token to itself; it changes nothing and is left out. Nothing to do.",
        )
        del r.by_canonical["d2t"]
        r.weights[name] = IGNORED + name
        r.by_canonical[IGNORED + name] = name
        r.origins["vocab_map"] = "weights"
        return replace(vocab, map="none")
    return vocab


def _map_problem(targets: Sequence[int], vocab: int, kept: set[int] | None) -> tuple[str, str] | None:
    """Find what is wrong with a vocabulary map: its code and the words for it."""
    outside = [(i, t) for i, t in enumerate(targets) if not 0 <= t < vocab]
    if outside:
        return (
            "vocab_map_range",
            f"draft token {outside[0][0]} becomes {outside[0][1]} of {vocab} target tokens",
        )
    if len(set(targets)) != len(targets):
        seen: set[int] = set()
        twice = next(t for t in targets if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        return "vocab_map_repeats", f"two draft tokens become target token {twice}"
    if kept is not None and kept != set(targets):
        odd = min(kept ^ set(targets))
        return "vocab_map_disagrees", f"d2t and t2d disagree about target token {odd}"
    return None
