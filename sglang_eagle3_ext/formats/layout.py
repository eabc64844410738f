"""From a dialect's reading to a checked ``DraftSpec``: what is the same for all dialects.

A dialect says where its keys stand and how its tensors are called (``reading.Dialect``); whether config,
``eagle3_ext`` and tensors agree does not depend on the dialect and is settled here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats.attention import count_layers, note_biases, read_attention
from sglang_eagle3_ext.formats.fc import note_stock_fc, read_fc, read_norms, read_producer, read_sources
from sglang_eagle3_ext.formats.folder import Folder
from sglang_eagle3_ext.formats.keys import shown
from sglang_eagle3_ext.formats.reading import FLOATS, IGNORED, INTEGERS, Dialect, Reading
from sglang_eagle3_ext.formats.rope import read_rope
from sglang_eagle3_ext.formats.vocab import check_map_values, read_embed, read_lm_head, read_vocab
from sglang_eagle3_ext.spec import Attention, DraftSpec, Norms, Vocab


def read(folder: Folder, dialect: Dialect) -> DraftSpec:
    """Read a checkpoint whose dialect is known.

    Args:
        folder: the opened checkpoint.
        dialect: the dialect's reading of it.

    Returns:
        The draft's facts, with every problem that can be seen without a target in ``findings``.

    Raises:
        CheckpointError: a size that everything else hangs on cannot be found, or the weights cannot be read.
    """
    r = Reading(folder, dialect)
    d, ext = r.dialect, r.ext
    hidden_size = r.size("hidden_size", r.layer.hidden_size, "norm.weight", "layers.0.hidden_norm.weight")
    vocab_size = r.size("vocab_size", r.layer.vocab_size, "t2d", "embed_tokens.weight")
    gate = "layers.0.mlp.gate_proj.weight"
    is_llama4 = r.layer.model_type == "llama4_text" and r.layer.intermediate_size_mlp is not None
    declared_intermediate = r.layer.intermediate_size_mlp if is_llama4 else r.layer.intermediate_size
    intermediate_size = r.size("intermediate_size", declared_intermediate, gate)

    num_layers = count_layers(r)
    attention = read_attention(r, hidden_size, num_layers)
    producer = read_producer(r)
    sources, order, layer_ids = read_sources(r)
    norms = read_norms(r)
    max_positions = int(r.default("max_position_embeddings", r.layer.max_position_embeddings))
    rms_norm_eps = float(r.default("rms_norm_eps", r.layer.rms_norm_eps))
    hidden_act = _hidden_act(r)
    rope = read_rope(r, attention, max_positions)
    if r.is_partial:
        if not folder.unreadable:
            _check_without_sizes(r, norms, attention, len(sources or ()), vocab_size)
        _dtype(r)
        raise CheckpointError.from_findings([*folder.findings, *folder.unreadable])
    num_sources, target_hidden_size, fc_in = read_fc(r, hidden_size, sources)
    vocab = read_vocab(r, vocab_size)
    embed = read_embed(r, hidden_size, target_hidden_size)
    lm_head = read_lm_head(r, vocab, hidden_size, target_hidden_size)
    fc_bias, mlp_bias = _has_biases(r)
    note_biases(r, fc_bias, mlp_bias, attention)

    expected_shapes = dict(
        _shapes(r,
            hidden_size, intermediate_size, num_sources, target_hidden_size, fc_in, fc_bias, mlp_bias, norms,
            attention, vocab, embed, lm_head,
        )
    )  # fmt: skip
    missing = _check_names(r, expected_shapes)
    _check_shapes(r, expected_shapes)
    vocab = check_map_values(r, vocab)
    dtype = _dtype(r)
    note_stock_fc(r, fc_in, hidden_size)

    return DraftSpec(
        path=str(folder.path),
        format=d.format,
        architecture=d.architecture,
        sources=sources,
        sources_place=folder.at(d.ids_place if folder.declared.sources is None else folder.own_place("sources")),
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
        rms_norm_eps=rms_norm_eps,
        hidden_act=hidden_act,
        max_position_embeddings=max_positions,
        dtype=dtype,
        producer=producer,
        verifier=d.verifier,
        expected=None if isinstance(ext.expected, msgspec.UnsetType) else ext.expected.freeze(),
        strict=ext.strict is True,
        has_eagle3_ext=folder.declared.present,
        weights=r.weights,
        tensors=folder.tensors,
        missing=missing,
        origins=r.origins,
        findings=tuple(folder.findings),
        stock=replace(d.stock, differences=tuple(r.differences) if d.stock.loads else d.stock.differences),
    )


def _has_biases(r: Reading) -> tuple[bool, bool]:
    """Say whether ``fc`` and the MLP of the first layer have biases."""
    mlp = any(f"layers.0.mlp.{p}_proj.bias" in r.by_canonical for p in ("gate", "up", "down"))
    return "fc.bias" in r.by_canonical, mlp


def _check_without_sizes(r: Reading, norms: Norms, attention: Attention, num_sources: int, vocab_size: int) -> None:
    """Check the vocabulary, and which tensors there are, where a size is unknown that their shapes hang on."""
    has = r.by_canonical.keys()
    num_sources = num_sources or sum(name.startswith("fc_norm.") for name in has) or 3
    fc_in = None if not r.dialect.uses_aux and "fc.weight" not in has else 1
    if "vocab_size" in r.unknown:
        vocab = Vocab(1, 1, "offset" if "d2t" in has else "none")
    else:
        vocab = check_map_values(r, read_vocab(r, vocab_size))
    embed, lm_head = ("own" if f"{name}.weight" in has else "target" for name in ("embed_tokens", "lm_head"))
    names = _shapes(r, 1, 1, num_sources, 1, fc_in, *_has_biases(r), norms, attention, vocab, embed, lm_head)
    _check_names(r, [name for name, _ in names])


def _hidden_act(r: Reading) -> str:
    """Settle the activation of the MLP."""
    hidden_act = r.layer.hidden_act or "silu"
    if hidden_act not in ("silu", "swish"):
        r.folder.add(
            "error",
            "hidden_act",
            f"{r.dialect.layer_place}hidden_act",
            f"got {hidden_act!r}; expected 'silu', the only one that SGLang's Llama layers compute. Such a draft "
            "cannot be served.",
        )
    return hidden_act


_TORCH_ALIASES = {"double": "float64", "float": "float32", "half": "float16"}


def _dtype(r: Reading) -> str | None:
    """Settle the floating type, and refuse weights that are not floating numbers."""
    integers = {"d2t", "t2d"}
    odd = [
        name
        for name, canonical in r.weights.items()
        if canonical not in integers
        and not canonical.startswith(IGNORED)
        and r.folder.tensors[name].dtype not in FLOATS
    ]
    if odd:
        types = shown([f"{name} ({r.folder.tensors[name].dtype})" for name in odd])
        r.folder.add(
            "error",
            "weight_dtype",
            f"{r.folder.tensors[odd[0]].file}:{odd[0]}",
            f"got {types}; expected floating point weights ({', '.join(FLOATS)}). Quantised drafts cannot be "
            "read; use the unquantised checkpoint.",
        )
    for canonical in sorted(integers & set(r.by_canonical)):
        info = r.folder.tensors[r.by_canonical[canonical]]
        allowed = (*INTEGERS, "BOOL") if canonical == "t2d" else INTEGERS
        if info.dtype not in allowed:
            r.folder.add(
                "error",
                "weight_dtype",
                f"{info.file}:{r.by_canonical[canonical]}",
                f"got {info.dtype}; expected integers{' or flags' * (canonical == 't2d')}. Export the map again.",
            )
    key = "dtype" if r.layer.dtype else "torch_dtype"
    said = r.layer.dtype or r.layer.torch_dtype
    names = dict(zip(FLOATS, ("float64", "float32", "float16", "bfloat16"), strict=True))
    if said and said != "auto":
        name = said.removeprefix("torch.")
        name = _TORCH_ALIASES.get(name, name)
        r.origins["dtype"] = "config"
        if name not in names.values():
            place = r.dialect.dtype_place or f"{r.dialect.layer_place}{key}"
            r.report_value(place, said, f"one of {', '.join(names.values())}")
        return name
    r.origins["dtype"] = "weights"
    matrix = next((n for c, n in r.by_canonical.items() if c.endswith(("q_proj.weight", "q_b_proj.weight"))), None)
    return names.get(r.folder.tensors[matrix].dtype) if matrix else None


def _shapes(
    r: Reading,
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
    for i in range(attention.num_layers):
        prefix, width = f"layers.{i}.", 2 * hidden if i == 0 else hidden
        yield f"{prefix}input_layernorm.weight", (hidden,)
        if i == 0:
            yield f"{prefix}hidden_norm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name, shape in _attention_shapes(attention, hidden, width):
            yield f"{prefix}self_attn.{name}", shape
        for name, rows, columns in (
            ("gate", intermediate, hidden),
            ("up", intermediate, hidden),
            ("down", hidden, intermediate),
        ):
            yield f"{prefix}mlp.{name}_proj.weight", (rows, columns)
            if mlp_bias:
                yield f"{prefix}mlp.{name}_proj.bias", (rows,)


def _attention_shapes(attention: Attention, hidden: int, width: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    """List the tensors of one layer's attention, which reads ``width`` columns."""
    latent, heads = attention.latent, attention.heads
    query, key = heads * attention.head_dim, attention.kv_heads * attention.head_dim
    if latent is not None:
        if latent.q_lora_rank is None:
            yield "q_proj.weight", (query, width)
        else:
            yield "q_a_proj.weight", (latent.q_lora_rank, width)
            yield "q_a_layernorm.weight", (latent.q_lora_rank,)
            yield "q_b_proj.weight", (query, latent.q_lora_rank)
        yield "kv_a_proj_with_mqa.weight", (latent.kv_lora_rank + latent.qk_rope_head_dim, width)
        yield "kv_a_layernorm.weight", (latent.kv_lora_rank,)
        yield "kv_b_proj.weight", (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)
        yield "o_proj.weight", (hidden, heads * latent.v_head_dim)
        return
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"{name}_proj.weight", (rows, width)
        if attention.qkv_bias:
            yield f"{name}_proj.bias", (rows,)
    yield "o_proj.weight", (hidden, query)
    if attention.o_bias:
        yield "o_proj.bias", (hidden,)
    if attention.qk_norm:
        yield "q_norm.weight", (attention.head_dim,)
        yield "k_norm.weight", (attention.head_dim,)


