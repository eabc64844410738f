"""A checkpoint while it is read in one dialect: what its keys say and where each tensor has its home."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.eagle3_ext import Eagle3Ext
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.keys import read_keys, shown
from sglang_eagle3_ext.spec import IdMeaning, Order, Origin, StockView, Verifier

T = TypeVar("T", bound=msgspec.Struct)

IGNORED = "ignored/"
"""Prefix of the canonical name of a tensor that is left out on purpose."""

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U8")

_INERT = "rotary_emb.inv_freq"
"""Rotary tables are computed from the config; stored ones carry nothing."""

LONGEST = 2**31 - 1
"""The largest size, and the most positions, that a draft can have: SGLang counts in 32 bits."""

LAYER_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)")

_MODEL_DEFAULTS: dict[str, dict[str, float]] = {
    "deepseek_v3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "llama4_text": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "mistral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
}
"""What transformers fills in for a key that a config leaves out, by ``model_type``."""


class LayerConfig(msgspec.Struct, frozen=True):
    """The keys that describe the draft's decoder layers, in Hugging Face's words."""

    model_type: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    intermediate_size_mlp: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_hidden_layers: int | None = None
    vocab_size: int | None = None
    rms_norm_eps: float | None = None
    hidden_act: str | None = None
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    mlp_bias: bool | None = None
    bias: bool | None = None
    tie_word_embeddings: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class LatentConfig(msgspec.Struct, frozen=True):
    """The keys that describe multi-head latent attention, in DeepSeek's words."""

    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool | None = None


@dataclass(frozen=True)
class Dialect:
    """One dialect's reading of one checkpoint.

    Attributes:
        format: name of the dialect.
        architecture: the architecture string.
        layer: the keys of the decoder layers.
        layer_place: ``config.json:`` and the path of the object that holds them, for messages.
        canonical: file tensor name -> canonical name, ``None`` where the dialect knows no home for it.
        target_hidden_size: width of one source, where the dialect says it.
        draft_vocab_size: rows of the head, where the dialect says it.
        ids: the dialect's own id list, as listed.
        ids_place: where that list stands, for messages.
        layer_ids: what an id of the dialect means.
        order: whether the dialect's trainers concatenate as listed or by depth.
        num_aux: the number of sources, where the dialect says it apart from the list.
        uses_aux: whether the draft reads captured states at all.
        fc_norm: its flag for one norm per source; ``None`` where absent.
        norm_before_fc: its flag for one norm over the concatenation.
        norm_output: its flag for recycling the state after the final norm.
        norm_before_residual: its flag for the residual after ``hidden_norm``.
        has_final_norm: whether the head reads the state through a final norm.
        producer: the trainer, where the dialect belongs to one.
        verifier: what the checkpoint records about its target.
        stock: what stock finds in it; sentences common to all dialects are added later.
        latent: the keys of its attention where that is MLA.
        rope_halves: whether its tensors tell a trainer that rotates halves though the key for it is absent.
        dtype_place: where the floating type stands, if not among the keys of the decoder layers.
    """

    format: str
    architecture: str
    layer: LayerConfig
    layer_place: str
    canonical: Callable[[str], str | None]
    target_hidden_size: int | None
    draft_vocab_size: int | None
    ids: tuple[int, ...] | None
    ids_place: str
    layer_ids: IdMeaning
    order: Order
    num_aux: int | None
    uses_aux: bool
    fc_norm: bool | None
    norm_before_fc: bool | None
    norm_output: bool | None
    norm_before_residual: bool | None
    has_final_norm: bool
    producer: str | None
    verifier: Verifier
    stock: StockView
    latent: LatentConfig | None = None
    rope_halves: bool = False
    dtype_place: str | None = None


def convert(folder: Folder, value: Mapping[str, Any], kind: type[T], place: str) -> T:
    """Read an object of a config into a struct; keys that the struct lacks are left alone.

    A value of the wrong type is reported and then taken for absent, so that the rest can be checked as well.

    Args:
        folder: the opened checkpoint; findings are added to it.
        value: the object.
        kind: the struct.
        place: ``config.json:`` and the path of the object, for messages.

    Raises:
        CheckpointError: a key is wrong or missing without which nothing can be read; holds everything found so far.
    """
    read, wrong = read_keys(value, kind)
    for key, text in wrong:
        folder.add("error", "config_type", f"{place}{key}", f"{text}. Correct the value.")
    try:
        return kind(**read)
    except TypeError:  # without a default for what is wrong or missing
        raise CheckpointError.from_findings(folder.findings) from None


