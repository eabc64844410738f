"""Verification inside SGLang's real Triton backend, on CPU tensors; run by ``test_runtimes.py``.

Target, pools and translators are SGLang's own workers', on the CPU platform; on them its backend ``triton`` is made
twice, as it is and as ours, and every Triton kernel runs in the corrected interpreter. Oracles: SGLang's extend kernel
with its mask over the context, the float64 walk over the tree, and the CPU platform's own verification of the whole
target. ``VERIFY_TARGET=latent`` takes a DeepSeek-V3 for the target, else it is a Llama.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import interpreter
import pytest
import torch
import workers
from checkpoints import write_draft, write_target
from interpreter import interpret
from sglang_eagle3_ext.kernels import split_merge, tree_verify_gqa, tree_verify_mla

from benchmarks.draft_trees import Batch, Case, ancestors, make_batch, offsets, oracle
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import startup, verify
from tests.test_host import latent_target

pytestmark = pytest.mark.host

LATENT = os.environ.get("VERIFY_TARGET") == "latent"
Q, REQUESTS, WINDOW, POOL = 8, 4, 20, 1024
TABLE_ROWS = (2, 3, 1)
"""Rows of the request table, in the order of the batch."""
DRAFT_SLOTS = torch.arange(200, 200 + 3 * Q)
CASE = (
    Case((37, 1, 70), Q, heads=4, kv_heads=1, width=48, value_width=32, dtype=torch.float32)
    if LATENT
    else Case((37, 1, 70), Q, heads=4, kv_heads=2, width=16, dtype=torch.float32)
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Bring target and draft up as a scheduler does, to just before its CUDA graphs."""
    folder = tmp_path_factory.mktemp("pair")
    if LATENT:
        latent_target.LATENT, latent_target.ROPE, latent_target.LAYERS = 32, 16, 2
        latent_target.write_target(folder / "target")
    else:
        write_target(folder / "target", hidden=64, num_layers=2)
    width = latent_target.M if LATENT else 64
    ext = {"sources": ["embed", "layer0", "last"]}
    draft = write_draft(folder / "draft", target_hidden=width, config_changes={"eagle3_ext": ext})
    with workers.pair(
        folder / "target",
        draft,
        speculative_num_steps=3,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=Q,
        max_total_tokens=POOL,
        max_running_requests=REQUESTS,
    ) as worker:
        yield worker


@pytest.fixture(scope="session")
def runner(worker: Any) -> Any:
    """Give the target's runner, with every Triton kernel of either side interpreted."""
    from sglang.kernels.ops.attention import extend_attention, kv_indices, metadata
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.mem_cache import kv_index_translator

    interpret(split_merge, tree_verify_gqa, tree_verify_mla)
    interpret(extend_attention, kv_indices, metadata, triton_backend, kv_index_translator)
    # SGLang's kernel leaves float32 products to tf32; here they are exact, so that results can be compared closely.
    interpreter._to_tf32 = lambda values: values
    # There is no GPU and TRITON_INTERPRET is not set: the kernels were interpreted one by one.
    verify.implementation_for = lambda device: "triton"
    return worker.target_worker.model_runner


@pytest.fixture
def ours(runner: Any) -> Any:
    """Make the backend as SGLang does, whose registry the hook has changed when the target's own was made."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    backend = ATTENTION_BACKENDS["triton"](runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "triton"
    return backend


@pytest.fixture
def stock(runner: Any) -> Any:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return TritonAttnBackend(runner)


@pytest.fixture
def layer(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the second layer's attention, scaled as the oracle does it."""
    found = verify._layers(runner)[1]
    monkeypatch.setattr(found, "scaling", CASE.width**-0.5)
    return found


# ---- batches ------------------------------------------------------------------------------------------------------


