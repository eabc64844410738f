"""What all dialects share: from a dialect's reading of its keys and names to a checked ``DraftSpec``.

A dialect says where its keys stand and how its tensors are called (:class:`Dialect`). Everything after that,
the agreement between config, ``eagle3_ext`` and tensors, is the same for all and lives here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.folder import Folder, fatal
from sglang_eagle3_ext.spec import (
    Attention,
    DraftSpec,
    IdMeaning,
    Norms,
    Order,
    Origin,
    Rope,
    Source,
    StockView,
    Verifier,
    Vocab,
)

IGNORED = "ignored/"
"""Prefix of the canonical name of a tensor that is left out on purpose."""

STOCK_ARCHITECTURE = "LlamaForCausalLMEagle3"


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
        stock_architecture: whether stock serves the architecture as an EAGLE-3 draft.
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
    stock_architecture: bool


def convert(value: object, kind: type[msgspec.Struct], place: str) -> Any:
    """Read an object of a config into a struct; keys that the struct lacks are left alone.

    Raises:
        CheckpointError: a value has the wrong type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise fatal(
            "config_type", f"{place}: {error}; expected the type that Hugging Face's configs use. Correct the value."
        ) from error


def inert_tensor(name: str) -> bool:
    """Say whether a tensor is known to carry nothing: rotary tables, which are computed from the config."""
    return name.endswith("rotary_emb.inv_freq")


def shown(names: Sequence[str], limit: int = 6) -> str:
    """Spell a list of names, cut where it gets long."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


_MODEL_DEFAULTS: dict[str, dict[str, float]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "llama4_text": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "mistral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
}
"""What transformers fills in for a key that a config leaves out, by ``model_type``."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")


