"""A DeepSeek-V3 target on the CPU platform against transformers with its weights; run by ``test_runtimes.py``.

The target, its latent pool and its attention backend are SGLang's own workers'; batches are written here, as its
scheduler would write them, into slots that do not follow each other.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import workers
from checkpoints import write_draft

from sglang_eagle3_ext.host import proof

pytestmark = pytest.mark.host

M, VOCAB, LAYERS = 32, 96, 4
HEADS, LATENT, ROPE, NOPE, VALUE = 4, 16, 8, 12, 10

CLOSE = 1e-5

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Kimi's kind of scaling; the other one, of which the caller chooses, is none."""


def write_target(folder: Path) -> Any:
    """Write a tiny DeepSeek-V3 with one dense layer and three of experts; return it as transformers has it."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=VOCAB,
            hidden_size=M,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            n_shared_experts=1,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
            kv_lora_rank=LATENT,
            q_lora_rank=24,
            qk_rope_head_dim=ROPE,
            qk_nope_head_dim=NOPE,
            v_head_dim=VALUE,
            max_position_embeddings=256,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                **(YARN if os.environ.get("LATENT_TARGET_ROPE") == "yarn" else {}),
            },
            tie_word_embeddings=False,
            num_nextn_predict_layers=0,
            # What SGLang reads and transformers does not: real files have it.
            moe_layer_freq=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        model.model.embed_tokens.weight.normal_()
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("pair")
    return folder, write_target(folder / "target")


@pytest.fixture(scope="session")
def worker(reference: tuple[Path, Any]) -> Iterator[Any]:
    """Bring the target up as a scheduler does, to just before its CUDA graphs."""
    folder, _ = reference
    ext = {"sources": ["layer2", "embed", "last"]}
    draft = write_draft(folder / "draft", vocab=VOCAB, config_changes={"eagle3_ext": ext})
    flags = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
    with workers.pair(folder / "target", draft, **flags) as worker:
        yield worker


@pytest.fixture(scope="session")
def runner(worker: Any) -> Any:
    return worker.target_worker.model_runner


# ---- batches ------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What one request adds to a batch: its row in the request table, its tokens, and how many it has already."""

    request: int
    ids: Sequence[int]
    done: int


SLOTS = torch.randperm(127, generator=torch.Generator().manual_seed(1)) + 1
"""Slots in the order of use; the scheduler's would follow each other, which is the easier case."""


def run(runner: Any, mode: str, rows: Sequence[Rows], tree: Any = None, depths: Sequence[int] = ()) -> Any:
    """Run one batch; return SGLang's output, its hidden states [T, K, M] in capture order."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    table = runner.req_to_token_pool.req_to_token
    slots = [SLOTS[32 * (r.request - 1) + r.done :][: len(r.ids)] for r in rows]
    for r, own in zip(rows, slots, strict=True):
        table[r.request, r.done : r.done + len(r.ids)] = own.int()
    counts, done = torch.tensor([len(r.ids) for r in rows]), torch.tensor([r.done for r in rows])
    lengths = done if mode == "TARGET_VERIFY" else done + counts
    places = depths or [i for r in rows for i in range(len(r.ids))]
    positions = done.repeat_interleave(counts) + torch.tensor(places)
    extend: dict[str, Any] = {}
    if mode == "EXTEND":
        extend = {
            "extend_num_tokens": int(counts.sum()),
            "extend_seq_lens": counts.int(),
            "extend_seq_lens_cpu": counts.tolist(),
            "extend_prefix_lens": done.int(),
            "extend_prefix_lens_cpu": done.tolist(),
            "extend_start_loc": (counts.cumsum(0) - counts).int(),
        }
    batch = ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=len(rows),
        input_ids=torch.tensor([token for r in rows for token in r.ids]),
        req_pool_indices=torch.tensor([r.request for r in rows]),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=torch.cat(slots),
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=tree,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        **extend,
    )
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch):
        runner.attn_backend.init_forward_metadata(batch)
        out = runner.model.forward(batch.input_ids, batch.positions, batch)
    return SimpleNamespace(logits=out.next_token_logits, states=out.hidden_states.unflatten(-1, (-1, M)))


def expect(model: Any, ids: Sequence[int]) -> Any:
    """Run a whole sequence in transformers: logits [T, V] and boundaries 0, 3 and n [T, 3, M]."""
    last: dict[str, Any] = {}
    handle = model.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.update(out=out))
    with torch.no_grad():
        out = model(torch.tensor([list(ids)]), output_hidden_states=True)
    handle.remove()
    end = last["out"][0] if isinstance(last["out"], tuple) else last["out"]
    states = [out.hidden_states[0], out.hidden_states[3], end.view(1, -1, M)]
    return SimpleNamespace(logits=out.logits[0], states=torch.stack(states, dim=2)[0])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=CLOSE, atol=CLOSE)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- tests --------------------------------------------------------------------------------------------------------


def test_the_pool_holds_latents(runner: Any) -> None:
    pool = runner.token_to_kv_pool
    assert pool.get_key_buffer(0).shape[1:] == (1, LATENT + ROPE)
    assert pool.get_value_buffer(0).shape[1:] == (1, LATENT)


def test_prefill_and_decode(runner: Any, reference: tuple[Path, Any]) -> None:
    ids = tokens(10, seed=2)
    expected = expect(reference[1], ids)
    out = run(runner, "EXTEND", [Rows(1, ids[:6], 0)])
    assert_close(out.states, expected.states[:6])
    assert_close(out.logits, expected.logits[5:6])
    for i in range(6, 10):
        out = run(runner, "DECODE", [Rows(1, ids[i : i + 1], i)])
        assert_close(out.states, expected.states[i : i + 1])
        assert_close(out.logits, expected.logits[i : i + 1])


def test_chunks_behind_a_prefix_and_requests_beside_each_other(runner: Any, reference: tuple[Path, Any]) -> None:
    first, second = tokens(9, seed=3), tokens(5, seed=4)
    mine, other = (expect(reference[1], ids) for ids in (first, second))
    run(runner, "EXTEND", [Rows(2, first[:4], 0)])
    out = run(runner, "EXTEND", [Rows(2, first[4:], 4), Rows(1, second[:3], 0)])
    assert_close(out.states, torch.cat([mine.states[4:], other.states[:3]]))
    assert_close(out.logits, torch.stack([mine.logits[-1], other.logits[2]]))
    out = run(runner, "EXTEND", [Rows(1, second[3:], 3)])
    assert_close(out.states, other.states[3:])
    again = tokens(1, seed=5)
    out = run(runner, "DECODE", [Rows(1, again, 5), Rows(2, again, 9)])
    for got, ids in zip(out.logits, (second, first), strict=True):
        assert_close(got, expect(reference[1], [*ids, *again]).logits[-1])


PARENTS = (-1, 0, 0, 1, 2)
"""A tree of five nodes: a root, two branches of two."""


def ancestors(node: int) -> list[int]:
    """List a node's way from the root, itself included."""
    return [*(ancestors(PARENTS[node]) if PARENTS[node] >= 0 else []), node]


