"""The shape of the draft's decoder layers: how many there are, heads, latents, biases, window."""

from __future__ import annotations

import itertools

from sglang_eagle3_ext.formats.keys import shown, spell
from sglang_eagle3_ext.formats.reading import LAYER_NAME, LONGEST, LatentConfig, Reading
from sglang_eagle3_ext.spec import Attention, Latent


def count_layers(r: Reading) -> int:
    """Count the layers that are there; a number copied from the target is reported and not believed."""
    found = {int(m[1]) for name in r.by_canonical if (m := LAYER_NAME.fullmatch(name))}
    declared = r.layer.num_hidden_layers
    # Up to the first gap: what lies beyond it has no place, and one odd name must not size everything.
    count = next(i for i in itertools.count() if i not in found) or 1
    r.origins["num_layers"] = "weights" if found else "config"
    if found and declared is not None and declared != count:
        r.folder.add(
            "warning",
            "layer_count",
            f"{r.dialect.layer_place}num_hidden_layers",
            f"got {spell(declared)}, the file holds {count} layer{'s' * (count != 1)}; expected both to agree. The "
            "file was believed; correct the key.",
        )
        r.differences.append(f"stock builds {declared} layers, of which the file fills {min(count, declared)}")
    return count


def read_attention(r: Reading, hidden_size: int, num_layers: int) -> Attention:
    if r.dialect.latent is None:
        return _read_grouped_query(r, hidden_size, num_layers)
    return _read_latent(r, r.dialect.latent, num_layers)