# fmt: off
_INERT_KEYS = frozenset((
    "_attn_implementation_autoset", "_name_or_path", "_torchspec_version", "add_cross_attention", "architectures",
    "attention_dropout", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "eagle3_ext", "early_stopping", "embed_requires_grad", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "has_no_defaults_at_init", "id2label", "image_token_id", "initializer_range", "is_decoder", "is_encoder_decoder",
    "label2id", "length_penalty", "max_length", "min_length", "modal_type", "next_layer_regular",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "parallel_draft_heads_num_layers", "parallel_draft_step",
    "parallel_drafting", "prefix", "pretraining_tp", "problem_type", "pruned_heads", "quantization_config",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "speculators_version", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "transformers_version", "typical_p",
    "use_bfloat16", "use_cache", "use_input_layernorm_in_first_layer", "use_mtp_layernorm", "video_token_id",
    "vision_end_token_id", "vision_start_token_id",
))
# fmt: on
"""Keys that transformers writes into every config, that say nothing about the draft's computation, or that
are looked at elsewhere."""


def report_unread(folder: Folder, config: Mapping[str, Any], prefix: str, *kinds: type[msgspec.Struct]) -> None:
    """Report the keys of a config object that nothing reads, so that none is dropped in silence."""
    read = {key for kind in kinds for key in kind.__struct_fields__}
    unread = sorted(set(config) - read - _INERT_KEYS)
    if unread:
        folder.add(
            "info",
            "unread_keys",
            f"config.json:{prefix.rstrip('.') or '(top level)'}",
            f"got {shown(unread, 12)}, which nothing reads; expected keys of this dialect. Check that none of them "
            "changes what the draft computes.",
        )
    if config.get("quantization_config"):
        maps = ("d2t", "t2d")
        plain = all(t.dtype in FLOATS or n.rpartition(".")[2] in maps for n, t in folder.tensors.items())
        folder.add(
            "info" if plain else "warning",
            "quantization_config",
            f"config.json:{prefix}quantization_config",
            "got a quantisation, and all weights are plain floating point numbers, so that it speaks of the target; "
            "they are read as they are stored. Nothing to do."
            if plain
            else "got a quantisation; expected plain floating point weights. Tensors are read as they are stored; use "
            "the unquantised checkpoint.",
        )


