"""``host.verify`` in the corrected interpreter, called as SGLang's seam calls it, against the float64 oracle."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import interpret
from sglang_eagle3_ext.kernels import split_merge, tree_verify_gqa, tree_verify_mla
from sglang_eagle3_ext.kernels.arch import H200

from benchmarks.draft_trees import Batch, Case, excess, make_batch, offsets, oracle
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import verify
from sglang_eagle3_ext.host.verify import Heads, Shape, TreeVerify
from sglang_eagle3_ext.spec import AssemblyPlan

interpret(split_merge, tree_verify_gqa, tree_verify_mla)

pytestmark = pytest.mark.host

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
REQUESTS = 5
"""Most requests of a batch."""

CASES = {
    "tree": Case((300, 0, 65), 7, heads=8, kv_heads=2),
    "chain": Case((300, 0, 65), 4, heads=8, kv_heads=2, chain=True),
    "one-draft-token": Case((33, 1), 1, heads=4, kv_heads=2),
    "two-mask-words": Case((70, 0), 66, heads=2),
    "fp8-pool": Case((130, 40), 6, heads=8, kv_heads=2, kv_dtype=E4M3, k_scale=0.37, v_scale=1.9),
    "float16": Case((100, 40), 6, heads=6, kv_heads=2, width=96, dtype=torch.float16),
    "cap-and-sinks": Case((130, 0), 6, heads=8, kv_heads=2, logit_cap=5.0, sinks=True),
    "window": Case((300, 40, 0), 8, heads=4, kv_heads=2, window=70),
    "latent": Case((150, 0, 9), 6, 4, width=80, value_width=64),
    "latent-chain": Case((150, 9), 4, 3, width=48, value_width=32, chain=True),
    "latent-fp8": Case((140, 9), 5, 3, width=80, value_width=64, kv_dtype=E4M3, k_scale=0.5, v_scale=0.5),
}


def make(name: str, seed: int = 0) -> Batch:
    """Draw a batch; in latent attention the front of the one key is the value."""
    batch = make_batch(CASES[name], seed)
    if name.startswith("latent"):
        width = batch.v_draft.shape[2]
        batch = replace(batch, v_draft=batch.k_draft[..., :width], v_pool=batch.k_pool[..., :width])
    return batch


def tree_verify_of(name: str, requests: int = REQUESTS) -> TreeVerify:
    case = CASES[name]
    heads = Heads(case.heads, case.kv_heads, case.width, case.value_width or case.width)
    latent = case.value_width if name.startswith("latent") else None
    shape = Shape(heads, heads if case.window else None, latent, case.dtype, case.kv_dtype or case.dtype)
    return TreeVerify(shape, requests=requests, num_draft=case.num_draft, chain=case.chain, device=CPU)


def test_a_long_context_of_one_request_fills_the_device() -> None:
    """Kimi-K2.5 on one of eight ranks: one latent for all heads, so that chunks alone make programs."""
    shape = Shape(Heads(8, 1, 576, 512), None, 512, torch.bfloat16, torch.bfloat16)
    tree_verify = TreeVerify(shape, requests=1, num_draft=8, chain=True, device=CPU)
    tree_verify.prepare(torch.tensor([0, 32768], dtype=torch.int32), None, None, 8)
    assert tree_verify._step is not None
    assert tree_verify._step.plan is not None
    assert 120 <= int(tree_verify._step.plan.num_chunks.sum()) <= H200.multiprocessors


def windowed(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Give offsets and slots of the tokens that SGLang hands to a layer with a window."""
    assert batch.case.window is not None
    ends = [slots[max(0, len(slots) - batch.case.window) :] for slots in batch.token_slots]
    return offsets([len(end) for end in ends]), torch.cat(ends)