def _read_latent(r: Reading, keys: LatentConfig, num_layers: int) -> Attention:
    """Read multi-head latent attention; what the config leaves out follows from the tensors' shapes."""

    def stored(name: str, axis: int = 0) -> int:
        shape = r.shape(f"layers.0.self_attn.{name}.weight")
        return shape[axis] if shape and len(shape) > axis else 0

    def size(key: str, declared: int | None, from_tensors: int) -> int:
        positive = r.positive(key, declared)
        if positive is not None:
            r.origins[key] = "config"
            return positive
        if from_tensors > 0:
            r.origins[key] = "weights"
            return from_tensors
        r.report_incomplete(key)
        # Sizes that follow from this one are then told as missing, too, and not divided by zero.
        return 1

    queries = stored("q_b_proj") or stored("q_proj")
    kv_rank = size("kv_lora_rank", keys.kv_lora_rank, stored("kv_a_layernorm"))
    rope = size("qk_rope_head_dim", keys.qk_rope_head_dim, stored("kv_a_proj_with_mqa") - kv_rank)
    width = max(keys.qk_nope_head_dim or 0, 0) + rope
    heads = size("num_attention_heads", r.layer.num_attention_heads, queries // width)
    nope = size("qk_nope_head_dim", keys.qk_nope_head_dim, queries // heads - rope)
    value = size("v_head_dim", keys.v_head_dim, stored("kv_b_proj") // heads - nope)
    q_rank = r.positive("q_lora_rank", keys.q_lora_rank)
    r.origins["q_lora_rank"] = "weights" if q_rank is None else "config"
    if q_rank is None:
        q_rank = stored("q_a_layernorm") or None
    if r.unknown:
        return Attention("mla", num_layers, 1, 1, 2, latent=Latent(q_rank, 1, 1, 1, 1))
    if rope % 2:
        r.report_value(f"{r.dialect.layer_place}qk_rope_head_dim", rope, "an even number, since pairs are rotated")
    if keys.qk_head_dim not in (None, nope + rope):
        r.report_value(
            f"{r.dialect.layer_place}qk_head_dim",
            keys.qk_head_dim,
            f"{nope + rope}, the sum of qk_nope_head_dim and qk_rope_head_dim",
        )
    r.origins["heads"] = r.origins.pop("num_attention_heads")
    r.origins["kv_heads"] = r.origins["heads"]
    r.origins["head_dim"] = r.origins["qk_nope_head_dim"]
    if r.layer.num_key_value_heads not in (None, heads):
        r.folder.add(
            "warning",
            "head_count",
            f"{r.dialect.layer_place}num_key_value_heads",
            f"got {r.layer.num_key_value_heads} for {heads} heads; expected as many, since latent attention has a key "
            "for every query head. The key was not believed; correct it.",
        )
    window = _sliding_window(r, num_layers)
    if window is not None:
        r.folder.add(
            "error",
            "sliding_window_mla",
            f"{r.dialect.layer_place}sliding_window",
            f"got {window} for latent attention; expected none, since nothing here computes both. Remove the key if "
            "training did not use it.",
        )
    if q_rank is None:
        r.differences.append("stock refuses an MLA draft without q_lora_rank")
    if num_layers > 1:
        r.differences.append("stock refuses an MLA draft of more than one layer")
    return Attention(
        kind="mla",
        num_layers=num_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope,
        latent=Latent(q_rank, kv_rank, nope, rope, value),
    )


def _read_grouped_query(r: Reading, hidden_size: int, num_layers: int) -> Attention:
    layer, prefix = r.layer, "layers.0.self_attn."
    q_rows, k_rows = ((r.shape(f"{prefix}{p}_proj.weight") or (0,))[0] for p in "qk")
    heads = r.positive("num_attention_heads", layer.num_attention_heads)
    head_dim = r.positive("head_dim", layer.head_dim)
    r.origins["heads"] = r.origins["head_dim"] = "config"
    if heads is None and head_dim is not None and q_rows >= head_dim:
        heads = q_rows // head_dim
        r.origins["heads"] = "weights"
    if heads is None:
        r.report_incomplete("num_attention_heads")
        heads = 1
    if head_dim is None:
        usual = hidden_size // heads
        head_dim = q_rows // heads if q_rows % heads == 0 and q_rows else usual
        r.origins["head_dim"] = "default" if head_dim == usual else "weights"
        if head_dim == 0:
            r.report_incomplete("head_dim")
            head_dim = 1
        elif head_dim != usual:
            r.differences.append(f"stock takes head_dim {usual}, hidden_size over heads")
    kv_heads = layer.num_key_value_heads
    r.origins["kv_heads"] = "config"
    if kv_heads is not None and not r.unknown and (kv_heads <= 0 or heads % kv_heads):
        r.folder.add(
            "error",
            "head_count",
            f"{r.dialect.layer_place}num_key_value_heads",
            f"got {spell(kv_heads)} for {heads} heads; expected a divisor. Correct the key.",
        )
    if kv_heads is None or not 0 < kv_heads <= heads:
        told = k_rows // head_dim if k_rows % head_dim == 0 else 0
        r.origins["kv_heads"] = "weights" if told else "default"
        kv_heads = told or heads
        if heads % kv_heads and not r.unknown:
            r.folder.add(
                "error",
                "head_count",
                f"{r.folder.tensors[r.by_canonical[f'{prefix}k_proj.weight']].file}:{prefix}k_proj.weight",
                f"got {kv_heads} heads of {head_dim} for {heads} heads; expected a divisor. Correct the sizes in the "
                "config.",
            )
    names = [f"layers.{i}.self_attn." for i in range(num_layers)]
    qk_norm = any(f"{n}{p}_norm.weight" in r.by_canonical for n in names for p in "qk")
    qkv_bias = any(f"{n}{p}_proj.bias" in r.by_canonical for n in names for p in "qkv")
    o_bias = any(f"{n}o_proj.bias" in r.by_canonical for n in names)
    if qk_norm:
        r.differences.append("stock drops the q and k norms of the draft's attention")
    return Attention(
        kind="gqa",
        num_layers=num_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        sliding_window=_sliding_window(r, num_layers),
    )


def _sliding_window(r: Reading, num_layers: int) -> int | None:
    """Settle whether the draft's attention is windowed; a bare number does not say so."""
    layer, place = r.layer, f"{r.dialect.layer_place}sliding_window"
    if r.folder.unreadable:
        return None  # The weights tell some trainers, who copy these keys from the target.
    given = (layer.layer_types or [])[:num_layers]
    kinds = set(given)
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        r.folder.add(
            "warning",
            "layer_types",
            f"{r.dialect.layer_place}layer_types",
            f"got {shown(unknown)}; expected full_attention or sliding_attention. Full attention was taken, as stock "
            "does. Correct the key, or remove it if it speaks of the target.",
        )
    is_windowed = "sliding_attention" in kinds if kinds else bool(layer.use_sliding_window)
    if layer.use_sliding_window is False or (layer.sliding_window is None and not is_windowed):
        return None
    if layer.sliding_window is None:
        says_so = "layer_types" if kinds else "use_sliding_window"
        r.folder.add(
            "warning",
            "sliding_window_unclear",
            place,
            f"got nothing beside {says_so}, which asks for one; expected its size. Full attention was taken, as stock "
            "does. Add the size, or remove the other key.",
        )
        return None
    if kinds:
        if is_windowed and len(kinds) > 1:
            r.folder.add(
                "error",
                "sliding_window_mixed",
                f"{r.dialect.layer_place}layer_types",
                f"got {given}; expected one kind of attention in all layers of the draft. "
                "Such a draft cannot be served.",
            )
        is_windowed = kinds == {"sliding_attention"}
    elif layer.use_sliding_window:
        is_windowed = layer.max_window_layers is None or layer.max_window_layers < num_layers
    else:
        r.folder.add(
            "warning",
            "sliding_window_unclear",
            place,
            f"got {layer.sliding_window} without use_sliding_window or layer_types; expected one of them. Full "
            "attention was taken, as stock does. Set use_sliding_window to say which it is.",
        )
    if not is_windowed:
        return None
    if not 0 < layer.sliding_window <= LONGEST:
        expected = "a positive number of tokens" if layer.sliding_window <= 0 else f"at most {LONGEST} tokens"
        r.report_value(place, layer.sliding_window, expected)
        return None
    r.folder.add(
        "info",
        "sliding_window",
        place,
        f"got {layer.sliding_window}; the draft is served with this window, as it was trained. Nothing to do.",
    )
    r.differences.append("stock does not read the draft's sliding window and attends to the whole context")
    return layer.sliding_window


def note_biases(r: Reading, fc_bias: bool, mlp_bias: bool, attention: Attention) -> None:
    """Report flags for biases that the file lacks, and note the biases that stock drops."""
    layer, place = r.layer, r.dialect.layer_place
    for flag, value, stored in (
        ("attention_bias", layer.attention_bias, attention.qkv_bias or attention.o_bias),
        ("qkv_bias", layer.qkv_bias, attention.qkv_bias),
        ("mlp_bias", layer.mlp_bias, mlp_bias),
        ("bias", layer.bias, fc_bias),
    ):
        if value and not stored:
            r.folder.add(
                "warning",
                "bias_absent",
                f"{place}{flag}",
                "got true, and the file holds no such bias; expected both to agree. The draft is read without it; "
                "correct the key.",
            )
    if attention.qkv_bias:
        r.differences.append("stock drops the biases of q, k and v")
    if mlp_bias:
        r.differences.append("stock drops the biases of the MLP")
    if fc_bias != bool(layer.bias):
        r.differences.append(f"stock builds fc {'without the stored' if fc_bias else 'with a random'} bias")
    stock_o_bias = attention.kind == "gqa" and bool(layer.attention_bias or layer.bias)
    if attention.o_bias != stock_o_bias:
        how = "without the stored" if attention.o_bias else "with a random"
        r.differences.append(f"stock builds o_proj {how} bias")