class Reader:
    """Read one checkpoint in one dialect; every method settles one group of fields."""

    def __init__(self, folder: Folder, dialect: Dialect) -> None:
        self.folder = folder
        self.dialect = dialect
        self.layer = dialect.layer
        self.ext = folder.declared.ext
        self.origins: dict[str, Origin] = {}
        self.differences: list[str] = list(dialect.stock.differences)
        self.weights: dict[str, str] = {}
        self.by_canonical: dict[str, str] = {}

    def read(self) -> DraftSpec:
        """Settle all fields and check them against each other.

        Raises:
            CheckpointError: a size that everything else hangs on is neither in the config nor in a tensor.
        """
        d, folder, declared = self.dialect, self.folder, self.folder.declared
        self._home_tensors()
        hidden_size = self._size("hidden_size", self.layer.hidden_size, "norm.weight", "layers.0.hidden_norm.weight")
        vocab_size = self._size("vocab_size", self.layer.vocab_size, "t2d", "embed_tokens.weight")
        gate = "layers.0.mlp.gate_proj.weight"
        is_llama4 = self.layer.model_type == "llama4_text" and self.layer.intermediate_size_mlp is not None
        declared_intermediate = self.layer.intermediate_size_mlp if is_llama4 else self.layer.intermediate_size
        intermediate_size = self._size("intermediate_size", declared_intermediate, gate)
        self._stop_when_sizeless()

        num_layers = self._num_layers()
        attention = self._attention(hidden_size, num_layers)
        producer = self._producer()
        sources, order, layer_ids = self._sources()
        num_sources, target_hidden_size, fc_in = self._fc(hidden_size, sources)
        norms = self._norms()
        vocab = self._vocab(vocab_size)
        embed = self._embed(hidden_size, target_hidden_size)
        lm_head = self._lm_head(vocab, hidden_size, target_hidden_size)
        rope = self._rope()
        fc_bias = "fc.bias" in self.by_canonical
        mlp_bias = any(f"layers.0.mlp.{p}_proj.bias" in self.by_canonical for p in ("gate", "up", "down"))
        self._stock_biases(fc_bias, mlp_bias, attention)

        expected_shapes = dict(
            self._shapes(
                hidden_size, intermediate_size, num_sources, target_hidden_size, fc_in, fc_bias, mlp_bias, norms,
                attention, vocab, embed, lm_head,
            )
        )  # fmt: skip
        missing = self._check_tensors(expected_shapes)
        self._check_map_values(vocab)
        dtype = self._dtype()
        self._stock_fc(fc_in, hidden_size)

        ext = self.ext
        return DraftSpec(
            path=str(folder.path),
            format=d.format,
            architecture=d.architecture,
            sources=sources,
            order=order,
            layer_ids=layer_ids,
            num_sources=num_sources,
            target_hidden_size=target_hidden_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            fc_in=fc_in,
            fc_bias=fc_bias,
            mlp_bias=mlp_bias,
            norms=norms,
            attention=attention,
            rope=rope,
            vocab=vocab,
            embed=embed,
            lm_head=lm_head,
            rms_norm_eps=float(self._default("rms_norm_eps", self.layer.rms_norm_eps)),
            hidden_act=self.layer.hidden_act or "silu",
            max_position_embeddings=int(
                self._default("max_position_embeddings", self.layer.max_position_embeddings)
            ),
            dtype=dtype,
            producer=producer,
            verifier=d.verifier,
            expected=None if isinstance(ext.expected, msgspec.UnsetType) else ext.expected.freeze(),
            strict=ext.strict is True,
            has_eagle3_ext=declared.present,
            weights=self.weights,
            tensors=folder.tensors,
            missing=missing,
            origins=self.origins,
            findings=tuple(folder.findings),
            stock=StockView(d.stock.ids, d.stock.uses_aux, tuple(self.differences)),
        )

    # Names and sizes

    def _home_tensors(self) -> None:
        """Give every tensor of the file its canonical name."""
        for name in self.folder.tensors:
            canonical = IGNORED + name if inert_tensor(name) else self.dialect.canonical(name)
            if canonical is None:
                continue
            if canonical in self.by_canonical:
                self.folder.add(
                    "error",
                    "tensor_twice",
                    f"{self.folder.tensors[name].file}:{name}",
                    f"means the same as {self.by_canonical[canonical]}; expected each tensor once. Remove one of the two.",
                )
                continue
            self.weights[name] = canonical
            self.by_canonical[canonical] = name
        for canonical in sorted(self.by_canonical):
            match = _LAYER_NAME.fullmatch(canonical)
            if match and match[1] != "0" and match[2] == "hidden_norm.weight":
                self._settle_later_norm(canonical, f"layers.{match[1]}.input_layernorm.weight")

    def _settle_later_norm(self, hidden_norm: str, input_layernorm: str) -> None:
        """Settle which norm a layer after the first reads its input through; stock calls it ``hidden_norm``."""
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

    def _shape(self, canonical: str) -> tuple[int, ...] | None:
        """Look up the shape of a tensor by its canonical name."""
        name = self.by_canonical.get(canonical)
        return None if name is None else self.folder.tensors[name].shape

    def _size(self, key: str, declared: int | None, *tensors: str) -> int:
        """Take a size from the config, else from the first axis of one of the tensors, else report it (0)."""
        if declared is not None and declared > 0:
            self.origins[key] = "config"
            return declared
        for canonical in tensors:
            shape = self._shape(canonical)
            if shape:
                self.origins[key] = "weights"
                return shape[0]
        self.folder.add(
            "error",
            "config_incomplete",
            f"{self.dialect.layer_place}{key}",
            f"got {declared!r}, and no tensor that tells it; expected a positive integer. Add the key.",
        )
        return 0

    def _stop_when_sizeless(self) -> None:
        if any(f.code == "config_incomplete" for f in self.folder.findings):
            raise CheckpointError.from_findings(self.folder.findings)

    def _default(self, key: str, declared: float | None) -> float:
        """Take a number from the config, else what transformers fills in for the model type."""
        if declared is not None:
            self.origins[key] = "config"
            return declared
        self.origins[key] = "default"
        fallback = _MODEL_DEFAULTS["llama"] | {"rope_theta": 10000.0}
        return (fallback | _MODEL_DEFAULTS.get(self.layer.model_type or "llama", {}))[key]

    def _num_layers(self) -> int:
        """Count the layers that are there; a number copied from the target is reported and not believed."""
        found = {int(m[1]) for name in self.by_canonical if (m := _LAYER_NAME.fullmatch(name))}
        declared = self.layer.num_hidden_layers
        count = max(found) + 1 if found else (declared or 1)
        self.origins["num_layers"] = "weights" if found else "config"
        if declared is not None and declared != count:
            self.folder.add(
                "warning",
                "layer_count",
                f"{self.dialect.layer_place}num_hidden_layers",
                f"got {declared}, the file holds {count} layer{'s' * (count != 1)}; expected both to agree. The file was "
                "believed; correct the key.",
            )
            self.differences.append(
                f"stock builds {declared} layers, of which the file fills {min(count, declared)}"
            )
        return count

    # Attention

    def _attention(self, hidden_size: int, num_layers: int) -> Attention:
        layer, prefix = self.layer, "layers.0.self_attn."
        q_shape, k_shape = self._shape(f"{prefix}q_proj.weight"), self._shape(f"{prefix}k_proj.weight")
        heads, head_dim = layer.num_attention_heads, layer.head_dim
        self.origins["heads"] = self.origins["head_dim"] = "config"
        if heads is None and q_shape and head_dim:
            heads = q_shape[0] // head_dim
            self.origins["heads"] = "weights"
        if not heads or heads < 0 or (head_dim is not None and head_dim <= 0):
            self.folder.add(
                "error",
                "config_incomplete",
                f"{self.dialect.layer_place}num_attention_heads",
                f"got {layer.num_attention_heads!r} with head_dim {head_dim!r}; expected positive integers. Add the key.",
            )
            self._stop_when_sizeless()
            raise AssertionError  # unreachable: the line above raises
        if head_dim is None:
            usual = hidden_size // heads
            head_dim = q_shape[0] // heads if q_shape and q_shape[0] % heads == 0 else usual
            self.origins["head_dim"] = "default" if head_dim == usual else "weights"
            if head_dim != usual:
                self.differences.append(f"stock takes head_dim {usual}, hidden_size over heads")
        kv_heads = layer.num_key_value_heads
        self.origins["kv_heads"] = "config"
        if kv_heads is None:
            kv_heads = k_shape[0] // head_dim if k_shape and k_shape[0] % head_dim == 0 else heads
            self.origins["kv_heads"] = "weights" if k_shape else "default"
        if kv_heads <= 0 or heads % kv_heads:
            self.folder.add(
                "error",
                "head_count",
                f"{self.dialect.layer_place}num_key_value_heads",
                f"got {kv_heads} for {heads} heads; expected a divisor. Correct the key.",
            )
        names = [f"layers.{i}.self_attn." for i in range(num_layers)]
        qk_norm = any(f"{n}{p}_norm.weight" in self.by_canonical for n in names for p in "qk")
        qkv_bias = any(f"{n}{p}_proj.bias" in self.by_canonical for n in names for p in "qkv")
        o_bias = any(f"{n}o_proj.bias" in self.by_canonical for n in names)
        if qk_norm:
            self.differences.append("stock drops the q and k norms of the draft's attention")
        return Attention(
            kind="gqa",
            num_layers=num_layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            sliding_window=self._sliding_window(num_layers),
        )

    def _sliding_window(self, num_layers: int) -> int | None:
        """Settle whether the draft's attention is windowed; a bare number does not say so."""
        layer, place = self.layer, f"{self.dialect.layer_place}sliding_window"
        if layer.sliding_window is None or layer.use_sliding_window is False:
            return None
        if layer.layer_types is not None:
            kinds = {kind == "sliding_attention" for kind in layer.layer_types[:num_layers]}
            if kinds == {True, False}:
                self.folder.add(
                    "error",
                    "sliding_window_mixed",
                    f"{self.dialect.layer_place}layer_types",
                    f"got {layer.layer_types[:num_layers]}; expected one kind of attention in all layers of the draft. "
                    "Such a draft cannot be served.",
                )
            windowed = kinds == {True}
        elif layer.use_sliding_window:
            windowed = layer.max_window_layers is None or layer.max_window_layers < num_layers
        else:
            windowed = False
            self.folder.add(
                "warning",
                "sliding_window_unclear",
                place,
                f"got {layer.sliding_window} without use_sliding_window or layer_types; full attention was taken, as "
                "stock does. Set use_sliding_window to say which it is.",
            )
        if windowed:
            self.folder.add(
                "warning",
                "sliding_window",
                place,
                f"got {layer.sliding_window}, which SGLang does not read; expected the flag on the command line. "
                f"Serve with --speculative-draft-window-size {layer.sliding_window}.",
            )
            self.differences.append("stock attends to the whole context unless --speculative-draft-window-size is given")
        return layer.sliding_window if windowed else None

    # Sources and fc

    def _producer(self) -> str | None:
        if isinstance(self.ext.producer, str):
            self.origins["producer"] = self.folder.declared.origins["producer"]
            return self.ext.producer
        if self.dialect.producer is not None:
            self.origins["producer"] = "config"
        return self.dialect.producer

    def _sources(self) -> tuple[tuple[Source, ...] | None, Order, IdMeaning]:
        """Settle the sources, the order of their columns and what plain ids mean."""
        d, declared, ext = self.dialect, self.folder.declared, self.ext
        order, layer_ids = d.order, d.layer_ids
        self.origins["order"] = self.origins["layer_ids"] = "default"
        if declared.producer is not None:
            layer_ids, order = declared.producer.layer_ids, declared.producer.order
            self.origins["order"] = self.origins["layer_ids"] = declared.origins["producer"]
        if declared.sources is not None:
            order = "as_listed"
            self.origins["order"] = "default"
        if not isinstance(ext.order, msgspec.UnsetType):
            order = ext.order
            self.origins["order"] = declared.origins["order"]
        if not isinstance(ext.layer_ids, msgspec.UnsetType):
            layer_ids = ext.layer_ids
            self.origins["layer_ids"] = declared.origins["layer_ids"]

        if declared.sources is not None:
            self.origins["sources"] = declared.origins["sources"]
            return declared.sources, order, layer_ids
        if not d.uses_aux:
            self.origins["sources"] = "config"
            return (Source("final_norm", None, "final_norm"),), order, layer_ids
        if d.ids is None:
            self.origins["sources"] = "default"
            return None, order, layer_ids
        self.origins["sources"] = "config"
        if list(d.ids) != sorted(d.ids):
            how = "in that order" if order == "as_listed" else "in ascending order, as engines emit them"
            self.folder.add(
                "warning",
                "unsorted_ids",
                d.ids_place,
                f"got {list(d.ids)}, which is not ascending; the columns of fc were taken {how}. "
                'Settle it with "eagle3_ext": {"order": "as_listed"} or "ascending".',
            )
        return tuple(Source("id", i, f"id {i}") for i in d.ids), order, layer_ids

    def _fc(self, hidden_size: int, sources: tuple[Source, ...] | None) -> tuple[int, int, int | None]:
        """Settle the number of sources, their width and the input width of ``fc``."""
        d, declared = self.dialect, self.folder.declared
        shape = self._shape("fc.weight")
        width = d.target_hidden_size or hidden_size
        self.origins["target_hidden_size"] = "config" if d.target_hidden_size else self.origins["hidden_size"]
        if not d.uses_aux and declared.sources is None:
            self.origins["num_sources"] = "config"
            if shape is not None:
                self.folder.add(
                    "error",
                    "aux_flag_disagrees",
                    "config.json:eagle_config.use_aux_hidden_state",
                    "got false beside a stored fc.weight, which would then never run; expected one of the two. Set it to "
                    'true, or declare the input of fc: "eagle3_ext": {"sources": [...]}.',
                )
            elif width != hidden_size:
                self.folder.add(
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
            self.folder.add(
                "error",
                "source_count_disagrees",
                "config.json:num_aux_hidden_states",
                f"got {d.num_aux} beside {len(sources or ())} ids; expected both to agree. Correct one of the two.",
            )
        expected = next(iter(said.values()), None)
        if shape is None or len(shape) != 2:
            count = expected or 3
            self.origins["num_sources"] = "config" if expected else "default"
            return count, width, count * width
        fc_in = shape[1]
        self.origins["num_sources"] = "weights"
        if fc_in % width:
            if d.target_hidden_size is None and expected and fc_in % expected == 0:
                # The width of the target is nowhere else in the checkpoint; the plan compares it with the target.
                self.origins["target_hidden_size"] = "weights"
                return expected, fc_in // expected, fc_in
            self.folder.add(
                "error",
                "fc_width",
                f"{self.folder.tensors[self.by_canonical['fc.weight']].file}:fc.weight",
                f"got {fc_in} input columns, which is no multiple of the target's width {width}; expected one block per "
                "source. Set target_hidden_size to the target's hidden_size.",
            )
            return expected or 3, width, fc_in
        count = fc_in // width
        if expected is not None and count != expected:
            which = "sources" if sources is not None else "num_aux_hidden_states"
            self.folder.add(
                "error",
                "fc_width",
                f"{self.folder.tensors[self.by_canonical['fc.weight']].file}:fc.weight",
                f"reads {fc_in} = {count} x {width} columns, got {expected} {which}; expected {count} sources of width "
                f"{width}. Declare as many sources as fc was trained on, or set target_hidden_size.",
            )
        return count, width, fc_in

    def _stock_fc(self, fc_in: int | None, hidden_size: int) -> None:
        """Note where stock sizes ``fc`` otherwise than the file."""
        d = self.dialect
        count = d.num_aux or (len(d.stock.ids) if d.stock.ids else 3)
        width = (d.target_hidden_size or hidden_size) * count
        if fc_in is not None and fc_in != width:
            self.differences.append(f"stock builds fc for {width} input columns, the file has {fc_in}")

    # Norms

    def _norms(self) -> Norms:
        return Norms(
            around_fc=self._around_fc(),
            residual=self._residual(),
            recurrent_state=self._recurrent_state(),
            final_norm=self._final_norm(),
        )

    def _around_fc(self) -> Literal["none", "per_source", "concatenation"]:
        d, ext = self.dialect, self.ext
        flags = [n for n, on in (("fc_norm", d.fc_norm), ("norm_before_fc", d.norm_before_fc)) if on]
        if not isinstance(ext.norms, msgspec.UnsetType):
            self.origins["norms"] = self.folder.declared.origins["norms"]
            flagged = {"fc_norm": "per_source", "norm_before_fc": "concatenation"}
            if [flagged[f] for f in flags] != ([] if ext.norms == "none" else [ext.norms]):
                self.differences.append(f"stock normalises around fc by the flags {flags}")
            return ext.norms
        if len(flags) == 2:
            self.folder.add(
                "error",
                "norms_clash",
                "config.json:norm_before_fc",
                "got true beside fc_norm; expected at most one kind of norm around fc. Correct the flags, or set "
                '"eagle3_ext": {"norms": ...}.',
            )
        stored = {
            "fc_norm": any(name.startswith("fc_norm.") for name in self.by_canonical),
            "norm_before_fc": "input_norm.weight" in self.by_canonical,
        }
        for flag, has_tensor in stored.items():
            if has_tensor and flag not in flags:
                self.folder.add(
                    "error",
                    "norm_flag_missing",
                    f"config.json:{flag}",
                    f"is not set, got a tensor for it ({'fc_norm.N' if flag == 'fc_norm' else 'input_norm'}.weight); "
                    "expected flag and tensor together. Set the flag, or remove the tensor.",
                )
        self.origins["norms"] = "config" if flags else "weights" if any(stored.values()) else "default"
        if "fc_norm" in flags or (not flags and stored["fc_norm"]):
            return "per_source"
        return "concatenation" if flags or stored["norm_before_fc"] else "none"

    def _residual(self) -> Literal["pre_norm", "post_norm"]:
        d, ext = self.dialect, self.ext
        if not isinstance(ext.residual, msgspec.UnsetType):
            self.origins["residual"] = self.folder.declared.origins["residual"]
            value = ext.residual
        else:
            self.origins["residual"] = "default" if d.norm_before_residual is None else "config"
            value = "post_norm" if d.norm_before_residual else "pre_norm"
        if value == "post_norm":
            self.differences.append("stock adds attention to the fc output before hidden_norm, not after it")
        return value

    def _recurrent_state(self) -> Literal["pre_norm", "post_norm"]:
        d, ext, declared = self.dialect, self.ext, self.folder.declared
        stock = "post_norm" if d.norm_output else "pre_norm"
        value: Literal["pre_norm", "post_norm"] = "post_norm" if d.norm_output else "pre_norm"
        self.origins["recurrent_state"] = "default" if d.norm_output is None else "config"
        if not isinstance(ext.recurrent_state, msgspec.UnsetType):
            value = ext.recurrent_state
            self.origins["recurrent_state"] = declared.origins["recurrent_state"]
        elif declared.producer is not None and not declared.producer.norm_output_recycles:
            value = "pre_norm"
            self.origins["recurrent_state"] = declared.origins["producer"]
        elif d.norm_output and d.producer is None and declared.producer is None:
            self.folder.add(
                "warning",
                "norm_output_two_meanings",
                "config.json:norm_output",
                "got true, which SpecForge writes for drafts that recycle the state before the final norm and other "
                "trainers for the state after it; the latter was taken, as stock does. Settle it with "
                '"eagle3_ext": {"producer": ...} or {"recurrent_state": ...}.',
            )
        if value != stock:
            self.differences.append(f"stock recycles the {stock.replace('_', '-')} state")
        return value

    def _final_norm(self) -> bool:
        d, producer = self.dialect, self.folder.declared.producer
        present = d.has_final_norm
        self.origins["final_norm"] = "default" if present else "config"
        if producer is not None and not producer.norm_output_recycles and d.norm_output is False:
            present = False
            self.origins["final_norm"] = self.folder.declared.origins["producer"]
            if "norm.weight" in self.by_canonical:
                name = self.by_canonical.pop("norm.weight")
                self.weights[name] = IGNORED + name
                self.by_canonical[IGNORED + name] = name
        elif not present and "norm.weight" in self.by_canonical:
            self.folder.add(
                "error",
                "norm_flag_missing",
                "config.json:use_last_layernorm",
                "got false beside a stored norm.weight; expected flag and tensor together. Correct one of the two.",
            )
            present = True
        if not present:
            self.differences.append("stock applies a final norm before the head")
        return present

    # Vocabulary, embedding and head

    def _vocab(self, vocab_size: int) -> Vocab:
        d, ext = self.dialect, self.ext
        self.origins["draft_vocab_size"] = "config"
        draft = d.draft_vocab_size
        if draft is None:
            rows = self._shape("lm_head.weight") or self._shape("d2t")
            draft = rows[0] if rows else vocab_size
            self.origins["draft_vocab_size"] = "weights" if rows else "default"
        self.origins["vocab_map"] = "default"
        has_map = "d2t" in self.by_canonical
        kind: Literal["offset", "absolute", "none"] = "offset" if has_map else "none"
        if has_map and not isinstance(ext.vocab_map, msgspec.UnsetType):
            kind = ext.vocab_map
            self.origins["vocab_map"] = self.folder.declared.origins["vocab_map"]
        if kind == "absolute":
            self.differences.append("stock reads d2t as offsets, not as target ids")
        if not isinstance(ext.vocab_map, msgspec.UnsetType) and not has_map:
            self.folder.add(
                "error",
                "vocab_map_missing",
                "config.json:eagle3_ext.vocab_map",
                f"got {ext.vocab_map!r}, and the file has no d2t; expected the map that it speaks of. Remove the key.",
            )
        elif draft != vocab_size and not has_map:
            self.folder.add(
                "error",
                "vocab_map_missing",
                "config.json:draft_vocab_size",
                f"got {draft} of {vocab_size} and no d2t tensor, so that draft ids cannot be turned into target ids; "
                "expected d2t. Export the draft again with its vocabulary map.",
            )
        if draft > vocab_size:
            self.folder.add(
                "error",
                "vocab_rows",
                "config.json:draft_vocab_size",
                f"got {draft} for a target vocabulary of {vocab_size}; expected at most that. Correct the key.",
            )
        return Vocab(vocab_size, draft, kind)

    def _embed(self, hidden_size: int, target_hidden_size: int) -> Literal["own", "target"]:
        ext, has = self.ext, "embed_tokens.weight" in self.by_canonical
        self.origins["embed"] = "weights"
        if not isinstance(ext.embed, msgspec.UnsetType):
            self.origins["embed"] = self.folder.declared.origins["embed"]
            if ext.embed == "target":
                self._leave_out("embed_tokens.weight")
            value = ext.embed
        else:
            # A target's embedding of another width fits nowhere: the draft needs its own.
            value = "own" if has or target_hidden_size != hidden_size else "target"
        shared = self.dialect.target_hidden_size in (None, hidden_size)
        if value == "own" and shared:
            self.differences.append("stock puts the target's embedding in the place of the draft's own")
        return value

    def _lm_head(
        self, vocab: Vocab, hidden_size: int, target_hidden_size: int
    ) -> Literal["own", "target", "tied"]:
        ext, has, tie = self.ext, "lm_head.weight" in self.by_canonical, self.layer.tie_word_embeddings
        self.origins["lm_head"] = "weights"
        full = vocab.draft == vocab.target
        value: Literal["own", "target", "tied"]
        if not isinstance(ext.lm_head, msgspec.UnsetType):
            self.origins["lm_head"] = self.folder.declared.origins["lm_head"]
            value = ext.lm_head
            if value == "target":
                self._leave_out("lm_head.weight")
        elif has:
            value = "own"
        elif tie and full:
            self.origins["lm_head"] = "config"
            value = "tied"
        else:
            value = "target"
        if has and value == "own" and tie:
            self.folder.add(
                "warning",
                "tied_with_head",
                f"{self.dialect.layer_place}tie_word_embeddings",
                "got true beside a stored lm_head.weight; expected false. The stored head is used; correct the key.",
            )
            self.differences.append("stock ties the head to the embedding and drops the stored one")
        if value == "target" and not full:
            self.folder.add(
                "error",
                "head_missing",
                "config.json:draft_vocab_size",
                f"got {vocab.draft} of {vocab.target} without a head of the draft's own; expected lm_head.weight of "
                f"{vocab.draft} rows, which the target's head cannot stand in for. Export the draft again with its head.",
            )
        elif value == "target" and target_hidden_size != hidden_size:
            self.folder.add(
                "error",
                "head_missing",
                "config.json:target_hidden_size",
                f"got {target_hidden_size} for a draft of width {hidden_size} without a head of its own; expected "
                "lm_head.weight, since the target's has another width. Export the draft again with its head.",
            )
        elif value == "target" and not has:
            self.folder.add(
                "info",
                "head_from_target",
                "config.json:draft_vocab_size",
                f"covers the whole vocabulary ({vocab.target}) and the file has no lm_head.weight; the target's head is "
                "used. Nothing to do if the draft was trained so.",
            )
        if value == "target" and self.dialect.draft_vocab_size is not None:
            self.differences.append("stock leaves the head random, since draft_vocab_size is given and no head stored")
        return value

    def _leave_out(self, canonical: str) -> None:
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

    def _check_map_values(self, vocab: Vocab) -> None:
        """Check that the vocabulary map gives every draft token another token of the target."""
        name = self.by_canonical.get("d2t")
        t2d_name = self.by_canonical.get("t2d")
        t2d = self._integers(t2d_name, vocab.target) if t2d_name else None
        if name is None:
            return
        d2t = self._integers(name, vocab.draft)
        if d2t is None:
            return
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
            self.folder.add(
                "error",
                code,
                f"{self.folder.tensors[name].file}:{name}",
                f"read as {vocab.map}, {text}; expected every draft token to be another token of the target. {advice}",
            )
        elif vocab.draft == vocab.target and targets == list(range(vocab.target)):
            self.folder.add(
                "info",
                "identity_map",
                f"{self.folder.tensors[name].file}:{name}",
                "maps every token to itself; it changes nothing. Nothing to do.",
            )

    def _integers(self, name: str, expected: int) -> list[int] | None:
        """Load a vector of integers or flags; ``None`` when shape or type (reported elsewhere) are wrong."""
        info = self.folder.tensors[name]
        if info.shape != (expected,) or info.dtype not in (*_INTEGERS, "BOOL"):
            return None
        return [int(value) for value in self.folder.values(name).tolist()]

    # Rope, biases, dtype

    def _rope(self) -> Rope:
        declared = self.folder.declared
        stored = self._stored_rope()
        theta, scaling = stored.theta, stored.scaling
        if not isinstance(self.ext.rope_theta, msgspec.UnsetType):
            theta = float(self.ext.rope_theta)
            self.origins["rope_theta"] = declared.origins["rope_theta"]
        if not isinstance(self.ext.rope_scaling, msgspec.UnsetType):
            scaling = self._scaling(self.ext.rope_scaling, "config.json:eagle3_ext.rope_scaling")
            self.origins["rope_scaling"] = declared.origins["rope_scaling"]
        if (theta, scaling) != (stored.theta, stored.scaling):
            self.differences.append(f"stock turns the rotary embedding with theta {stored.theta:g} and the config's scaling")
        return Rope(theta, scaling, stored.partial_rotary_factor)

    def _stored_rope(self) -> Rope:
        """Read the three spellings of rope; where two of them disagree, stock's choice is kept and reported."""
        layer, place = self.layer, self.dialect.layer_place
        new = layer.rope_parameters
        old = layer.rope_scaling
        if new is not None and any(isinstance(value, Mapping) for value in new.values()):
            self.folder.add(
                "error",
                "rope_per_layer_type",
                f"{place}rope_parameters",
                f"got one object per layer type ({', '.join(new)}); expected one rope for the draft. "
                'Set "eagle3_ext": {"rope_theta": ..., "rope_scaling": ...}.',
            )
            new = {key: value for key, value in new.items() if not isinstance(value, Mapping)}
        scaling = self._scaling(new if new is not None else old, f"{place}{'rope_parameters' if new is not None else 'rope_scaling'}")
        if new is not None and old is not None and self._scaling(old, f"{place}rope_scaling") != scaling:
            self.folder.add(
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
            self.folder.add(
                "warning",
                "rope_clash",
                f"{place}rope_theta",
                f"got {', '.join(f'{t:g}' for t in thetas)} at different places; expected one. {thetas[0]:g} was taken. "
                'Settle it with "eagle3_ext": {"rope_theta": ...}.',
            )
        theta = float(self._default("rope_theta", thetas[0] if thetas else None))
        self.origins["rope_scaling"] = "config" if scaling is not None else "default"
        partial = layer.partial_rotary_factor
        if partial is None and new is not None and isinstance(new.get("partial_rotary_factor"), int | float):
            partial = float(new["partial_rotary_factor"])
            if partial != 1.0:
                self.differences.append("stock turns whole heads, since partial_rotary_factor stands in rope_parameters")
        return Rope(theta, scaling, 1.0 if partial is None else float(partial))

    def _scaling(self, stored: Mapping[str, Any] | None, place: str) -> Mapping[str, Any] | None:
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
        elif kind not in _ROPE_NEEDS:
            self.folder.add(
                "error",
                "rope_type",
                place,
                f"got rope_type {kind!r}; expected one of {', '.join(_ROPE_NEEDS)}. Correct the key, or set "
                '"eagle3_ext": {"rope_scaling": ...}.',
            )
        else:
            absent = [
                "/".join(keys) for keys in _ROPE_NEEDS[kind] if not any(scaling.get(k) is not None for k in keys)
            ]
            if absent:
                self.folder.add(
                    "error",
                    "rope_type",
                    place,
                    f"got rope_type {kind!r} without {', '.join(absent)}; expected these keys. Add them.",
                )
        return scaling

    def _stock_biases(self, fc_bias: bool, mlp_bias: bool, attention: Attention) -> None:
        """Report flags for biases that the file lacks, and note the biases that stock drops."""
        layer, place = self.layer, self.dialect.layer_place
        for flag, value, stored in (
            ("attention_bias", layer.attention_bias, attention.qkv_bias or attention.o_bias),
            ("qkv_bias", layer.qkv_bias, attention.qkv_bias),
            ("mlp_bias", layer.mlp_bias, mlp_bias),
            ("bias", layer.bias, fc_bias),
        ):
            if value and not stored:
                self.folder.add(
                    "warning",
                    "bias_absent",
                    f"{place}{flag}",
                    "got true, and the file holds no such bias; expected both to agree. The draft is read without it; "
                    "correct the key.",
                )
        if attention.qkv_bias:
            self.differences.append("stock drops the biases of q, k and v")
        if mlp_bias:
            self.differences.append("stock drops the biases of the MLP")
        if fc_bias != bool(layer.bias):
            self.differences.append(f"stock builds fc {'without the stored' if fc_bias else 'with a random'} bias")
        stock_o_bias = bool(layer.attention_bias or layer.bias)
        if attention.o_bias != stock_o_bias:
            how = "without the stored" if attention.o_bias else "with a random"
            self.differences.append(f"stock builds o_proj {how} bias")

    def _dtype(self) -> str | None:
        """Settle the floating type, and refuse weights that are not floating numbers."""
        integers = {"d2t", "t2d"}
        odd = [
            f"{name} ({self.folder.tensors[name].dtype})"
            for name, canonical in self.weights.items()
            if canonical not in integers
            and not canonical.startswith(IGNORED)
            and self.folder.tensors[name].dtype not in _FLOATS
        ]
        if odd:
            self.folder.add(
                "error",
                "weight_dtype",
                f"{self.folder.path.name}",
                f"got {shown(odd)}; expected floating point weights ({', '.join(_FLOATS)}). Quantised drafts cannot be "
                "read; use the unquantised checkpoint.",
            )
        for canonical in sorted(integers & set(self.by_canonical)):
            info = self.folder.tensors[self.by_canonical[canonical]]
            allowed = (*_INTEGERS, "BOOL") if canonical == "t2d" else _INTEGERS
            if info.dtype not in allowed:
                self.folder.add(
                    "error",
                    "weight_dtype",
                    f"{info.file}:{canonical}",
                    f"got {info.dtype}; expected integers{' or flags' * (canonical == 't2d')}. Export the map again.",
                )
        said = self.layer.dtype or self.layer.torch_dtype
        self.origins["dtype"] = "config" if said else "weights"
        if said:
            return said.removeprefix("torch.")
        names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        matrix = next((n for c, n in self.by_canonical.items() if c.endswith("q_proj.weight")), None)
        return names.get(self.folder.tensors[matrix].dtype) if matrix else None

    # Tensors against sizes

    def _shapes(
        self,
        hidden: int,
        intermediate: int,
        num_sources: int,
        target_hidden: int,
        fc_in: int | None,
        fc_bias: bool,
        mlp_bias: bool,
        norms: Norms,
        attention: Attention,
        vocab: Vocab,
        embed: str,
        lm_head: str,
    ) -> Iterable[tuple[str, tuple[int, ...]]]:
        """List the canonical name and the shape of every tensor that the draft needs."""
        if fc_in is not None:
            yield "fc.weight", (hidden, fc_in)
            if fc_bias:
                yield "fc.bias", (hidden,)
            if norms.around_fc == "per_source":
                yield from ((f"fc_norm.{i}.weight", (target_hidden,)) for i in range(num_sources))
            elif norms.around_fc == "concatenation":
                yield "input_norm.weight", (fc_in,)
        if norms.final_norm:
            yield "norm.weight", (hidden,)
        if lm_head == "own":
            yield "lm_head.weight", (vocab.draft, hidden)
        if embed == "own":
            yield "embed_tokens.weight", (vocab.target, hidden)
        if vocab.map != "none":
            yield "d2t", (vocab.draft,)
        query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        for i in range(attention.num_layers):
            prefix, width = f"layers.{i}.", 2 * hidden if i == 0 else hidden
            yield f"{prefix}input_layernorm.weight", (hidden,)
            if i == 0:
                yield f"{prefix}hidden_norm.weight", (hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
            for name, rows in (("q", query), ("k", key), ("v", key)):
                yield f"{prefix}self_attn.{name}_proj.weight", (rows, width)
                if attention.qkv_bias:
                    yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
            if attention.o_bias:
                yield f"{prefix}self_attn.o_proj.bias", (hidden,)
            if attention.qk_norm:
                yield f"{prefix}self_attn.q_norm.weight", (attention.head_dim,)
                yield f"{prefix}self_attn.k_norm.weight", (attention.head_dim,)
            for name, rows, columns in (
                ("gate", intermediate, hidden),
                ("up", intermediate, hidden),
                ("down", hidden, intermediate),
            ):
                yield f"{prefix}mlp.{name}_proj.weight", (rows, columns)
                if mlp_bias:
                    yield f"{prefix}mlp.{name}_proj.bias", (rows,)

    def _check_tensors(self, expected: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Account for every tensor of the file and of the model; return the canonical names that are missing."""
        tensors = self.folder.tensors
        allowed = expected.keys() | {"t2d"}
        for name, canonical in list(self.weights.items()):
            if canonical not in allowed and not canonical.startswith(IGNORED):
                del self.weights[name]
                del self.by_canonical[canonical]
        unconsumed = sorted(set(tensors) - set(self.weights))
        if unconsumed:
            self.folder.add(
                "error",
                "unconsumed_tensor",
                tensors[unconsumed[0]].file,
                f"got {shown(unconsumed)}, which the draft as described has no place for; expected every tensor to be "
                "used. Correct the config so that it describes them, or remove them.",
            )
        missing = tuple(name for name in expected if name not in self.by_canonical)
        # These have a message of their own that says more.
        explained = {"head_missing": "lm_head.weight", "vocab_map_missing": "d2t"}
        said = {explained[f.code] for f in self.folder.findings if f.code in explained}
        if unexplained := [name for name in missing if name not in said]:
            self.folder.add(
                "error",
                "missing_tensor",
                "weights",
                f"the draft as described needs {shown(unexplained)}, got no such tensor; expected all of them. "
                "Export the draft again, or correct the config.",
            )
        sizes = {**expected, **({"t2d": (self.layer.vocab_size,)} if self.layer.vocab_size else {})}
        for canonical, shape in sizes.items():
            name = self.by_canonical.get(canonical)
            if name is not None and tensors[name].shape != shape:
                self.folder.add(
                    "error",
                    "tensor_shape",
                    f"{tensors[name].file}:{name}",
                    f"got {list(tensors[name].shape)}; expected {list(shape)} from the config. Correct the sizes in the "
                    "config, or export the draft again.",
                )
        return missing


_ROPE_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "default": (),
    "linear": (("factor",),),
    "dynamic": (("factor", "alpha"),),
    "yarn": (("factor",),),
    "deepseek_yarn": (("factor",),),
    "llama3": (("factor",), ("low_freq_factor",), ("high_freq_factor",), ("original_max_position_embeddings",)),
    "longrope": (("short_factor",), ("long_factor",)),
    "su": (("short_factor",), ("long_factor",)),
}
"""Kinds of rope scaling and, for each, the keys it needs (of a group, one)."""


def _map_problem(targets: Sequence[int], vocab: int, kept: set[int] | None) -> tuple[str, str] | None:
    """Find what is wrong with a vocabulary map: its code and the words for it."""
    outside = [(i, t) for i, t in enumerate(targets) if not 0 <= t < vocab]
    if outside:
        return "vocab_map_range", f"draft token {outside[0][0]} becomes {outside[0][1]} of {vocab} target tokens"
    if len(set(targets)) != len(targets):
        seen: set[int] = set()
        twice = next(t for t in targets if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        return "vocab_map_repeats", f"two draft tokens become target token {twice}"
    if kept is not None and kept != set(targets):
        odd = min(kept ^ set(targets))
        return "vocab_map_disagrees", f"d2t and t2d disagree about target token {odd}"
    return None


def read(folder: Folder, dialect: Dialect) -> DraftSpec:
    """Read a checkpoint whose dialect is known.

    Args:
        folder: the opened checkpoint.
        dialect: the dialect's reading of it.

    Returns:
        The draft's facts, with every problem that can be seen without a target in ``findings``.

    Raises:
        CheckpointError: a size that everything else hangs on cannot be found.
    """
    return Reader(folder, dialect).read()