def attend(tree_verify: TreeVerify, batch: Batch, padding: int = 0) -> torch.Tensor:
    """Call the seam for one layer; ``padding`` rows stand behind the last request."""
    case = batch.case
    indptr, slots = (batch.kv_indptr, batch.kv_slots) if case.window is None else windowed(batch)
    out = torch.full((len(batch.q) + padding, case.heads, batch.v_draft.shape[2]), 7.0, dtype=case.dtype)
    q, k, v = (torch.cat([t, t.new_zeros(padding, *t.shape[1:])]) for t in (batch.q, batch.k_draft, batch.v_draft))
    ran = tree_verify.attend(
        *(q, k, v.contiguous(), out, batch.k_pool, batch.v_pool, None, indptr, slots, None, True, None),
        *(case.num_draft, case.k_scale, case.v_scale, case.width**-0.5),
        logit_cap=case.logit_cap,
        sliding_window_size=-1 if case.window is None else case.window,
        sinks=batch.sinks,
        window_kv_offsets=None,
        xai_temperature_len=-1,
        max_bs=REQUESTS,
    )
    assert ran is True
    assert bool((out[len(batch.q) :] == 7).all())
    return out[: len(batch.q)]


def prepare(tree_verify: TreeVerify, batch: Batch) -> None:
    window = None if batch.case.window is None else windowed(batch)[0]
    # A buffer of the largest batch, whose end belongs to no request.
    mask = torch.cat([batch.mask, torch.ones(500, dtype=torch.bool)])
    tree_verify.prepare(batch.kv_indptr, window, None if batch.case.chain else mask, batch.case.num_draft)


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle(name: str) -> None:
    batch, tree_verify = make(name), tree_verify_of(name)
    prepare(tree_verify, batch)
    bar = 2.0 if batch.case.kv_dtype else 1.5
    expected = oracle(batch)
    assert excess(attend(tree_verify, batch, padding=3), expected) <= bar
    # A second layer of the same pass: nothing is planned again.
    assert excess(attend(tree_verify, batch), expected) <= bar


def test_layers_with_and_without_a_window_take_turns() -> None:
    batch, tree_verify = make("window"), tree_verify_of("window")
    whole = replace(batch, case=batch.case._replace(window=None))
    prepare(tree_verify, batch)
    for _ in range(2):
        assert excess(attend(tree_verify, batch), oracle(batch)) <= 1.5
        assert excess(attend(tree_verify, whole), oracle(whole)) <= 1.5


@pytest.mark.parametrize("name", ["tree", "chain", "latent"])
def test_static_buffers_serve_one_batch_after_the_other(name: str) -> None:
    """As the replays of CUDA graphs do: larger, smaller, and larger again, at the same addresses."""
    tree_verify = tree_verify_of(name)
    batches = [make(name)]
    batches += [batches[0].alone(2 if name != "latent" else 0), make(name, seed=1)]
    addresses = set()
    for batch in batches:
        prepare(tree_verify, batch)
        step = tree_verify._step
        assert step is not None
        assert step.plan is not None
        tensors = (step.bits, step.plan.slot_request, step.plan.num_chunks, step.plan.first_slot)
        addresses.add(tuple(t.data_ptr() for t in tensors))
        assert excess(attend(tree_verify, batch), oracle(batch)) <= 1.5
    assert len(addresses) == 1


def test_a_graph_reads_what_its_replay_has_planned() -> None:
    """Kernels of a graph keep the tensors of the capture; a replay only writes to them."""
    tree_verify, requests = tree_verify_of("tree"), 3
    mask, indptr = torch.ones(REQUESTS * 7 * 7, dtype=torch.bool), offsets([1] * requests)
    tree_verify.prepare(indptr, None, mask, 7)
    captured = tree_verify._step
    batch = make("tree")
    mask[: batch.mask.numel()] = batch.mask
    tree_verify.prepare(batch.kv_indptr, None, mask, 7)
    tree_verify._step = captured
    assert excess(attend(tree_verify, batch), oracle(batch)) <= 1.5


