"""Fit a draft to a target: what is captured, and where each captured state lands in ``fc``.

Everything here speaks of boundaries (``docs/notation.md``). Plain layer ids become boundaries here and
nowhere else; how stock SGLang reads them on each target class is one table, ``STOCK_READINGS`` in ``spec``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.spec import (
    AssemblyPlan,
    Boundary,
    DraftSpec,
    Finding,
    Order,
    Origin,
    Source,
    StockReading,
    TargetFacts,
    parse_source,
    stock_reading,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AMBIGUITIES",
    "MAX_SOURCES",
    "apply_strict",
    "check",
    "column_order",
    "findings_of_remains",
    "findings_without_target",
    "parse_source",
    "permute_blocks",
    "permute_fc_weight",
    "permute_tensors",
    "plan",
    "positions",
    "spell",
    "spell_ids",
    "spellings",
    "stock_reading",
]

T = TypeVar("T")

MAX_SOURCES = 8

AMBIGUITIES = frozenset(
    {
        "layer_ids_two_readings",
        "layer_types",
        "mla_use_nope",
        "no_sources_declared",
        "norm_output_two_meanings",
        "rope_clash",
        "rope_halves",
        "rope_mscale",
        "rope_not_as_written",
        "sliding_window_unclear",
        "top_level_ids",
        "two_input_norms",
        "unsorted_ids",
        "verifier_mismatch",
    }
)
"""Codes of the findings in which a value was chosen among several that the checkpoint allows. ``strict``
turns them into errors."""


def spell(boundary: Boundary, num_layers: int) -> str:
    """Name a boundary in words: ``embedding``, ``layer 3 output``, ``layer 59 output (last)``."""
    if boundary == "final_norm":
        return "final norm"
    if boundary == 0:
        return "embedding"
    return f"layer {boundary - 1} output{' (last)' if boundary == num_layers else ''}"


def _spell_all(boundaries: Iterable[Boundary], num_layers: int) -> str:
    return "[" + " | ".join(spell(b, num_layers) for b in boundaries) + "]"


def _rank(boundary: Boundary) -> float:
    """Rank boundaries in the order in which a target emits them."""
    return float("inf") if boundary == "final_norm" else boundary


def column_order(sources: Sequence[Source], order: Order) -> tuple[Source, ...]:
    """Put sources into fc column order without knowing the target.

    Every reading of plain ids keeps their order, so that sorting needs no target.
    """
    if order == "as_listed":
        return tuple(sources)
    ranks = {"last": float("inf"), "final_norm": float("inf")}
    return tuple(sorted(sources, key=lambda s: (ranks.get(s.kind, s.index or 0), s.kind == "final_norm")))


def _read_ids(ids: Sequence[int], reading: StockReading, num_layers: int) -> tuple[int, ...]:
    """Turn plain ids into boundaries the way stock does on this target class, in the order given."""
    as_boundaries = (
        reading.ids == "boundary"
        or (reading.ids == "first_is_one" and bool(ids) and ids[0] != 1)
        or (reading.ids == "max_is_n" and bool(ids) and max(ids) == num_layers)
    )
    return tuple(ids) if as_boundaries else tuple(i + 1 for i in ids)


def _default_boundaries(reading: StockReading | None, num_layers: int) -> tuple[int, ...]:
    """List the boundaries that stock captures when a checkpoint names none, before duplicates collapse."""
    shift = reading.default_shift if reading else 0
    return tuple(b + shift for b in (2, num_layers // 2, num_layers - 3))


def _captured_by_stock(wanted: Sequence[int], reading: StockReading, num_layers: int) -> tuple[Boundary, ...] | None:
    """Say what stock emits when asked for these boundaries: ascending, ``None`` where it loses one."""
    highest = num_layers if reading.captures_last else num_layers - 1
    lowest = 0 if reading.captures_embedding else 1
    if len(set(wanted)) != len(wanted) or any(not lowest <= b <= highest for b in wanted):
        return None
    return tuple(sorted(wanted))


def _ids_for_stock(
    capture: Sequence[Boundary], reading: StockReading | None, num_layers: int
) -> tuple[int, ...] | None:
    """Find the id list with which stock captures exactly these boundaries on this target class."""
    boundaries = [b for b in capture if b != "final_norm"]
    if reading is None or not boundaries or len(boundaries) != len(capture):
        return None
    if not reading.captures_residual and boundaries != [0]:
        return None
    as_is = tuple(boundaries)
    # Stock ignores the order of the list, except that a DeepSeek-like class looks at its first id.
    candidates = (tuple(b - 1 for b in boundaries), as_is, as_is[1:] + as_is[:1])
    for ids in candidates:
        if sorted(_read_ids(ids, reading, num_layers)) == boundaries:
            return ids if _captured_by_stock(boundaries, reading, num_layers) is not None else None
    return None


def plan(spec: DraftSpec, target: TargetFacts) -> AssemblyPlan:
    """Resolve a draft's sources on a target.

    Args:
        spec: the draft, from :func:`sglang_eagle3_ext.formats.read_draft`.
        target: the target, from :func:`sglang_eagle3_ext.formats.read_target` or built by the host.

    Returns:
        The plan. Problems never raise; they are ``findings``, the spec's first. :func:`check` raises them.
    """
    n, reading = target.num_layers, target.reading
    findings: list[Finding] = []
    origins: dict[str, Origin] = dict(spec.origins)

    if reading is None:
        findings.append(
            Finding(
                "info",
                "target_class_unlisted",
                f"{target.path}: stock SGLang has no EAGLE-3 capture on {target.architecture}; ids were read by the "
                "trainers' convention (outputs). Name the sources in eagle3_ext if that is not what was trained.",
            )
        )

    if spec.sources is None:
        listed: tuple[Boundary, ...] = _default_boundaries(reading, n)
        origins["boundaries"] = "default"
        findings += _report_default(spec, target, listed)
    else:
        listed = _resolve(spec, target, findings)
        origins["boundaries"] = origins["sources"]
        findings += [*_check_list(spec, listed), *_check_depth(spec, target, listed)]
    boundaries = tuple(sorted(listed, key=_rank)) if spec.order == "ascending" else listed
    findings += _check_pair(spec, target, boundaries)
    findings += _check_positions(spec, target)

    block_of = tuple(sorted(range(len(boundaries)), key=lambda i: _rank(boundaries[i])))
    capture = tuple(boundaries[i] for i in block_of)

    stock_boundaries = _stock_boundaries(spec, target) if spec.stock.loads else None
    differences = _differences(spec, target, boundaries, stock_boundaries)

    return AssemblyPlan(
        spec=spec,
        target=target,
        boundaries=boundaries,
        capture=capture,
        block_of=block_of,
        stock_boundaries=stock_boundaries,
        stock_ids=_ids_for_stock(capture, reading, n),
        equals_stock=not differences,
        differences=differences,
        origins=origins,
        findings=apply_strict(spec, (*spec.findings, *findings)),
    )


def _resolve(spec: DraftSpec, target: TargetFacts, findings: list[Finding]) -> tuple[Boundary, ...]:
    """Turn the declared sources into boundaries, as listed, and report ids that have two readings."""
    n = target.num_layers
    sources = spec.sources or ()
    ids = [s.index for s in sources if s.kind == "id" and s.index is not None]
    outputs = tuple(i + 1 for i in ids)
    if spec.layer_ids == "boundary":
        read = tuple(ids)
    elif spec.layer_ids == "output" or target.reading is None:
        read = outputs
    else:
        read = _read_ids(ids, target.reading, n)
    other = tuple(ids) if read == outputs else outputs
    # A reading that leaves the target is none.
    if ids and spec.layer_ids == "stock" and all(0 <= b <= n for b in other):
        # Where stock always adds one it agrees with the trainers, and only vLLM's convention differs.
        settled = target.reading is not None and target.reading.ids == "output"
        findings.append(
            Finding(
                "info" if settled else "warning",
                "layer_ids_two_readings",
                f"{spec.sources_place}: {ids} is read the way stock SGLang reads it on {target.architecture}: "
                f"{_spell_all(read, n)}, boundaries {list(read)}; the other convention gives {_spell_all(other, n)}, "
                f"boundaries {list(other)}. "
                'Settle it with "eagle3_ext": {"layer_ids": "output"} or "boundary".',
            )
        )
    resolved: list[Boundary] = []
    remaining = iter(read)
    for source in sources:
        if source.kind == "id":
            resolved.append(next(remaining))
        elif source.kind == "final_norm":
            resolved.append("final_norm")
        else:
            resolved.append(n if source.index is None else source.index)
    return tuple(resolved)


def _report_default(spec: DraftSpec, target: TargetFacts, boundaries: Sequence[Boundary]) -> list[Finding]:
    """Report that stock's default was taken, and where it is no use on a target of few layers."""
    where, n = f"{spec.path}/config.json", target.num_layers
    findings = [
        Finding(
            "warning",
            "no_sources_declared",
            f"{where}: names no hidden states; expected the ones that it was trained on. Stock's default for {n} "
            f"layers was taken: {_spell_all(boundaries, n)}, boundaries {list(boundaries)}. "
            f"{_declare(spec, target.path)}",
        )
    ]
    usable = {b for b in boundaries if b != "final_norm" and 0 <= b <= n}
    if len(usable) < len(boundaries):
        findings.append(
            Finding(
                "error",
                "default_collapses",
                f"{where}: stock's default boundaries are {list(boundaries)} on a target of {n} layers, got "
                f"{len(usable)} usable ones; expected {len(boundaries)} distinct ones. {_declare(spec, target.path)}",
            )
        )
    return findings


