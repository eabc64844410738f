"""The nouns of this package: what a draft is, what a target is, and how the two fit together.

Everything here is a frozen dataclass over plain Python values. The words (boundary, source, assembly,
feature pass, recurrent pass) are defined in ``docs/notation.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Boundary = int | Literal["final_norm"]
"""A place in the target's residual stream: ``b`` is the stream just before layer ``b``, ``0 <= b <= n``
(0: what the embedding emits; n: what the last layer emits, before the final norm). ``"final_norm"`` is
the last state after the final norm."""

Origin = Literal["override", "eagle3_ext", "config", "weights", "default"]
"""Where a value was read: ``--json-model-override-args``, the draft's own ``eagle3_ext`` object, the keys
of its dialect, its tensors, or this package's default (which is stock's)."""

Severity = Literal["error", "warning", "info"]
Order = Literal["as_listed", "ascending"]
IdMeaning = Literal["output", "boundary", "stock"]
"""What a plain integer id means: the output of that layer, a boundary, or whatever stock SGLang reads
into it on the target class at hand."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, doubtful or worth knowing about a draft.

    Attributes:
        severity: ``error`` (must not be served), ``warning`` (served, but doubtful), ``info``.
        code: stable slug with an entry in ``docs/findings.md``.
        message: ``<file:key>: <what is wrong, got ...>; <what was expected>. <what to do>.``
    """

    severity: Severity
    code: str
    message: str

    def __post_init__(self) -> None:
        # Names of files, keys and tensors stand in it, and one message is one line.
        object.__setattr__(self, "message", printable(self.message))


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Spell out the characters of a text that end a line or steer a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class Source:
    """One hidden state of the target, as the author of a draft names it.

    Attributes:
        kind: ``boundary`` (``index`` is the boundary), ``last`` (boundary n), ``final_norm``, or ``id``
            (``index`` is a plain layer id of a dialect, whose meaning ``DraftSpec.layer_ids`` says).
        index: the number, ``None`` for ``last`` and ``final_norm``.
        text: the spelling it was read from, for messages.
    """

    kind: Literal["boundary", "last", "final_norm", "id"]
    index: int | None
    text: str


SOURCE_GRAMMAR = "embed, layerK (output of layer K), layerK.input, boundaryB, last or final_norm"

_NUMBERED_SOURCE = re.compile(r"(layer|boundary)(0|[1-9][0-9]{0,8})(\.input)?")


def parse_source(text: str) -> Source:
    """Read one source in the spelling that users write.

    Args:
        text: ``embed``, ``layerK``, ``layerK.input``, ``boundaryB``, ``last`` or ``final_norm``.

    Returns:
        The source, with ``text`` kept for messages.

    Raises:
        ValueError: the text is none of these; the message names the grammar.
    """
    if text == "embed":
        return Source("boundary", 0, text)
    if text == "last":
        return Source("last", None, text)
    if text == "final_norm":
        return Source("final_norm", None, text)
    match = _NUMBERED_SOURCE.fullmatch(text)
    if match is None or (match[1] == "boundary" and match[3]):
        raise ValueError(f"{text!r} is not a source; expected {SOURCE_GRAMMAR}")
    number = int(match[2])
    is_output = match[1] == "layer" and not match[3]
    return Source("boundary", number + 1 if is_output else number, text)


@dataclass(frozen=True)
class Norms:
    """The normalisations around ``fc`` and around the draft's own state.

    Attributes:
        around_fc: ``none``, ``per_source`` (one RMSNorm per fc block) or ``concatenation`` (one RMSNorm
            over the whole fc input).
        residual: what the first layer adds its attention to: the ``fc`` output itself (``pre_norm``) or
            the ``fc`` output after ``hidden_norm`` (``post_norm``; speculators' ``norm_before_residual``).
        recurrent_state: what the next recurrent pass receives: the draft's state before (``pre_norm``) or
            after (``post_norm``; ``norm_output``) its final norm.
        final_norm: whether the head reads the state through a final norm.
    """

    around_fc: Literal["none", "per_source", "concatenation"] = "none"
    residual: Literal["pre_norm", "post_norm"] = "pre_norm"
    recurrent_state: Literal["pre_norm", "post_norm"] = "pre_norm"
    final_norm: bool = True


@dataclass(frozen=True)
class Latent:
    """What multi-head latent attention has beside its heads (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        q_lora_rank: width that queries are squeezed through; ``None`` where they are projected at once.
        kv_lora_rank: width that keys and values are squeezed through, which is what a cache keeps of them.
        qk_nope_head_dim: width of a query or key head that is not rotated.
        qk_rope_head_dim: width that is; all key heads share it.
        v_head_dim: width of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Attention:
    """The shape of the draft's own decoder layers.

    ``mla`` has ``latent``, as many key heads as query heads, and as ``head_dim`` the whole width of one of them.
    """

    kind: Literal["gqa", "mla"]
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None
    latent: Latent | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: the base.
        scaling: the dialect's object in the ``rope_type`` spelling.
        partial_rotary_factor: the share of a head that is rotated.
        interleaved: whether neighbours are rotated together, rather than element i with element i + width / 2.
    """

    theta: float
    scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class Vocab:
    """Vocabulary sizes and how a draft token id becomes a target token id.

    Attributes:
        map: ``offset`` (``target = draft + d2t[draft]``), ``absolute`` (``target = d2t[draft]``) or
            ``none`` (the same ids).
    """

    target: int
    draft: int
    map: Literal["offset", "absolute", "none"]


@dataclass(frozen=True)
class Verifier:
    """What a checkpoint records about the target it was trained for; ``None`` where it records nothing."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """The acceptance that was measured for this draft when it was known to be served right.

    Attributes:
        accept_length: tokens per verify step.
        accept_per_position: share of verify steps in which draft i was accepted.
        steps: drafts of a chain, or depth of the tree.
        topk: children of a node of the tree.
        draft_tokens: of a verify step.
        verify_steps: how many it rests on, each text counted once; ``None`` where nobody noted it.
    """

    accept_length: float
    accept_per_position: tuple[float, ...]
    steps: int
    topk: int
    draft_tokens: int
    verify_steps: int | None = None


STOCK_STOPS = ("stock stops", "stock refuses")
"""How a sentence on a difference begins where stock does not start at all."""


@dataclass(frozen=True)
class StockView:
    """What stock SGLang 0.5.23 makes of a checkpoint as it lies on disk, before any target is known.

    Attributes:
        ids: the id list that stock finds (it looks into ``eagle_config`` only); ``None`` where it finds
            none and takes its default.
        uses_aux: whether stock captures anything; otherwise the draft reads the state after the final norm.
        loads: whether stock takes the checkpoint for an EAGLE-3 draft at all.
        differences: one sentence for each thing that stock would compute otherwise, its choice of
            boundaries aside; see ``STOCK_STOPS``.
    """

    ids: tuple[int, ...] | None = None
    uses_aux: bool = True
    loads: bool = True
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from the file's header. ``dtype`` in safetensors' spelling (``BF16``)."""

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass(frozen=True)
class DraftSpec:
    """Everything a checkpoint says about how its draft was trained, with the origin of every value.

    Attributes:
        path: the checkpoint's folder.
        format: the dialect that claimed it (``eagle``, ``speculators``, ...).
        architecture: the architecture string of its ``config.json``.
        sources: the states ``fc`` was trained on, as listed (``order`` says whether that is fc column
            order); ``None`` when the checkpoint names none (the plan then takes stock's default and warns).
        sources_place: file and key where they are named, or would be, for messages.
        order: whether ``sources`` stand as listed or are to be sorted ascending.
        layer_ids: what sources of kind ``id`` mean.
        num_sources: number of fc blocks; 0 for a draft without ``fc``.
        target_hidden_size: width of one source.
        fc_in: input width of ``fc``; ``None`` for a draft without ``fc``.
        embed: whose embedding the draft reads.
        lm_head: whose head it ends in; ``tied`` is the embedding that ``embed`` names, the target's included.
        weights: file tensor name -> canonical name (``fc.weight``, ``layers.0.self_attn.q_proj.weight``,
            ``fc_norm.0.weight``, ``input_norm.weight``, ``norm.weight``, ``lm_head.weight``,
            ``embed_tokens.weight``, ``d2t``, ``t2d``; of an MLA layer ``q_a_proj``, ``q_a_layernorm`` and
            ``q_b_proj``, or ``q_proj``, and ``kv_a_proj_with_mqa``, ``kv_a_layernorm``, ``kv_b_proj``,
            ``o_proj``). Tensors without a home are absent from it; a tensor
            that is left out on purpose has a canonical name that starts with ``ignored/``. Every layer has
            ``input_layernorm`` (layer 0: over the embedding; others: before attention), layer 0 alone
            ``hidden_norm``.
        tensors: file tensor name -> header.
        missing: canonical names the model needs and the file lacks.
        origins: field name -> origin.
        findings: problems that can be seen without a target.
        stock: what stock makes of the same files.
    """

    path: str
    format: str
    architecture: str
    sources: tuple[Source, ...] | None
    sources_place: str
    order: Order
    layer_ids: IdMeaning
    num_sources: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    fc_in: int | None
    fc_bias: bool
    mlp_bias: bool
    norms: Norms
    attention: Attention
    rope: Rope
    vocab: Vocab
    embed: Literal["own", "target"]
    lm_head: Literal["own", "target", "tied"]
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    dtype: str | None
    producer: str | None
    verifier: Verifier
    expected: Expected | None
    strict: bool
    has_eagle3_ext: bool
    weights: Mapping[str, str] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    missing: tuple[str, ...]
    origins: Mapping[str, Origin]
    findings: tuple[Finding, ...]
    stock: StockView = StockView()

    @property
    def unconsumed(self) -> tuple[str, ...]:
        """Name the tensors of the file that have no home in the model."""
        return tuple(sorted(set(self.tensors) - set(self.weights)))


@dataclass(frozen=True)
class StockReading:
    """How stock SGLang 0.5.23 reads a plain id list on one target class.

    Attributes:
        ids: ``output`` (id k = boundary k+1), ``boundary`` (id k = boundary k), ``first_is_one``
            (``output`` when the first id is 1, else ``boundary``) or ``max_is_n`` (``boundary`` when the
            largest id is n, else ``output``).
        default_shift: added to the classic default boundaries ``[2, n//2, n-3]``.
        captures_last: whether stock captures boundary n on this class.
        captures_embedding: whether stock captures boundary 0 on this class.
        captures_residual: whether what stock captures above boundary 0 is the residual stream; on a class
            where it is only a layer's own contribution, nothing but boundary 0 comes out right.
    """

    ids: Literal["output", "boundary", "first_is_one", "max_is_n"]
    default_shift: int = 0
    captures_last: bool = False
    captures_embedding: bool = True
    captures_residual: bool = True


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


@dataclass(frozen=True)
class TargetFacts:
    """What the plan needs to know about a target.

    Attributes:
        path: folder or Hub id, for messages.
        architecture: the architecture string of its ``config.json``.
        num_layers: n.
        hidden_size: width of its residual stream.
        vocab_size: rows of its embedding as its config says.
        context: positions it is served with; ``None`` where nothing says.
        reading: how stock reads plain ids on it; ``None`` when stock has no EAGLE-3 capture on it.
    """

    path: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    reading: StockReading | None
    context: int | None = None


@dataclass(frozen=True)
class AssemblyPlan:
    """One draft on one target: what is captured, and where each captured state lands in ``fc``.

    Attributes:
        boundaries: the states in fc column order.
        capture: the same states in the order the target emits them (ascending, ``final_norm`` last).
        block_of: ``block_of[i]`` is the fc block that ``capture[i]`` feeds; the identity when no
            permutation is needed.
        stock_boundaries: what stock would capture for the dialect's own ids on this target, in fc column
            order; ``None`` where stock refuses or loses one.
        stock_ids: the id list with which stock would capture ``capture`` on this target class; ``None``
            where no list does.
        equals_stock: whether stock, given this checkpoint as it lies on disk, computes the same draft.
        differences: one sentence for each thing stock would do otherwise; see ``STOCK_STOPS``.
        origins: field name -> origin, the spec's with the plan's own added.
        findings: the spec's findings and those that need the target.
    """

    spec: DraftSpec
    target: TargetFacts
    boundaries: tuple[Boundary, ...]
    capture: tuple[Boundary, ...]
    block_of: tuple[int, ...]
    stock_boundaries: tuple[Boundary, ...] | None
    stock_ids: tuple[int, ...] | None
    equals_stock: bool
    differences: tuple[str, ...]
    origins: Mapping[str, Origin]
    findings: tuple[Finding, ...]

    @property
    def is_identity(self) -> bool:
        """Say whether ``fc`` can be used as stored."""
        return self.block_of == tuple(range(len(self.block_of)))

    @property
    def stock_starts(self) -> bool:
        """Say whether stock starts with these files as an EAGLE-3 draft, whatever it then computes."""
        return self.spec.stock.loads and not any(sentence.startswith(STOCK_STOPS) for sentence in self.differences)