def test_verification_of_trees(runner: Any, reference: tuple[Path, Any]) -> None:
    prompts = [tokens(7, seed=6), tokens(2, seed=7)]
    run(runner, "EXTEND", [Rows(i + 1, ids, 0) for i, ids in enumerate(prompts)])
    drafts = [tokens(len(PARENTS), seed=8 + i) for i in range(2)]
    count = len(PARENTS)
    mask = torch.zeros(2, count, count, dtype=torch.bool)
    for node in range(count):
        mask[:, node, ancestors(node)] = True
    tree = SimpleNamespace(custom_mask=mask.flatten(), draft_token_num=count, num_tokens_per_req=count)
    depths = [len(ancestors(node)) - 1 for node in range(count)] * 2
    rows = [Rows(i + 1, ids, len(prompt)) for i, (ids, prompt) in enumerate(zip(drafts, prompts, strict=True))]
    out = run(runner, "TARGET_VERIFY", rows, tree, depths)
    for request, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
        for node in range(count):
            expected = expect(reference[1], [*prompt, *(draft[i] for i in ancestors(node))])
            assert_close(out.logits[request * count + node], expected.logits[-1])
            assert_close(out.states[request * count + node], expected.states[-1])


def test_accepted_tokens_move_to_their_places(runner: Any, reference: tuple[Path, Any]) -> None:
    """What verification accepts off the first branch is moved in the pool, and the next pass reads it there."""
    prompt = tokens(4, seed=10)
    run(runner, "EXTEND", [Rows(3, prompt, 0)])
    draft, count = tokens(len(PARENTS), seed=11), len(PARENTS)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for node in range(count):
        mask[node, ancestors(node)] = True
    tree = SimpleNamespace(custom_mask=mask.flatten(), draft_token_num=count, num_tokens_per_req=count)
    run(runner, "TARGET_VERIFY", [Rows(3, draft, 4)], tree, [len(ancestors(node)) - 1 for node in range(count)])
    way = ancestors(4)
    slots = runner.req_to_token_pool.req_to_token[3].long()
    runner.token_to_kv_pool.move_kv_cache(slots[4 : 4 + len(way)], slots[[4 + node for node in way]])
    bonus = tokens(1, seed=12)
    out = run(runner, "DECODE", [Rows(3, bonus, 4 + len(way))])
    assert_close(out.logits[0], expect(reference[1], [*prompt, *(draft[i] for i in way), *bonus]).logits[-1])


def test_what_is_captured_is_proved_here_too(worker: Any, runner: Any) -> None:
    verdict = proof.prove(worker, runner.spec_aux_config.eagle_aux_hidden_state_layer_ids)
    assert verdict.problems == ()
    assert verdict.text.startswith("3 of 3 state(s) equal the residual stream")


def test_the_draft_keeps_its_own_kind_of_pool(worker: Any) -> None:
    """A Llama-type draft has keys and values of heads beside a target of latents."""
    from sglang_eagle3_ext.host.cpu.kv_pool import CpuKVPool

    assert isinstance(worker.draft_runner.token_to_kv_pool, CpuKVPool)
    assert not worker.draft_runner.use_mla_backend