def _check_list(spec: DraftSpec, sources: Sequence[object]) -> Iterator[Finding]:
    """Check what needs no target: that the declared sources, in any spelling, are distinct, and their number."""
    key = spec.sources_place
    texts = [source.text for source in spec.sources or ()]
    repeated = dict.fromkeys(
        f"boundary {source}" if isinstance(source, int) else text
        for i, (source, text) in enumerate(zip(sources, texts, strict=True))
        if source in sources[:i]
    )
    if repeated:
        yield Finding(
            "error",
            "duplicate_source",
            f"{key}: got {texts}, which names {', '.join(repeated)} more than once; every source must be another "
            "state. Remove the repetition or correct it.",
        )
    if not 1 <= len(sources) <= MAX_SOURCES:
        yield Finding(
            "error",
            "source_count",
            f"{key}: got {len(sources)} sources; expected 1 to {MAX_SOURCES}. Correct the list.",
        )


def _check_depth(spec: DraftSpec, target: TargetFacts, boundaries: Sequence[Boundary]) -> Iterator[Finding]:
    """Check that the declared sources, as listed, exist on the target."""
    n = target.num_layers
    texts = [source.text for source in spec.sources or ()]
    beyond = [
        f"{text} (boundary {b})"
        for text, b in zip(texts, boundaries, strict=True)
        if b != "final_norm" and not 0 <= b <= n
    ]
    if beyond:
        yield Finding(
            "error",
            "source_beyond_depth",
            f"{spec.sources_place}: got {', '.join(beyond)} for a target of {n} layers; every boundary must be in "
            f"0..{n}. Check that {target.path} is the target this draft was trained for.",
        )


