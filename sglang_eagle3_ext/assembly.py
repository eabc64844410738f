"""Fit a draft to a target: what is captured, and where each captured state lands in ``fc``.

Everything here speaks of boundaries (``docs/notation.md``). The one table of how stock SGLang 0.5.23 reads
plain layer ids on each target class is :data:`STOCK_READINGS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AMBIGUITIES",
    "MAX_SOURCES",
    "STOCK_READINGS",
    "apply_strict",
    "check",
    "column_order",
    "parse_source",
    "permute_blocks",
    "permute_fc_weight",
    "plan",
    "spell",
    "spellings",
    "stock_reading",
]

T = TypeVar("T")

MAX_SOURCES = 8

AMBIGUITIES = frozenset(
    {
        "layer_ids_two_readings",
        "no_sources_declared",
        "norm_output_two_meanings",
        "rope_clash",
        "sliding_window_unclear",
        "top_level_ids",
        "two_input_norms",
        "unsorted_ids",
        "verifier_mismatch",
    }
)
"""Codes of the findings in which a value was chosen among several that the checkpoint allows. ``strict``
turns them into errors."""

_OUTPUT = StockReading("output")
_OUTPUT_AND_LAST = StockReading("output", captures_last=True)
_FIRST_IS_ONE = StockReading("first_is_one")

STOCK_READINGS: dict[str, StockReading] = {
    **dict.fromkeys(
        (
            "ApertusForCausalLM",
            "BailingMoEForCausalLM",
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "Cosmos3ForConditionalGeneration",
            "ExaoneMoEForCausalLM",
            "ExaoneMoeForCausalLM",
            "Glm4MoeForCausalLM",
            "Glm5NextForConditionalGeneration",
            "IQuestCoderForCausalLM",
            "InternLM3ForCausalLM",
            "InternS1ProForConditionalGeneration",
            "InternS2MobiusForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
            "Llama4ForCausalLM",
            "Llama4ForConditionalGeneration",
            "LlamaForCausalLM",
            "LongcatFlashForCausalLM",
            "MellumForCausalLM",
            "MiniMaxM2ForCausalLM",
            "Ministral3ForCausalLM",
            "MistralForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen4ExpForConditionalGeneration",
            "SarvamMoEForCausalLM",
            "TeleFLMForCausalLM",
        ),
        _OUTPUT,
    ),
    **dict.fromkeys(
        (
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
            "MiniMaxM3SparseForCausalLM",
        ),
        _OUTPUT_AND_LAST,
    ),
    # The default list of this class is shifted as well.
    "MiniMaxM3SparseForConditionalGeneration": StockReading("output", default_shift=1, captures_last=True),
    # These store a layer's contribution without the residual that travels beside it.
    **dict.fromkeys(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        StockReading("output", captures_last=True, captures_residual=False),
    ),
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV32ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "KimiK25ForConditionalGeneration",
            "MistralLarge3ForCausalLM",
        ),
        _FIRST_IS_ONE,
    ),
    "GptOssForCausalLM": StockReading("max_is_n", captures_last=True),
}
"""How stock SGLang 0.5.23 reads plain ids, by the target's architecture string."""


def stock_reading(architecture: str) -> StockReading | None:
    """Look up how stock reads plain ids on a target class; ``None`` when it has no EAGLE-3 capture there."""
    return STOCK_READINGS.get(architecture)


def spell(boundary: Boundary, num_layers: int) -> str:
    """Name a boundary in words: ``embedding``, ``layer 3 output``, ``layer 59 output (last)``, ``final norm``."""
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


