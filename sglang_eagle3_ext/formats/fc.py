"""What ``fc`` reads: sources, their number and width, and the norms around it and the draft's state."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_eagle3_ext.formats.reading import IGNORED, Reading
from sglang_eagle3_ext.spec import IdMeaning, Norms, Order, Source


def read_producer(r: Reading) -> str | None:
    if isinstance(r.ext.producer, str):
        r.origins["producer"] = r.folder.declared.origins["producer"]
        return r.ext.producer
    if r.dialect.producer is not None:
        r.origins["producer"] = "config"
    return r.dialect.producer


def read_sources(r: Reading) -> tuple[tuple[Source, ...] | None, Order, IdMeaning]:
    """Settle the sources, the order of their columns and what plain ids mean."""
    d, declared, ext = r.dialect, r.folder.declared, r.ext
    order, layer_ids = d.order, d.layer_ids
    r.origins["order"] = r.origins["layer_ids"] = "default"
    if declared.producer is not None:
        layer_ids, order = declared.producer.layer_ids, declared.producer.order
        r.origins["order"] = r.origins["layer_ids"] = declared.origins["producer"]
    if declared.sources is not None:
        order = "as_listed"
        r.origins["order"] = "default"
    if not isinstance(ext.order, msgspec.UnsetType):
        order = ext.order
        r.origins["order"] = declared.origins["order"]
    if not isinstance(ext.layer_ids, msgspec.UnsetType):
        layer_ids = ext.layer_ids
        r.origins["layer_ids"] = declared.origins["layer_ids"]

    if declared.sources is not None:
        r.origins["sources"] = declared.origins["sources"]
        return declared.sources, order, layer_ids
    if not d.uses_aux:
        r.origins["sources"] = "config"
        return (Source("final_norm", None, "final_norm"),), order, layer_ids
    if d.ids is None:
        r.origins["sources"] = "default"
        return None, order, layer_ids
    r.origins["sources"] = "config"
    if list(d.ids) != sorted(d.ids):
        how = "in that order" if order == "as_listed" else "in ascending order, as engines emit them"
        r.folder.add(
            "warning",
            "unsorted_ids",
            d.ids_place,
            f"got {list(d.ids)}, which is not ascending; the columns of fc were taken {how}. "
            'Settle it with "eagle3_ext": {"order": "as_listed"} or "ascending".',
        )
    return tuple(Source("id", i, f"id {i}") for i in d.ids), order, layer_ids


def read_fc(r: Reading, hidden_size: int, sources: tuple[Source, ...] | None) -> tuple[int, int, int | None]:
    """Settle the number of sources, their width and the input width of ``fc``."""
    d, declared = r.dialect, r.folder.declared
    shape = r.shape("fc.weight")
    width = d.target_hidden_size or hidden_size
    r.origins["target_hidden_size"] = "config" if d.target_hidden_size else r.origins["hidden_size"]
    # Without fc there is one source, and a declaration may say so.
    says_so = shape is None and [s.kind for s in declared.sources or ()] == ["final_norm"]
    if not d.uses_aux and (declared.sources is None or says_so):
        r.origins["num_sources"] = "config"
        if shape is not None:
            r.folder.add(
                "error",
                "aux_flag_disagrees",
                "config.json:eagle_config.use_aux_hidden_state",
                "got false beside a stored fc.weight, which would then never run; expected one of the two. Set it to "
                'true, or declare the input of fc: "eagle3_ext": {"sources": [...]}.',
            )
        elif width != hidden_size:
            r.folder.add(
                "error",
                "fc_width",
                "config.json:target_hidden_size",
                f"got {width} for a draft of width {hidden_size} without fc; expected equal widths. Check the "
                "checkpoint.",
            )
        return 0, width, None
    counts = {
        "sources": len(sources) if sources is not None else None,
        "num_aux_hidden_states": None if declared.sources is not None else d.num_aux,
    }
    said = {key: count for key, count in counts.items() if count is not None}
    if len(set(said.values())) > 1:
        r.folder.add(
            "error",
            "source_count_disagrees",
            "config.json:num_aux_hidden_states",
            f"got {d.num_aux} beside {len(sources or ())} ids; expected both to agree. Correct one of the two.",
        )
    expected = next(iter(said.values()), None)
    if shape is None or len(shape) != 2 or shape[1] == 0:
        count = expected or 3
        r.origins["num_sources"] = "config" if expected else "default"
        return count, width, count * width
    fc_in = shape[1]
    r.origins["num_sources"] = "weights"
    if d.target_hidden_size is None and r.folder.is_reported("config.json:target_hidden_size"):
        count = expected or 3
        if fc_in % count == 0:
            # What the key says is wrong and reported; the file says it, too.
            r.origins["target_hidden_size"] = "weights"
            return count, fc_in // count, fc_in
    if fc_in % width:
        if d.target_hidden_size is None and expected and fc_in % expected == 0:
            # The width of the target is nowhere else in the checkpoint; the plan compares it with the target.
            r.origins["target_hidden_size"] = "weights"
            return expected, fc_in // expected, fc_in
        r.folder.add(
            "error",
            "fc_width",
            f"{r.folder.tensors[r.by_canonical['fc.weight']].file}:fc.weight",
            f"got {fc_in} input columns, which is no multiple of the target's width {width}; expected one block per "
            "source. Set target_hidden_size to the target's hidden_size.",
        )
        return expected or 3, width, fc_in
    count = fc_in // width
    if expected is not None and count != expected:
        which = "sources" if sources is not None else "num_aux_hidden_states"
        r.folder.add(
            "error",
            "fc_width",
            f"{r.folder.tensors[r.by_canonical['fc.weight']].file}:fc.weight",
            f"reads {fc_in} = {count} x {width} columns, got {expected} {which}; expected {count} sources of width "
            f"{width}. Declare as many sources as fc was trained on, or set target_hidden_size.",
        )
    return count, width, fc_in


def note_stock_fc(r: Reading, fc_in: int | None, hidden_size: int) -> None:
    """Note where stock sizes ``fc`` otherwise than the file."""
    d = r.dialect
    # The MLA class counts ids wherever they stand, and reads no other number.
    counted, said = (d.ids, None) if d.latent is not None else (d.stock.ids, d.num_aux)
    count = said or (len(counted) if counted else 3)
    width = (d.target_hidden_size or hidden_size) * count
    if fc_in is not None and fc_in == hidden_size:
        r.differences.append("stock skips fc, because its input is as wide as the draft")
    if fc_in is not None and fc_in != width:
        r.differences.append(f"stock builds fc for {width} input columns, the file has {fc_in}")


def read_norms(r: Reading) -> Norms:
    return Norms(
        around_fc=_around_fc(r),
        residual=_residual(r),
        recurrent_state=_recurrent_state(r),
        final_norm=_final_norm(r),
    )


def _around_fc(r: Reading) -> Literal["none", "per_source", "concatenation"]:
    d, ext = r.dialect, r.ext
    flags = [n for n, on in (("fc_norm", d.fc_norm), ("norm_before_fc", d.norm_before_fc)) if on]
    if not isinstance(ext.norms, msgspec.UnsetType):
        r.origins["norms"] = r.folder.declared.origins["norms"]
        flagged = {"fc_norm": "per_source", "norm_before_fc": "concatenation"}
        if [flagged[f] for f in flags] != ([] if ext.norms == "none" else [ext.norms]):
            theirs = " and ".join(flags) if flags else "no norm"
            r.differences.append(f"stock goes by the flags of the config and applies {theirs} around fc")
        return ext.norms
    if len(flags) == 2:
        r.folder.add(
            "error",
            "norms_clash",
            "config.json:norm_before_fc",
            "got true beside fc_norm; expected at most one kind of norm around fc. Correct the flags, or set "
            '"eagle3_ext": {"norms": ...}.',
        )
    stored = {
        "fc_norm": any(name.startswith("fc_norm.") for name in r.by_canonical),
        "norm_before_fc": "input_norm.weight" in r.by_canonical,
    }
    for flag, has_tensor in stored.items():
        if has_tensor and flag not in flags:
            r.folder.add(
                "error",
                "norm_flag_missing",
                f"config.json:{flag}",
                f"is not set, got a tensor for it ({'fc_norm.N' if flag == 'fc_norm' else 'input_norm'}.weight); "
                "expected flag and tensor together. Set the flag, or remove the tensor.",
            )
    r.origins["norms"] = "config" if flags else "weights" if any(stored.values()) else "default"
    if "fc_norm" in flags or (not flags and stored["fc_norm"]):
        return "per_source"
    return "concatenation" if flags or stored["norm_before_fc"] else "none"


def _residual(r: Reading) -> Literal["pre_norm", "post_norm"]:
    d, ext = r.dialect, r.ext
    if not isinstance(ext.residual, msgspec.UnsetType):
        r.origins["residual"] = r.folder.declared.origins["residual"]
        value = ext.residual
    else:
        r.origins["residual"] = "default" if d.norm_before_residual is None else "config"
        value = "post_norm" if d.norm_before_residual else "pre_norm"
    if value == "post_norm":
        r.differences.append("stock adds attention to the fc output before hidden_norm, not after it")
    return value


def _recurrent_state(r: Reading) -> Literal["pre_norm", "post_norm"]:
    d, ext, declared = r.dialect, r.ext, r.folder.declared
    stock = "post_norm" if d.norm_output else "pre_norm"
    value: Literal["pre_norm", "post_norm"] = "post_norm" if d.norm_output else "pre_norm"
    r.origins["recurrent_state"] = "default" if d.norm_output is None else "config"
    if not isinstance(ext.recurrent_state, msgspec.UnsetType):
        value = ext.recurrent_state
        r.origins["recurrent_state"] = declared.origins["recurrent_state"]
    elif declared.producer is not None and not declared.producer.norm_output_recycles:
        value = "pre_norm"
        r.origins["recurrent_state"] = declared.origins["producer"]
    elif d.norm_output and d.producer is None and declared.producer is None:
        r.folder.add(
            "warning",
            "norm_output_two_meanings",
            "config.json:norm_output",
            "got true, which SpecForge writes for drafts that recycle the state before the final norm and other "
            "trainers for the state after it; the latter was taken, as stock does. Settle it with "
            '"eagle3_ext": {"producer": ...} or {"recurrent_state": ...}.',
        )
    if value != stock:
        r.differences.append(f"stock recycles the {stock.replace('_', '-')} state")
    return value


def _final_norm(r: Reading) -> bool:
    d, producer = r.dialect, r.folder.declared.producer
    present = d.has_final_norm
    r.origins["final_norm"] = "default" if present else "config"
    if producer is not None and not producer.norm_output_recycles and d.norm_output is False:
        present = False
        r.origins["final_norm"] = r.folder.declared.origins["producer"]
        if "norm.weight" in r.by_canonical:
            name = r.by_canonical.pop("norm.weight")
            r.weights[name] = IGNORED + name
            r.by_canonical[IGNORED + name] = name
    elif not present and "norm.weight" in r.by_canonical:
        r.folder.add(
            "error",
            "norm_flag_missing",
            "config.json:use_last_layernorm",
            "got false beside a stored norm.weight; expected flag and tensor together. Correct one of the two.",
        )
        present = True
    if not present:
        r.differences.append("stock applies a final norm before the head")
    return present