def test_padding_requests_of_a_graph_leave_the_others_alone() -> None:
    """They have one committed token, in the padding slot, and see all of each other."""
    batch, tree_verify = make("tree"), tree_verify_of("tree")
    n, requests = batch.case.num_draft, len(batch.parents)
    batch.k_pool[0], batch.v_pool[0] = 1, 1
    lengths = (*batch.case.lengths, 1, 1)
    padded = replace(
        batch,
        case=batch.case._replace(lengths=lengths),
        q=torch.cat([batch.q, batch.q[: 2 * n]]),
        k_draft=torch.cat([batch.k_draft, batch.k_draft[: 2 * n]]),
        v_draft=torch.cat([batch.v_draft, batch.v_draft[: 2 * n]]),
        kv_indptr=offsets(lengths),
        kv_slots=torch.cat([*batch.token_slots, torch.zeros(2, dtype=torch.int64)]),
    )
    mask = torch.cat([batch.mask, torch.ones(2 * n * n, dtype=torch.bool)])
    tree_verify.prepare(padded.kv_indptr, None, mask, n)
    got = attend(tree_verify, padded)
    assert excess(got[: requests * n], oracle(batch)) <= 1.5
    assert bool(torch.isfinite(got.float()).all())


@pytest.mark.parametrize("name", ["tree", "chain"])
def test_a_pass_of_another_width_brings_its_own_bits(name: str) -> None:
    tree_verify = tree_verify_of(name)
    batch = make_batch(CASES[name]._replace(num_draft=3))
    prepare(tree_verify, batch)
    assert excess(attend(tree_verify, batch), oracle(batch)) <= 1.5


def test_the_mask_covers_draft_tokens_alone() -> None:
    for name, is_read in (("tree", True), ("chain", False)):
        mask, n = tree_verify_of(name).mask, CASES[name].num_draft
        assert mask.mode.name == "QLEN_ONLY"
        assert mask.is_read is is_read
        assert mask.fits(REQUESTS)
        assert mask.buffer.numel() == REQUESTS * n * n


def test_what_was_not_foreseen_is_refused() -> None:
    batch, tree_verify = make("tree"), tree_verify_of("tree")
    with pytest.raises(UnsupportedError, match="without a sliding window; expected none"):
        attend(tree_verify, batch)
    prepare(tree_verify, batch)
    narrow = replace(batch, case=batch.case._replace(window=70))
    with pytest.raises(UnsupportedError, match="with a sliding window; expected none"):
        attend(tree_verify, narrow)
    with pytest.raises(UnsupportedError, match="got no tree mask for a tree"):
        tree_verify.prepare(batch.kv_indptr, None, None, 7)
    latent, tree_verify = make("latent"), tree_verify_of("latent")
    prepare(tree_verify, latent)
    with pytest.raises(UnsupportedError, match="a latent attention layer with a window, sinks or a logit cap"):
        attend(tree_verify, replace(latent, sinks=torch.zeros(4)))


# ---- the decision -----------------------------------------------------------------------------------------------