def draw(runner: Any, layer: Any, case: Case = CASE, seed: int = 0) -> Batch:
    """Draw a batch and put its committed tokens into SGLang's pool and request table; the rest of the pool is NaN."""
    batch = make_batch(case, seed)
    if LATENT:
        width = case.value_width
        batch = replace(batch, v_draft=batch.k_draft[..., :width], v_pool=batch.k_pool[..., :width])
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    buffers = [pool.get_key_buffer(layer.layer_id)]
    buffers += [] if LATENT else [pool.get_value_buffer(layer.layer_id)]
    for buffer, drawn in zip(buffers, (batch.k_pool, batch.v_pool), strict=False):
        buffer.fill_(float("nan"))
        buffer[: len(drawn)] = drawn
        buffer[0] = 1  # the padding slot, which padding requests read
    table.zero_()
    for row, slots in zip(TABLE_ROWS, batch.token_slots, strict=False):
        table[row, : len(slots)] = slots.int()
    return batch


def full_mask(batch: Batch, lengths: tuple[int, ...]) -> torch.Tensor:
    """Spell the mask over the context; requests without a tree see everything."""
    trees = [*batch.mask.view(-1, Q, Q), *(torch.ones(Q, Q, dtype=torch.bool) for _ in lengths)]
    parts = [
        torch.cat([torch.ones(Q, n, dtype=torch.bool), tree], 1).flatten()
        for n, tree in zip(lengths, trees, strict=False)
    ]
    return torch.cat(parts)


def forward_batch(runner: Any, lengths: tuple[int, ...], rows: tuple[int, ...], slots: torch.Tensor, mask: Any) -> Any:
    """Make the batch of a verify pass as SGLang's worker and graph runner do."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    spec_info = EagleVerifyInput(
        draft_token=torch.zeros(len(rows) * Q, dtype=torch.int64),
        custom_mask=mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=3,
        topk=4,
        draft_token_num=Q,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
    made = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(rows),
        input_ids=spec_info.draft_token,
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        out_cache_loc=slots,
        positions=torch.arange(len(rows) * Q),
        spec_algorithm=runner.spec_algorithm,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    runner.kv_index_translator.bind_runner_slots(made)
    return made


def run_layer(backend: Any, batch: Batch, layer: Any, forward: Any, padding: int = 0) -> torch.Tensor:
    """Run one layer, its writes included; return the rows of the requests."""

    def rows(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, t[: padding * Q]])

    with torch.no_grad():
        out = backend.forward_extend(
            rows(batch.q).flatten(1), rows(batch.k_draft), rows(batch.v_draft), layer, forward, save_kv_cache=True
        )
    return out.view(-1, CASE.heads, batch.v_draft.shape[2])[: len(batch.q)]


def eager(runner: Any, backend: Any, batch: Batch, layer: Any, mask: torch.Tensor) -> torch.Tensor:
    forward = forward_batch(runner, batch.case.lengths, TABLE_ROWS, DRAFT_SLOTS, mask)
    backend.init_forward_metadata(forward)
    return run_layer(backend, batch, layer, forward)


# ---- who serves ---------------------------------------------------------------------------------------------------


def test_the_target_gets_our_backend_and_the_draft_stocks(worker: Any, runner: Any, ours: Any) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from sglang_eagle3_ext.host.triton_backend import TreeVerifyTritonBackend

    assert type(ours) is TreeVerifyTritonBackend
    assert type(ATTENTION_BACKENDS["triton"](worker.draft_runner)) is TritonAttnBackend
    startup.register_backend(model_runner=runner)  # a second time changes nothing
    assert type(ATTENTION_BACKENDS["triton"](worker.draft_runner)) is TritonAttnBackend
    kernel = "tree_verify_mla" if LATENT else "tree_verify_gqa"
    assert verify.describe(SimpleNamespace(attn_backend=ours)) == f"{kernel} (Triton), trees of {Q} draft tokens"
    assert verify.describe(runner) == "Eagle3CpuAttention"


def test_no_mask_over_the_context_is_made(ours: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention import triton_backend

    made = []
    make = triton_backend.maybe_create_verify_mask
    monkeypatch.setattr(
        triton_backend, "maybe_create_verify_mask", lambda **facts: made.append(make(**facts)) or made[-1]
    )
    for backend in (stock, ours):
        backend.init_cuda_graph_state(REQUESTS, REQUESTS * Q)
    assert made[0].mode.name == "FULL_MASK"
    assert made[0].buffer.numel() == REQUESTS * Q * (stock.max_context_len + Q)
    assert made[1] is None
    assert ours.verify_mask.mode.name == "QLEN_ONLY"
    assert ours.verify_mask.buffer.numel() == REQUESTS * Q * Q
    assert ours.num_draft_tokens == Q


def test_the_draft_stage_fills_that_mask_and_no_other(ours: Any) -> None:
    """SGLang's own builder of trees, given what its worker gives it: nothing over the context is made or filled."""
    from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient

    mask = ours.verify_mask
    assert mask.fits(3)
    mask.buffer.fill_(False)
    # The root, its four children, two of the first one's and one of the second one's.
    parents = (-1, 0, 0, 0, 0, 1, 1, 2)
    built = build_tree_kernel_efficient(
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 8, 12]]).repeat(3, 1),
        torch.tensor([[0, 1, 2, 3, 4, 5, 8]]).repeat(3, 1),
        torch.zeros(3, Q - 1, dtype=torch.int64),
        torch.tensor(CASE.lengths),
        0,  # as the worker does where a mask is lent: it waits for no length
        4,
        3,
        Q,
        mask.mode,
        mask.buffer,
        mask.is_read,
    )[0]
    assert built.data_ptr() == mask.buffer.data_ptr()
    assert built.numel() == REQUESTS * Q * Q
    expected = torch.zeros(Q, Q, dtype=torch.bool)
    for node in range(Q):
        expected[node, ancestors(parents, node)] = True
    assert torch.equal(built[: 3 * Q * Q].view(3, Q, Q), expected.expand(3, -1, -1))