def _captured_by_stock(
    wanted: Sequence[int], reading: StockReading, num_layers: int
) -> tuple[Boundary, ...] | None:
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
    where = f"{spec.path}/config.json"

    if reading is None:
        findings.append(
            Finding(
                "info",
                "target_class_unlisted",
                f"{target.path}: stock SGLang has no EAGLE-3 capture on {target.architecture}; ids were read by "
                "the trainers' convention (outputs). Name the sources in eagle3_ext if that is not what was trained.",
            )
        )

    if spec.sources is None:
        boundaries: tuple[Boundary, ...] = _default_boundaries(reading, n)
        origins["boundaries"] = "default"
        collapsed = len(set(boundaries)) < 3 or any(not 0 <= b <= n for b in boundaries if b != "final_norm")
        findings.append(
            Finding(
                "warning",
                "no_sources_declared",
                f"{where}: names no hidden states; stock's default for {n} layers was taken: "
                f"{_spell_all(boundaries, n)}, boundaries {list(boundaries)}. Declare what was trained: "
                '"eagle3_ext": {"sources": [...]}.',
            )
        )
        if collapsed:
            findings.append(
                Finding(
                    "error",
                    "default_collapses",
                    f"{where}: stock's default boundaries are {list(boundaries)} on a {n}-layer target, got "
                    f"{len({b for b in boundaries if b != 'final_norm' and 0 <= b <= n})} usable ones; expected 3 "
                    'distinct ones. Declare the sources: "eagle3_ext": {"sources": [...]}.',
                )
            )
    else:
        boundaries = _resolve(spec, target, findings)
        origins["boundaries"] = origins.get("sources", "default")
        if spec.order == "ascending":
            boundaries = tuple(sorted(boundaries, key=_rank))

    findings += _check_sources(spec, target, boundaries)
    findings += _check_pair(spec, target)

    block_of = tuple(sorted(range(len(boundaries)), key=lambda i: _rank(boundaries[i])))
    capture = tuple(boundaries[i] for i in block_of)

    stock_boundaries: tuple[Boundary, ...] | None = None
    if not spec.stock.uses_aux:
        stock_boundaries = ("final_norm",)
    elif reading is not None:
        wanted = (
            _default_boundaries(reading, n)
            if spec.stock.ids is None
            else _read_ids(spec.stock.ids, reading, n)
        )
        stock_boundaries = _captured_by_stock(wanted, reading, n)
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
    if ids and spec.layer_ids == "stock":
        other = tuple(ids) if read == outputs else outputs
        # Where stock always adds one it agrees with the trainers, and only vLLM's convention differs.
        settled = target.reading is not None and target.reading.ids == "output"
        findings.append(
            Finding(
                "info" if settled else "warning",
                "layer_ids_two_readings",
                f"{spec.path}/config.json:eagle_config.eagle_aux_hidden_state_layer_ids: {ids} is read the way "
                f"stock SGLang reads it on {target.architecture}: {_spell_all(read, n)}, boundaries {list(read)}; "
                f"the other convention gives {_spell_all(other, n)}, boundaries {list(other)}. "
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


def _check_sources(spec: DraftSpec, target: TargetFacts, boundaries: Sequence[Boundary]) -> list[Finding]:
    """Check that the sources exist on the target, are distinct, and fill ``fc`` exactly."""
    n = target.num_layers
    findings: list[Finding] = []
    key = f"{spec.path}/config.json:sources"
    texts = [s.text for s in spec.sources] if spec.sources is not None else [str(b) for b in boundaries]

    if spec.sources is not None:
        beyond = [
            f"{text} (boundary {b})"
            for text, b in zip(_texts_in_column_order(spec), boundaries, strict=True)
            if b != "final_norm" and not 0 <= b <= n
        ]
        if beyond:
            findings.append(
                Finding(
                    "error",
                    "source_beyond_depth",
                    f"{key}: got {', '.join(beyond)} for a target of {n} layers; every boundary must be in 0..{n}. "
                    f"Check that {target.path} is the target this draft was trained for.",
                )
            )
        repeated = sorted({str(b) for b in boundaries if list(boundaries).count(b) > 1})
        if repeated:
            findings.append(
                Finding(
                    "error",
                    "duplicate_source",
                    f"{key}: got {texts}, which names boundary {', '.join(repeated)} more than once; every source "
                    "must be another state. Remove the repetition or correct it.",
                )
            )
        if not 1 <= len(boundaries) <= MAX_SOURCES:
            findings.append(
                Finding(
                    "error",
                    "source_count",
                    f"{key}: got {len(boundaries)} sources; expected 1 to {MAX_SOURCES}. Correct the list.",
                )
            )
    if spec.fc_in is not None and len(boundaries) * target.hidden_size != spec.fc_in:
        findings.append(
            Finding(
                "error",
                "fc_width",
                f"{spec.path}:fc.weight: reads {spec.fc_in} columns, got {len(boundaries)} sources of width "
                f"{target.hidden_size} = {len(boundaries) * target.hidden_size} on {target.path}; both must be "
                "equal. Declare as many sources as fc was trained on, and check the target.",
            )
        )
    return findings


def _texts_in_column_order(spec: DraftSpec) -> list[str]:
    return [s.text for s in column_order(spec.sources or (), spec.order)]


def _check_pair(spec: DraftSpec, target: TargetFacts) -> list[Finding]:
    """Check that the draft and the target belong together."""
    findings: list[Finding] = []
    if target.hidden_size != spec.target_hidden_size:
        findings.append(
            Finding(
                "error",
                "target_width",
                f"{spec.path}/config.json:target_hidden_size: {spec.target_hidden_size}, got {target.path} with "
                f"hidden_size {target.hidden_size}; both must be equal. Check that this is the target the draft "
                "was trained for.",
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
        findings.append(
            Finding(
                "warning",
                "verifier_mismatch",
                f"{spec.path}/config.json:verifier: records {', '.join(spec.verifier.architectures)}"
                f"{f' ({spec.verifier.name})' if spec.verifier.name else ''}, got {target.architecture} in "
                f"{target.path}; expected the recorded target. Check that the pair belongs together.",
            )
        )
    return findings


def _differences(
    spec: DraftSpec,
    target: TargetFacts,
    boundaries: tuple[Boundary, ...],
    stock_boundaries: tuple[Boundary, ...] | None,
) -> tuple[str, ...]:
    """Say in sentences what stock would compute otherwise."""
    n = target.num_layers
    wanted = _spell_all(boundaries, n)
    differences = list(spec.stock.differences)
    if target.reading is None and spec.stock.uses_aux:
        differences.insert(0, f"stock has no EAGLE-3 capture on {target.architecture} and refuses to start")
    elif stock_boundaries is None:
        differences.insert(0, f"stock refuses or loses one of its own hidden states where this draft reads {wanted}")
    elif stock_boundaries != boundaries:
        differences.insert(
            0, f"stock feeds fc with {_spell_all(stock_boundaries, n)} where this draft was trained on {wanted}"
        )
    elif target.reading is not None and not target.reading.captures_residual and boundaries not in ((0,), ("final_norm",)):
        differences.insert(0, f"stock captures {wanted} without the residual stream on {target.architecture}")
    return tuple(differences)


def apply_strict(spec: DraftSpec, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Turn every ambiguity into an error where the draft asks for ``strict``."""
    return tuple(
        replace(f, severity="error") if spec.strict and f.code in AMBIGUITIES else f for f in findings
    )


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
            f"weight: got {weight.shape[-1]} columns; expected a multiple of the {blocks} sources of the plan. "
            "Pass fc.weight or the weight of the norm over the whole concatenation."
        )
    # `unflatten` and the index keep every value bit for bit; nothing is computed.
    return weight.unflatten(-1, (blocks, -1))[..., list(plan.block_of), :].flatten(-2)


def permute_blocks(items: Sequence[T], plan: AssemblyPlan) -> list[T]:
    """Put one item per source (such as the per-source norms) from fc column order into capture order.

    Raises:
        ValueError: there is not exactly one item per source.
    """
    if len(items) != len(plan.block_of):
        raise ValueError(
            f"items: got {len(items)}; expected one for each of the {len(plan.block_of)} sources. "
            "Pass the per-source norms in fc column order."
        )
    return [items[block] for block in plan.block_of]


def spellings(plan: AssemblyPlan) -> dict[str, tuple[int | None, ...] | None]:
    """Spell a plan's states in the ways other programs name them.

    Returns:
        ``sglang``: ids for stock on this target class, ``vllm``: vLLM's ids (both ascending, since both
        engines emit in that order), each ``None`` where no list says it; ``hf``: the indices into
        ``outputs.hidden_states`` of transformers in fc column order, with ``None`` for boundary n, which
        is not among them (``hidden_states[n]`` is the state after the final norm).
    """
    n = plan.target.num_layers
    vllm = None if "final_norm" in plan.capture else tuple(b for b in plan.capture if b != "final_norm")
    hf = tuple(n if b == "final_norm" else (None if b == n else b) for b in plan.boundaries)
    return {"sglang": plan.stock_ids, "vllm": vllm, "hf": hf}