def layer(**changes: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    heads = {"num_heads": 8, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2, "layer_id": 0}
    temperature = changes.pop("xai_temperature_len", -1)
    made = RadixAttention(**(heads | changes))
    made.xai_temperature_len = temperature
    return made


class Runner(SimpleNamespace):
    """What the decision reads of SGLang's runner."""

    def __init__(self, *layers: Any, latent: int | None = None, **changes: Any) -> None:
        config = {"is_encoder_decoder": False, "kv_lora_rank": latent, "hf_text_config": SimpleNamespace()}
        config["hf_config"] = SimpleNamespace(architectures=["LlamaForCausalLM"])
        config |= {key: changes.pop(key) for key in list(changes) if key in config}
        stored = changes.pop("stored", "unquantized")
        facts = {
            "model": torch.nn.ModuleList(layers or [layer()]),
            "model_config": SimpleNamespace(**config),
            "use_mla_backend": latent is not None,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": torch.bfloat16,
            "device": "cpu",
            "token_to_kv_pool": SimpleNamespace(get_kv_cache_quant_method=lambda: SimpleNamespace(name=stored)),
            "req_to_token_pool": SimpleNamespace(size=4, req_to_token=torch.zeros(4, 9, dtype=torch.int32)),
            "spec_algorithm": SimpleNamespace(is_eagle3=lambda: True),
            "is_draft_worker": False,
            "spec_aux_config": SimpleNamespace(eagle_aux_hidden_state_layer_ids=AssemblyPlan.__new__(AssemblyPlan)),
        }
        super().__init__(**(facts | changes))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand for the settings that SGLang publishes in a scheduler."""
    made = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        parallel=SimpleNamespace(attn_dcp_size=1, tp_rank=0),
        spec=SimpleNamespace(speculative_num_draft_tokens=8, speculative_eagle_topk=4),
    )
    for name, value in (("get_exec", made), ("get_parallel", made.parallel), ("get_spec", made.spec)):
        monkeypatch.setattr(f"sglang.srt.runtime_context.{name}", lambda value=value: value)
    monkeypatch.setattr(verify, "implementation_for", lambda device: "triton")
    monkeypatch.setattr(verify, "_made", [])
    monkeypatch.setattr(verify, "_reasons", [])
    return made


def test_what_the_kernels_take_is_not_left_to_stock(settings: SimpleNamespace) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    window = layer(sliding_window_size=127, num_heads=8, num_kv_heads=1, logit_cap=30.0)
    encoder = layer(head_dim=72 * 8, attn_type=AttentionType.ENCODER_ONLY)
    expanded = layer(head_dim=192, num_heads=8, num_kv_heads=8, v_head_dim=128)
    absorbed = layer(head_dim=576, num_heads=8, num_kv_heads=1, v_head_dim=512)
    for runner in (
        Runner(),
        Runner(layer(), window, encoder),
        Runner(layer(head_dim=256), dtype=torch.float16, kv_cache_dtype=torch.float8_e5m2),
        Runner(expanded, absorbed, latent=512, kv_cache_dtype=E4M3),
    ):
        assert verify.left_to_stock(runner) == []
    shape = verify.shape_of(Runner(window, layer()))
    assert shape.full == Heads(8, 2, 64, 64)
    assert shape.windowed == Heads(8, 1, 64, 64)
    assert verify.shape_of(Runner(expanded, absorbed, latent=512)).full == Heads(8, 1, 576, 512)


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ({"layers": [{"head_dim": 512}]}, "heads of 512 and 512 columns"),
        ({"layers": [{"head_dim": 8}]}, "heads of 8 and 8 columns"),
        ({"layers": [{}, {"sliding_window_size": 6}]}, "a window of 6 tokens, too small for 8 draft tokens"),
        ({"layers": [{"is_cross_attention": True}]}, "cross attention"),
        ({"layers": [{"attn_type": "decoder_bidirectional"}]}, "attention without a causal mask"),
        ({"layers": [{"xai_temperature_len": 1024}]}, "temperature tuning by position"),
        ({"layers": [{"num_kv_heads": 3}]}, "8 query heads on 3 kv heads"),
        (
            {"layers": [{"head_dim": 96, "num_kv_heads": 1, "v_head_dim": 72}], "latent": 72},
            "latents of 72 + 24, which are not powers of two",
        ),
        (
            {
                "layers": [{"head_dim": 80, "num_kv_heads": 1, "v_head_dim": 64, "logit_cap": 5.0}],
                "latent": 64,
            },
            "a window or a logit cap on latent attention",
        ),
        ({"is_encoder_decoder": True}, "not served together with an encoder"),
        (
            {"spec_aux_config": SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1, 5, 9])},
            "not served together with a draft that is served by stock's rules",
        ),
        (
            {"hf_config": SimpleNamespace(architectures=["MiniMaxM3SparseForCausalLM"])},
            "not served together with trees on MiniMax's sparse attention",
        ),
        ({"kv_cache_dtype": torch.uint8}, "a pool in torch.uint8 under queries in torch.bfloat16"),
        ({"dtype": torch.float64, "kv_cache_dtype": torch.float64}, "queries in torch.float64"),
        (
            {"kv_cache_dtype": E4M3, "hf_text_config": SimpleNamespace(num_kv_shared_layers=2)},
            "layers that read another layer's keys, from a pool in FP8",
        ),
        (
            {"stored": "nvfp4"},
            "not served together with a KV cache that keeps scales of its own",
        ),
    ],
)
def test_what_they_do_not_take_is(settings: SimpleNamespace, runner: dict[str, Any], words: str) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    changes = dict(runner)
    layers = changes.pop("layers", [{}])
    for wanted in layers:
        if "attn_type" in wanted:
            wanted["attn_type"] = AttentionType(wanted["attn_type"])
    (reason,) = verify.left_to_stock(Runner(*(layer(**wanted) for wanted in layers), **changes))
    assert words in reason


def test_every_reason_is_given_at_once(settings: SimpleNamespace) -> None:
    settings.deterministic.enable_deterministic_inference = True
    settings.parallel.attn_dcp_size = 2
    reasons = verify.left_to_stock(Runner(layer(head_dim=512), layer(head_dim=512), layer(xai_temperature_len=5)))
    assert len(reasons) == len(set(reasons)) == 4
    assert reasons[0] == "not served together with --enable-deterministic-inference"


def test_a_device_without_kernels_is_the_only_reason(
    settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "implementation_for", lambda device: "torch")
    (reason,) = verify.left_to_stock(Runner(layer(head_dim=512)))
    assert "compute capability 8.0, not on cpu" in reason


def test_the_decision_is_taken_once_and_logged(settings: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    made = SimpleNamespace(verify_mask=None)
    runner = Runner(layer(head_dim=512), attn_backend=made)
    with caplog.at_level(logging.WARNING):
        assert verify.make_backend(lambda _: made, runner) is made
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "Draft trees are verified by SGLang's own Triton kernel: the target has heads of 512 and 512 columns. They are "
        "verified right; nothing to do."
    )
    assert verify.describe(runner) == "SimpleNamespace alone: the target has heads of 512 and 512 columns"


def test_two_backends_of_one_target_say_it_once(settings: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang makes one for prefill and one for decode where they are named apart."""
    runner = Runner(layer(head_dim=512))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert verify.make_backend(lambda given: given, runner) is runner
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("capability", "serves"), [(75, "torch"), (80, "triton"), (90, "triton"), (120, "triton")], ids=str
)
def test_who_serves_on_an_nvidia_device(monkeypatch: pytest.MonkeyPatch, capability: int, serves: str) -> None:
    from sglang_eagle3_ext.kernels import arch

    monkeypatch.setattr(arch, "arch_of", lambda device: SimpleNamespace(capability=capability))
    monkeypatch.setattr(torch.version, "hip", None)
    assert arch.implementation_for(torch.device("cuda")) == serves
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert arch.implementation_for(torch.device("cuda")) == "torch"


@pytest.mark.parametrize(
    "changes",
    [
        {"spec_algorithm": SimpleNamespace(is_eagle3=lambda: False)},
        {"is_draft_worker": True},
    ],
    ids=["no EAGLE-3 pair", "a draft"],
)
def test_other_models_are_stocks_without_a_word(
    settings: SimpleNamespace, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(layer(head_dim=512), **changes)
    with caplog.at_level(logging.DEBUG):
        assert verify.make_backend(lambda given: given, runner) is runner
    assert not caplog.records


def test_switched_off_everything_is_stocks(settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_EXT_KERNELS", "off")
    runner = Runner()
    assert verify.make_backend(lambda given: given, runner) is runner
    assert verify.describe(runner) == "SGLang's own kernels (EAGLE3_EXT_KERNELS=off)"


def test_the_block_names_the_kernel(settings: SimpleNamespace) -> None:
    runner = Runner()
    tree_verify = verify.tree_verify_for(runner)
    runner.attn_backend = SimpleNamespace(verify_mask=tree_verify.mask)
    assert verify.describe(runner) == "tree_verify_gqa (Triton), trees of 8 draft tokens"