def _check_pair(spec: DraftSpec, target: TargetFacts, boundaries: Sequence[Boundary]) -> list[Finding]:
    """Check that the draft and the target belong together: widths, vocabulary, the recorded target."""
    findings: list[Finding] = []
    width = len(boundaries) * target.hidden_size
    # What does not even agree within the checkpoint has been reported already.
    if spec.fc_in not in (None, width) and all(f.code != "fc_width" for f in spec.findings):
        findings.append(
            Finding(
                "error",
                "fc_width",
                f"{spec.path}:fc.weight: reads {spec.fc_in} columns, got {len(boundaries)} sources of width "
                f"{target.hidden_size} = {width} on {target.path}; both must be equal. Declare as many sources as fc "
                "was trained on, and check the target.",
            )
        )
    if target.hidden_size != spec.target_hidden_size:
        findings.append(
            Finding(
                "error",
                "target_width",
                f"{spec.path}/config.json:target_hidden_size: {spec.target_hidden_size}, got {target.path} with "
                f"hidden_size {target.hidden_size}; both must be equal. Check that this is the target the draft was "
                "trained for.",
            )
        )
    if target.vocab_size != spec.vocab.target:
        findings.append(
            Finding(
                "error",
                "vocab_size",
                f"{spec.path}/config.json:vocab_size: {spec.vocab.target}, got {target.path} with vocab_size "
                f"{target.vocab_size}; both must be equal. Check that this is the target the draft was trained for.",
            )
        )
    if spec.verifier.architectures and target.architecture not in spec.verifier.architectures:
        name = f" ({spec.verifier.name})" if spec.verifier.name else ""
        findings.append(
            Finding(
                "warning",
                "verifier_mismatch",
                f"{spec.path}/config.json:verifier: records {', '.join(spec.verifier.architectures)}{name}, got "
                f"{target.architecture} in {target.path}; expected the recorded target. Check that the pair belongs "
                "together.",
            )
        )
    return findings