def _check_names(r: Reading, expected: Collection[str]) -> tuple[str, ...]:
    """Account for every tensor of the file and of the model; return the canonical names that are missing."""
    tensors = r.folder.tensors
    allowed = {*expected, "t2d"}
    for name, canonical in list(r.weights.items()):
        if canonical not in allowed and not canonical.startswith(IGNORED):
            del r.weights[name]
            del r.by_canonical[canonical]
    unconsumed = sorted(set(tensors) - set(r.weights) - r.doubled)
    if unconsumed:
        r.folder.add(
            "error",
            "unconsumed_tensor",
            tensors[unconsumed[0]].file,
            f"got {shown(unconsumed)}, which the draft as described has no place for; expected every tensor to be "
            "used. Correct the config so that it describes them, or remove them.",
        )
    missing = tuple(name for name in expected if name not in r.by_canonical)
    # These have a message of their own that says more.
    explained = {"head_missing": "lm_head.weight", "vocab_map_missing": "d2t"}
    said = {explained[f.code] for f in r.folder.findings if f.code in explained}
    if unexplained := [name for name in missing if name not in said]:
        r.folder.add(
            "error",
            "missing_tensor",
            shown(sorted({info.file for info in tensors.values()}), 1) or "*.safetensors",
            f"the draft as described needs {shown(unexplained)}, got no such tensor; expected all of them. Export the "
            "draft again, or correct the config.",
        )
    return missing


def _check_shapes(r: Reading, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shape of every tensor with the one that the draft needs."""
    tensors = r.folder.tensors
    sizes = {**expected, **({"t2d": (r.layer.vocab_size,)} if r.layer.vocab_size else {})}
    for canonical, shape in sizes.items():
        stored = r.by_canonical.get(canonical)
        if stored is not None and tensors[stored].shape != shape:
            r.folder.add(
                "error",
                "tensor_shape",
                f"{tensors[stored].file}:{stored}",
                f"got {list(tensors[stored].shape)}; expected {list(shape)} from the config. Correct the sizes in the "
                "config, or export the draft again.",
            )