@dataclass
class Reading:
    """One checkpoint being read in one dialect.

    Attributes:
        folder: the opened checkpoint; findings are added to it.
        dialect: the dialect's reading of keys and names.
        origins: field name -> where its value came from.
        differences: sentences on what stock would compute otherwise.
        weights: file tensor name -> canonical name.
        by_canonical: the reverse.
        doubled: file tensor names that mean the same as another one, which has been reported.
        unknown: keys of sizes on which everything else hangs and that nothing tells.
    """

    folder: Folder
    dialect: Dialect
    origins: dict[str, Origin] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    by_canonical: dict[str, str] = field(default_factory=dict)
    doubled: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.differences.extend(self.dialect.stock.differences)
        self._check_sizes()
        self._home_tensors()

    @property
    def is_partial(self) -> bool:
        """Whether sizes or all tensors are unknown, so that only what hangs on neither can be checked."""
        return bool(self.unknown or self.folder.unreadable)

    @property
    def layer(self) -> LayerConfig:
        """The keys of the decoder layers."""
        return self.dialect.layer

    @property
    def ext(self) -> Eagle3Ext:
        """The merged ``eagle3_ext`` object."""
        return self.folder.declared.ext

    def _check_sizes(self) -> None:
        """Report sizes that no draft can have, and go on as if they were absent."""
        for name, key, least in (
            ("draft_vocab_size", "draft_vocab_size", 1),
            ("target_hidden_size", "target_hidden_size", 1),
            ("num_aux", "num_aux_hidden_states", 0),
        ):
            value = getattr(self.dialect, name)
            if value is not None and not least <= value <= LONGEST:
                bound = f"least {least}" if value < least else f"most {LONGEST}"
                self.report_value(f"config.json:{key}", value, f"an integer of at {bound}")
                absent: dict[str, Any] = {name: None}
                self.dialect = replace(self.dialect, **absent)
        ids = self.dialect.ids
        if ids is not None and any(abs(i) > LONGEST for i in ids):
            self.report_value(self.dialect.ids_place, list(ids), "numbers of layers")
            self.dialect = replace(self.dialect, ids=None)

    def _home_tensors(self) -> None:
        """Give every tensor of the file its canonical name."""
        for name in self.folder.tensors:
            canonical = IGNORED + name if name.endswith(_INERT) else self.dialect.canonical(name)
            if canonical is None or (canonical.startswith(IGNORED) and canonical != IGNORED + name):
                # A file may spell the prefix itself, which leaves nothing out on purpose.
                continue
            if canonical in self.by_canonical:
                self.doubled.add(name)
                self.folder.add(
                    "error",
                    "tensor_twice",
                    f"{self.folder.tensors[name].file}:{name}",
                    f"means the same as {self.by_canonical[canonical]}; expected each tensor once. Remove one of the "
                    "two.",
                )
                continue
            self.weights[name] = canonical
            self.by_canonical[canonical] = name
        for canonical in sorted(self.by_canonical):
            match = LAYER_NAME.fullmatch(canonical)
            if match is None or match[1] == "0":
                continue
            prefix = f"layers.{match[1]}."
            if match[2] == "hidden_norm.weight":
                self._settle_later_norm(canonical, f"{prefix}input_layernorm.weight")
            elif match[2] == "input_layernorm.weight" and f"{prefix}hidden_norm.weight" not in self.weights.values():
                self.differences.append(f"stock does not apply input_layernorm in layer {match[1]}")

    def _settle_later_norm(self, hidden_norm: str, input_layernorm: str) -> None:
        """Settle which norm a later layer reads its input through; stock calls it ``hidden_norm``."""
        name = self.by_canonical.pop(hidden_norm)
        if input_layernorm in self.by_canonical:
            other = self.by_canonical[input_layernorm]
            self.folder.add(
                "warning",
                "two_input_norms",
                f"{self.folder.tensors[name].file}:{name}",
                f"stands beside {other}, got two norms over one input; {name} was taken, as stock does, and the other "
                "left out. Remove the tensor that training did not use.",
            )
            self.weights[other] = IGNORED + other
            self.by_canonical[IGNORED + other] = other
        self.weights[name] = input_layernorm
        self.by_canonical[input_layernorm] = name

    def shape(self, canonical: str) -> tuple[int, ...] | None:
        """Look up the shape of a tensor by its canonical name."""
        name = self.by_canonical.get(canonical)
        return None if name is None else self.folder.tensors[name].shape

    def size(self, key: str, declared: int | None, *tensors: str) -> int:
        """Take a size from the config, else from the first axis of one of the tensors.

        Where neither tells it, it is reported, and one stands for it, from which nothing is to be concluded.
        """
        positive = self.positive(key, declared)
        if positive is not None:
            self.origins[key] = "config"
            return positive
        for canonical in tensors:
            shape = self.shape(canonical)
            if shape and shape[0] > 0:
                self.origins[key] = "weights"
                return shape[0]
        self.report_incomplete(key)
        return 1

    def positive(self, key: str, declared: int | None) -> int | None:
        """Report a size that no draft can have, and take it for absent."""
        if declared is None or 0 < declared <= LONGEST:
            return declared
        expected = "a positive integer" if declared <= 0 else f"an integer of at most {LONGEST}"
        self.report_value(f"{self.dialect.layer_place}{key}", declared, expected)
        return None

    def report_incomplete(self, key: str) -> None:
        """Report a key without which the draft has no shape, unless what it holds has been reported as wrong."""
        place = f"{self.dialect.layer_place}{key}"
        self.unknown.add(key)
        # A tensor that cannot be read may tell it.
        if not self.folder.unreadable and not self.folder.is_reported(place):
            self.folder.add(
                "error",
                "config_incomplete",
                place,
                "got nothing, and no tensor that tells it; expected a positive integer. Add the key.",
            )

    def default(self, key: str, declared: float | None) -> float:
        """Take a number from the config, else what transformers fills in for the model type."""
        if declared is not None:
            self.origins[key] = "config"
            if 0 < declared <= LONGEST:
                return declared
            place = f"{self.dialect.layer_place}{key}"
            self.report_value(place, declared, f"a positive number of at most {LONGEST}")
        self.origins[key] = "default"
        fallback = _MODEL_DEFAULTS["llama"] | {"rope_theta": 10000.0}
        # Configs of MLA drafts are read with DeepSeek's class, whatever they call themselves (``kimi_k2``).
        kind = self.layer.model_type or "llama" if self.dialect.latent is None else "deepseek_v3"
        return (fallback | _MODEL_DEFAULTS.get(kind, {}))[key]

    def report_value(self, place: str, got: object, expected: str) -> None:
        """Report a value of the right type that no draft can have."""
        text = repr(got)
        text = text if len(text) <= 80 else f"{text[:76]} ..."
        self.folder.add("error", "config_value", place, f"got {text}; expected {expected}. Correct the key.")

    def leave_out(self, canonical: str) -> None:
        """Leave a stored tensor out because ``eagle3_ext`` takes the target's in its place."""
        name = self.by_canonical.pop(canonical, None)
        if name is None:
            return
        self.weights[name] = IGNORED + name
        self.by_canonical[IGNORED + name] = name
        self.folder.add(
            "info",
            "tensor_left_out",
            f"{self.folder.tensors[name].file}:{name}",
            "is stored, and eagle3_ext takes the target's in its place. Nothing to do if that is what was trained.",
        )
        self.differences.append(f"stock loads {name}, which eagle3_ext leaves out")

    def integers(self, name: str, expected: int) -> list[int] | None:
        """Load a vector of integers or flags; ``None`` when shape or type (reported elsewhere) are wrong."""
        info = self.folder.tensors[name]
        if info.shape != (expected,) or info.dtype not in (*INTEGERS, "BOOL"):
            return None
        return self.folder.integers(name)