def positions(spec: DraftSpec) -> int:
    """Count the positions a draft has with the scaling that was read.

    SGLang's ``get_context_length`` counts the config's in the same way, except that the factor of a dynamic scaling,
    which is read as none, stretches them there.
    """
    scaling = spec.rope.scaling or {}
    # Of the kinds that have a factor only this one does not say, itself or by default, where it starts from.
    factor = scaling["factor"] if scaling.get("rope_type") == "linear" else 1
    return int(factor * spec.max_position_embeddings)


def _check_positions(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """Check that the draft can follow the target through its whole context."""
    scaling, key = spec.rope.scaling or {}, "original_max_position_embeddings"
    if scaling.get("rope_type") == "longrope" and target.context is not None and scaling[key] < target.context:
        yield Finding(
            "warning",
            "short_context",
            f"{spec.path}/config.json:rope_scaling: got longrope with {key} {scaling[key]}; {target.path} is served "
            f"with {target.context}, expected at most {scaling[key]}. From that position on SGLang takes long_factor, "
            "for all requests of a batch at once and not for keys already cached, so that drafts may be accepted less "
            f"often. Serve with --context-length {scaling[key]} to rule it out.",
        )
    if not _is_too_short(spec, target):
        return
    yield Finding(
        "info",
        "short_context",
        f"{spec.path}/config.json:max_position_embeddings: got {positions(spec)} positions; {target.path} is served "
        f"with {target.context}. The same rotation goes on to the target's last position; drafts beyond the trained "
        "length may be accepted less often.",
    )


def _is_too_short(spec: DraftSpec, target: TargetFacts) -> bool:
    return target.context is not None and 0 < positions(spec) < target.context


def _stock_boundaries(spec: DraftSpec, target: TargetFacts) -> tuple[Boundary, ...] | None:
    """Say what stock captures for the checkpoint's own ids; ``None`` where it refuses or loses one."""
    if not spec.stock.uses_aux:
        return ("final_norm",)
    if target.reading is None:
        return None
    if spec.stock.ids is None:
        wanted = _default_boundaries(target.reading, target.num_layers)
    else:
        wanted = _read_ids(spec.stock.ids, target.reading, target.num_layers)
    return _captured_by_stock(wanted, target.reading, target.num_layers)


def _differences(
    spec: DraftSpec,
    target: TargetFacts,
    boundaries: tuple[Boundary, ...],
    stock_boundaries: tuple[Boundary, ...] | None,
) -> tuple[str, ...]:
    """Say in sentences what stock would compute otherwise, the choice of hidden states first."""
    n, reading = target.num_layers, target.reading
    wanted = _spell_all(boundaries, n)
    if not spec.stock.loads:
        return spec.stock.differences
    further = spec.stock.differences
    if _is_too_short(spec, target):
        further += (f"stock stops, since the draft has {positions(spec)} positions and the target {target.context}",)
    if spec.stock.uses_aux and reading is None:
        first = f"stock refuses to start, since it has no EAGLE-3 capture on {target.architecture}"
    elif stock_boundaries is None:
        first = f"stock loses one of the hidden states that it looks for; this draft was trained on {wanted}"
    elif stock_boundaries != boundaries:
        theirs = _spell_all(stock_boundaries, n)
        first = f"stock feeds fc with {theirs}; this draft was trained on {wanted}"
    elif reading is not None and not reading.captures_residual and boundaries not in ((0,), ("final_norm",)):
        first = f"stock captures {wanted} without the residual stream on {target.architecture}"
    else:
        return further
    return (first, *further)


def plan_pair(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    revision: str | None = None,
    target_revision: str | None = None,
) -> AssemblyPlan:
    """Read a draft and its target, and plan how to serve the one on the other.

    Args:
        draft: local folder or Hub id.
        target: the same.
        revision: branch, tag or commit of the draft on the Hub.
        target_revision: the same for the target.

    Returns:
        A plan without errors.

    Raises:
        CheckpointError: what is wrong with either of them and between them, all at once.
    """
    from sglang_eagle3_ext import formats

    findings: list[Finding] = []
    spec: DraftSpec | None = None
    facts: TargetFacts | None = None
    remains: CheckpointError | None = None
    try:
        spec = formats.read_draft(draft, revision=revision)
    except CheckpointError as error:
        findings += error.findings
        remains = error
    try:
        facts = formats.read_target(target, revision=target_revision)
    except CheckpointError as error:
        findings += error.findings
    if spec is not None and facts is not None:
        made = plan(spec, facts)
        check(made)
        return made
    if remains is not None:
        findings += findings_of_remains(remains, facts)
    if spec is not None:
        # A target that cannot be read may have said what stock's default is.
        known = (f for f in findings_without_target(spec) if f.code != "no_sources_declared")
        findings = [*known, *findings]
    raise CheckpointError.from_findings(findings)


def findings_of_remains(error: CheckpointError, target: TargetFacts | None) -> tuple[Finding, ...]:
    """List what is wrong between a target and a draft that could be read in part, beside what the error holds."""
    if error.spec is None or target is None:
        return ()
    # Sources may be among what is missing, and a wrong fc only follows from that.
    codes = ("target_width", "vocab_size", "verifier_mismatch")
    return tuple(f for f in plan(error.spec, target).findings if f.code in codes)


def findings_without_target(spec: DraftSpec) -> tuple[Finding, ...]:
    """List what is wrong or doubtful about a draft whose target is not known, ambiguities as ``strict`` has them."""
    findings = list(spec.findings)
    if spec.sources is not None:
        # All ids of a draft are read alike, so that they differ on every target or on none.
        findings += _check_list(spec, [(source.kind, source.index) for source in spec.sources])
        # No reading of an id lies above the one as an output.
        lowest = 0 if spec.layer_ids == "boundary" else -1
        if below := [s.text for s in spec.sources if s.kind == "id" and s.index is not None and s.index < lowest]:
            findings.append(
                Finding(
                    "error",
                    "source_beyond_depth",
                    f"{spec.sources_place}: got {', '.join(below)}, which no target has; expected ids of at least "
                    f"{lowest}. Correct the list.",
                )
            )
        return apply_strict(spec, findings)
    findings.append(
        Finding(
            "warning",
            "no_sources_declared",
            f"{spec.path}/config.json: names no hidden states; expected the ones that it was trained on. Of a target "
            f"of n layers stock's default would be taken, boundaries [2, n // 2, n - 3]. {_declare(spec, 'TARGET')}",
        )
    )
    # Stock's default has three states on every target, which must be as wide as the draft says.
    if spec.fc_in not in (None, 3 * spec.target_hidden_size) and all(f.code != "fc_width" for f in spec.findings):
        findings.append(
            Finding(
                "error",
                "fc_width",
                f"{spec.path}:fc.weight: reads {spec.fc_in} columns, got 3 sources of width {spec.target_hidden_size} "
                f"by stock's default; both must be equal. {_declare(spec, 'TARGET')}",
            )
        )
    return apply_strict(spec, findings)


def _declare(spec: DraftSpec, target: str) -> str:
    """Say how a draft comes to name its hidden states."""
    pair = f"{shlex.quote(spec.path)} --target {shlex.quote(target)}"
    return f'Declare them: "eagle3_ext": {{"sources": [...]}}, or find them out: sglang-eagle3 probe {pair}.'


def apply_strict(spec: DraftSpec, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Turn every ambiguity into an error where the draft asks for ``strict``."""
    return tuple(replace(f, severity="error") if spec.strict and f.code in AMBIGUITIES else f for f in findings)


def check(plan: AssemblyPlan) -> None:
    """Raise every error of a plan at once.

    Args:
        plan: the plan to check; under ``strict`` its ambiguities are errors already.

    Raises:
        CheckpointError: the plan has at least one finding of severity ``error``.
    """
    if any(f.severity == "error" for f in plan.findings):
        raise CheckpointError.from_findings(plan.findings)


def permute_fc_weight(weight: Tensor, plan: AssemblyPlan) -> Tensor:
    """Put the column blocks of ``fc`` (or of one norm over the concatenation) into capture order.

    Args:
        weight: [..., L * M], any dtype; its last axis consists of one block per source in fc column order.
        plan: the plan whose ``block_of`` says which block each captured state feeds.

    Returns:
        [..., L * M] with the blocks in capture order; ``weight`` itself, untouched, when the order is
        the same.

    Raises:
        ValueError: the last axis is not made of one block per source.
    """
    if plan.is_identity:
        return weight
    blocks = len(plan.block_of)
    if weight.shape[-1] % blocks:
        raise ValueError(
            f"weight: got {weight.shape[-1]} columns; expected a multiple of the {blocks} sources of the plan. Pass "
            "fc.weight or the weight of the norm over the whole concatenation."
        )
    # `unflatten` and the index keep every value bit for bit; nothing is computed.
    permuted: Tensor = weight.unflatten(-1, (blocks, -1))[..., list(plan.block_of), :].flatten(-2)
    return permuted


def permute_blocks(items: Sequence[T], plan: AssemblyPlan) -> list[T]:
    """Put one item per source (such as the per-source norms) from fc column order into capture order.

    Raises:
        ValueError: there is not exactly one item per source.
    """
    if len(items) != len(plan.block_of):
        raise ValueError(
            f"items: got {len(items)}; expected one for each of the {len(plan.block_of)} sources. Pass the per-source "
            "norms in fc column order."
        )
    return [items[block] for block in plan.block_of]


def permute_tensors(tensors: Mapping[str, Tensor], plan: AssemblyPlan) -> dict[str, Tensor]:
    """Put a draft's ``fc`` and the norms that are tied to its blocks into capture order.

    Args:
        tensors: canonical name -> tensor.
        plan: the plan whose ``block_of`` says which block each captured state feeds.

    Returns:
        The same names; ``fc.weight``, ``input_norm.weight`` and ``fc_norm.N.weight`` are moved, the others untouched.
    """
    moved = {key: permute_fc_weight(tensors[key], plan) for key in ("fc.weight", "input_norm.weight") if key in tensors}
    norms = [key for i in range(len(plan.block_of)) if (key := f"fc_norm.{i}.weight") in tensors]
    if norms:
        moved |= zip(norms, permute_blocks([tensors[key] for key in norms], plan), strict=True)
    return {**tensors, **moved}


def spellings(plan: AssemblyPlan) -> dict[str, tuple[int | None, ...] | None]:
    """Spell a plan's states in the ways other programs name them, all in fc column order.

    Returns:
        ``sglang``: the ids that stock on this target class has for them, ``vllm``: vLLM's ids, each ``None`` where no
        list says it; ``hf``: the indices into ``outputs.hidden_states`` of transformers, with ``None`` for boundary
        n, which is not among them (``hidden_states[n]`` is the state after the final norm). Both engines emit in
        ascending order; :func:`spell_ids` says so where that is another one.
    """
    n = plan.target.num_layers
    layers = tuple(b for b in plan.boundaries if b != "final_norm")
    vllm = layers if len(layers) == len(plan.boundaries) else None
    sglang = None
    if plan.stock_ids is not None:
        shift = min(plan.stock_ids) - min(layers)
        sglang = tuple(b + shift for b in layers)
    hf = tuple(n if b == "final_norm" else (None if b == n else b) for b in plan.boundaries)
    return {"sglang": sglang, "vllm": vllm, "hf": hf}


def spell_ids(plan: AssemblyPlan) -> Iterator[tuple[str, str]]:
    """Spell a plan's states in the words of other programs, in fc column order: the program's name, and a line.

    A list that an engine has to be given in another order, and an order that no list brings about, is said.
    """
    spelled = spellings(plan)
    lists: dict[str, tuple[Boundary, ...] | None] = {"sglang": plan.stock_ids, "vllm": plan.capture}
    for label, key in (("SGLang ids", "sglang"), ("vLLM ids", "vllm"), ("hidden_states", "hf")):
        ids, listed = spelled[key], lists.get(key)
        text = "not expressible" if ids is None else _listed(ids)
        if ids is not None and listed is not None and listed != ids:
            how = "" if plan.is_identity else ", and it concatenates in ascending order, whatever its list says"
            text += f" (to be listed as {_listed(listed)}{how})"
        yield label, text


def _listed(ids: Iterable[Boundary | None]) -> str:
    return ", ".join("none" if i is None else str(i) for i in ids)