# ---- one layer ----------------------------------------------------------------------------------------------------


def test_a_pass_without_a_graph(runner: Any, ours: Any, stock: Any, layer: Any) -> None:
    batch = draw(runner, layer)
    expected = eager(runner, stock, batch, layer, full_mask(batch, CASE.lengths))
    got = eager(runner, ours, batch, layer, batch.mask)
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(got.double(), oracle(batch), **CLOSE)
    # The mask was read: without it the same rows are far away.
    chain = eager(runner, ours, batch, layer, torch.ones_like(batch.mask))
    assert (chain.double() - oracle(batch)).abs().max() > 0.05


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_are_followed_slot_by_slot(
    runner: Any, layer: Any, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    monkeypatch.setattr(runner, "page_size", page_size)
    batch = draw(runner, layer, CASE._replace(page_size=page_size))
    taken = set(torch.cat(batch.token_slots).tolist())
    free = [slot for slot in range(page_size, POOL) if slot not in taken]
    monkeypatch.setitem(globals(), "DRAFT_SLOTS", torch.tensor(free[: 3 * Q]))
    stock = TritonAttnBackend(runner)
    expected = eager(runner, stock, batch, layer, full_mask(batch, CASE.lengths))
    got = eager(runner, ATTENTION_BACKENDS["triton"](runner), batch, layer, batch.mask)
    assert stock.page_size == page_size
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(got.double(), oracle(batch), **CLOSE)


@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
def test_graphs_are_captured_once_and_replayed(
    runner: Any, ours: Any, stock: Any, layer: Any, chain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests are captured; batches of three and of two are replayed in them, padded as SGLang pads them."""
    ours = make_for_chains(runner, monkeypatch) if chain else ours
    shape = CASE._replace(chain=chain)
    for backend in (stock, ours):
        backend.init_cuda_graph_state(REQUESTS, REQUESTS * Q)
        none = torch.zeros(REQUESTS * Q, dtype=torch.int64)
        placeholder = torch.ones((REQUESTS + REQUESTS * Q) * Q, dtype=torch.bool)
        capture = forward_batch(runner, (1,) * REQUESTS, (0,) * REQUESTS, none, placeholder)
        batch = draw(runner, layer, shape)
        backend.init_forward_metadata_out_graph(capture, in_capture=True)
        captured, step = backend.forward_metadata, ours.tree_verify._step
        run_layer(backend, batch, layer, capture, padding=1)  # the warm-up
        for seed, real in ((1, 3), (2, 2), (3, 3)):
            case = shape._replace(lengths=CASE.lengths[-real:])
            batch = draw(runner, layer, case, seed)
            lengths = (*case.lengths, *(1,) * (REQUESTS - real))
            rows = (*TABLE_ROWS[:real], *(0,) * (REQUESTS - real))
            slots = torch.cat([DRAFT_SLOTS[: real * Q], none[: (REQUESTS - real) * Q]])
            mask = full_mask(batch, lengths)
            if backend is ours:
                # The draft stage fills our buffer with true and writes the trees of the batch; of chains none is read.
                mask = ours.verify_mask.buffer
                mask.fill_(not chain)
                if not chain:
                    mask[: batch.mask.numel()] = batch.mask
            replay = forward_batch(runner, lengths, rows, slots, mask)
            backend.init_forward_metadata_out_graph(replay)
            # A graph runs what it captured: nothing that Python has rebound since reaches it.
            assert backend.forward_metadata is captured
            ours.tree_verify._step = step
            got = run_layer(backend, batch, layer, replay, padding=REQUESTS - real)
            torch.testing.assert_close(got.double(), oracle(batch), **CLOSE)


def test_a_tree_that_comes_after_its_plan_is_read_again(runner: Any, ours: Any, layer: Any) -> None:
    """With an overlapped plan stream."""
    ours.init_cuda_graph_state(REQUESTS, REQUESTS * Q)
    batch, mask = draw(runner, layer), ours.verify_mask.buffer
    mask.fill_(True)
    forward = forward_batch(runner, CASE.lengths, TABLE_ROWS, DRAFT_SLOTS, mask)
    ours.init_forward_metadata_out_graph(forward, in_capture=True)
    mask[: batch.mask.numel()] = batch.mask
    early = run_layer(ours, batch, layer, forward)
    assert (early.double() - oracle(batch)).abs().max() > 0.05
    ours.update_verify_buffers_to_fill_after_draft(forward.spec_info, cuda_graph_bs=3)
    torch.testing.assert_close(run_layer(ours, batch, layer, forward).double(), oracle(batch), **CLOSE)
    ours.update_verify_buffers_to_fill_after_draft(forward.spec_info, cuda_graph_bs=None)


@pytest.mark.parametrize("has_image", [False, True])
def test_prefill_stays_stocks(runner: Any, ours: Any, stock: Any, layer: Any, has_image: bool) -> None:
    """Gemma's multimodal models put a mask of their own into the metadata of a prefill with an image."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = draw(runner, layer)
    counts = torch.full((3,), Q, dtype=torch.int32)
    got = []
    for backend in (stock, ours):
        forward = forward_batch(runner, CASE.lengths, TABLE_ROWS, DRAFT_SLOTS, None)
        forward.forward_mode, forward.spec_info = ForwardMode.EXTEND, None
        forward.extend_prefix_lens = torch.tensor(CASE.lengths, dtype=torch.int32)
        forward.extend_prefix_lens_cpu = list(CASE.lengths)
        forward.extend_seq_lens, forward.extend_seq_lens_cpu = counts, counts.tolist()
        forward.seq_lens = forward.seq_lens + Q
        backend.init_forward_metadata(forward)
        if has_image:
            cells = [Q * (length + Q) for length in CASE.lengths]
            backend.forward_metadata.custom_mask = torch.ones(sum(cells), dtype=torch.bool)
            backend.forward_metadata.mask_indptr = offsets(cells).long()
        got.append(run_layer(backend, batch, layer, forward))
    assert torch.equal(*got)
    assert ours.tree_verify._step is None


def test_a_score_function_is_refused_and_not_computed_without_it(runner: Any, ours: Any, layer: Any) -> None:
    batch = draw(runner, layer)
    forward = forward_batch(runner, CASE.lengths, TABLE_ROWS, DRAFT_SLOTS, batch.mask)
    ours.init_forward_metadata(forward)
    with pytest.raises(UnsupportedError, match="got a score function of its own in a verify pass; expected none"):
        ours.forward_extend(batch.q.flatten(1), batch.k_draft, batch.v_draft, layer, forward, score_mod=print)


@pytest.mark.skipif(LATENT, reason="no latent target has windows")
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_layers_with_a_window(runner: Any, layer: Any, chain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from sglang_eagle3_ext.host.triton_backend import TreeVerifyTritonBackend

    monkeypatch.setattr(runner, "sliding_window_size", WINDOW)
    monkeypatch.setattr(layer, "sliding_window_size", WINDOW)
    stock, ours = TritonAttnBackend(runner), TreeVerifyTritonBackend(runner)
    windowed = draw(runner, layer, CASE._replace(window=WINDOW, chain=chain))
    got = eager(runner, ours, windowed, layer, windowed.mask)
    torch.testing.assert_close(got.double(), oracle(windowed), **CLOSE)
    if chain:  # in a tree SGLang counts rows, not depths
        expected = eager(runner, stock, windowed, layer, full_mask(windowed, CASE.lengths))
        torch.testing.assert_close(got, expected, **CLOSE)
    # The other layer of the same pass sees everything.
    other = verify._layers(runner)[0]
    monkeypatch.setattr(other, "scaling", CASE.width**-0.5)
    whole = draw(runner, other, CASE._replace(chain=chain))
    torch.testing.assert_close(eager(runner, ours, whole, other, whole.mask).double(), oracle(whole), **CLOSE)


def make_for_chains(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the backend as with ``--speculative-eagle-topk 1``."""
    from sglang.srt import runtime_context

    from sglang_eagle3_ext.host.triton_backend import TreeVerifyTritonBackend

    spec = SimpleNamespace(speculative_num_draft_tokens=Q, speculative_eagle_topk=1)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    made = TreeVerifyTritonBackend(runner)
    made.prefill_attention_backend_str = made.decode_attention_backend_str = "triton"
    return made


def test_chains_are_verified_without_a_mask(
    runner: Any, stock: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = CASE._replace(chain=True)
    batch = draw(runner, layer, chain)
    expected = eager(runner, stock, batch, layer, full_mask(batch, CASE.lengths))
    ours = make_for_chains(runner, monkeypatch)
    assert ours.verify_mask.is_read is False
    got = eager(runner, ours, batch, layer, torch.zeros_like(batch.mask))
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(got.double(), oracle(batch), **CLOSE)


# ---- the whole target ---------------------------------------------------------------------------------------------


def test_the_target_verifies_as_on_the_cpu_platform(runner: Any, ours: Any) -> None:
    """Same tokens, same pool: prefilled and verified by the CPU platform's backend, then verified by ours."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = make_batch(CASE, seed=5)
    table, lengths = runner.req_to_token_pool.req_to_token, CASE.lengths
    table.zero_()
    for row, slots, own in zip(TABLE_ROWS, batch.token_slots, DRAFT_SLOTS.chunk(3), strict=True):
        table[row, : len(slots) + Q] = torch.cat([slots, own]).int()
    g = torch.Generator().manual_seed(6)

    def run(backend: Any, forward: Any, count: int) -> Any:
        forward.input_ids = torch.randint(96, (count,), generator=g.manual_seed(count))
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend), forward_batch=forward):
            backend.init_forward_metadata(forward)
            return runner.model.forward(forward.input_ids, forward.positions, forward)

    prompt = forward_batch(runner, lengths, TABLE_ROWS, torch.cat(batch.token_slots), None)
    prompt.forward_mode, prompt.spec_info = ForwardMode.EXTEND, None
    prompt.positions = torch.cat([torch.arange(n) for n in lengths])
    counts = torch.tensor(lengths, dtype=torch.int32)
    prompt.extend_seq_lens, prompt.extend_seq_lens_cpu = counts, list(lengths)
    prompt.extend_prefix_lens, prompt.extend_prefix_lens_cpu = torch.zeros_like(counts), [0] * 3
    prompt.extend_start_loc, prompt.extend_num_tokens = offsets(lengths)[:-1], sum(lengths)
    run(runner.attn_backend, prompt, sum(lengths))

    depth = batch.mask.view(3, Q, Q).sum(-1) - 1
    results = []
    for backend in (runner.attn_backend, ours):
        tree = forward_batch(runner, lengths, TABLE_ROWS, DRAFT_SLOTS, batch.mask)
        tree.positions = (torch.tensor(lengths)[:, None] + depth).flatten()
        results.append(run(backend, tree, 3 * Q))
    assert ours.tree_verify._step is not None
    for name in ("next_token_logits", "hidden_states"):
        theirs, mine = (getattr(out, name) for out in results)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
