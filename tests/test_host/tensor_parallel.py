"""Drafts, captured states and their proof on two ranks, against one rank; run by ``test_runtimes.py``.

Once SGLang is imported, three processes are forked: rank 0 of 1, and ranks 0 and 1 of 2 (gloo). Each brings up a target
with a draft in the order of SGLang's scheduler, then builds and runs one draft after another, and leaves what it saw in
a file; the tests compare the files.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import gc
import multiprocessing
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import workers
from checkpoints import write_draft, write_target
from interpreter import interpret
from safetensors.torch import load_file
from sglang_eagle3_ext.kernels import fc_proj, norm_concat

from sglang_eagle3_ext.host import proof
from sglang_eagle3_ext.host.servers import free_port
from tests.test_host import draft_model as gqa
from tests.test_host import mla_draft_model as mla
from tests.test_host.target_proof import SOURCES, fault, swap

pytestmark = pytest.mark.host

RANKS = ((1, 0), (2, 0), (2, 1))
"""(ranks, rank) of every process."""

CLOSE = 1e-5
"""Float32 sums in another order lie nearer than this, in units of the largest value of their kind."""


class Case(NamedTuple):
    """One draft and how it is served: ``EAGLE3_EXT_KERNELS``, or ``triton`` for the kernels in the interpreter."""

    variant: gqa.Variant
    kernels: str = "on"
    latent: bool = False


THREE_HEADS = {"hidden": 30, "target_hidden": 32, "heads": 3, "kv_heads": 3}
"""Heads that two ranks cannot share, of which SGLang makes four on a CPU."""

ODD = {**THREE_HEADS, "hidden": 33, "draft_vocab": 65}
"""A width that two ranks cannot share either."""

CASES: dict[str, Case] = {
    "permuted": Case(gqa.VARIANTS["permuted"]),
    "permuted_by_stocks_operators": Case(gqa.VARIANTS["permuted"], "off"),
    "norms_per_source": Case(gqa.VARIANTS["norms_per_source_permuted"]),
    "norms_per_source_by_kernels": Case(gqa.VARIANTS["norms_per_source_permuted"], "triton"),
    "norm_over_all": Case(gqa.VARIANTS["norm_over_all_permuted"]),
    "every_bias": Case(gqa.VARIANTS["every_bias"]),
    "every_bias_by_kernels": Case(gqa.VARIANTS["every_bias"], "triton"),
    "layers_with_head_norms": Case(gqa.VARIANTS["speculators_qk_norms"]),
    "layers_with_biases_after_norm": Case(gqa.VARIANTS["two_layers_post_norm_biases"]),
    "one_kv_head": Case(gqa.Variant({"kv_heads": 1}, says={"attention.kv_heads": 1})),
    "three_heads": Case(
        gqa.Variant(
            THREE_HEADS,
            {"attention_bias": True},
            gqa.biases(gqa.ATTENTION, q_proj=36, k_proj=36, v_proj=36, o_proj=30),
            says={"attention.qkv_bias": True, "attention.o_bias": True},
        )
    ),
    "own_embedding": Case(gqa.VARIANTS["own_embedding"]),
    "tied": Case(gqa.VARIANTS["tied_to_own_embedding"]),
    "head_of_the_target": Case(gqa.VARIANTS["head_of_the_target"]),
    "five_sources_of_a_wider_target": Case(
        gqa.Variant({"target_hidden": 48, "num_sources": 5}, ext=gqa.VARIANTS["five_sources"].ext)
    ),
    "without_fc": Case(gqa.VARIANTS["no_fc"]),
    "of_odd_width": Case(gqa.Variant(ODD, ext=gqa.PERMUTED)),
    "latent": Case(mla.VARIANTS["permuted"], latent=True),
    "latent_by_kernels": Case(mla.VARIANTS["norms_per_source_permuted"], "triton", latent=True),
    "latent_by_stocks_operators": Case(mla.VARIANTS["plain"], "off", latent=True),
    "latent_layers_queries_at_once_halves": Case(
        mla.VARIANTS["halves_queries_projected_at_once_two_layers"], latent=True
    ),
    "latent_three_heads": Case(mla.mla({"hidden": 30, "target_hidden": 32, "heads": 3}), latent=True),
    "latent_biases": Case(mla.VARIANTS["biases"], latent=True),
    "latent_no_final_norm": Case(mla.VARIANTS["no_final_norm"], latent=True),
}


# ---- a rank -------------------------------------------------------------------------------------------------------


class Rank:
    """What one process sees.

    Attributes:
        ranks: how many there are.
        rank: which one this is.
    """

    def __init__(self, ranks: int, rank: int, port: int, folder: Path) -> None:
        self.ranks, self.rank, self.folder, self.port = ranks, rank, folder, port
        self.settings = workers.settings(
            folder / "target",
            folder / "draft",
            tp_size=ranks,
            speculative_num_steps=2,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=3,
        )
        workers.join(self.settings, port, rank)

    def pair(self) -> dict[str, Any]:
        """Bring up target and draft, take the captured states of two prefills, and let the proof find faults."""
        draft = workers.make_workers(self.settings, self.port, self.rank)
        runner, plan = draft.target_worker.model_runner, draft.draft_runner.model.plan
        passes = [proof.run_pass(runner, ids) for ids in proof._token_ids(runner, plan)]
        healthy = proof.prove(draft, plan)
        problems = []
        for spoiled in range(self.ranks):
            with fault(runner, swap if self.rank == spoiled else lambda states: states):
                problems.append(proof.prove(draft, plan).problems)
        return {
            "handed": [p.handed for p in passes],
            "proof": healthy.text,
            "problems": healthy.problems,
            "spoiled": problems,
            "computed_by": draft.draft_runner.model.model.computed_by,
        }

    def draft(self, case: Case, folder: Path) -> dict[str, Any]:
        """Build a draft and run its passes."""
        import triton
        from sglang.srt.configs import update_config
        from sglang.srt.configs.load_config import LoadConfig

        os.environ["EAGLE3_EXT_KERNELS"] = "off" if case.kernels == "off" else "on"
        triton.knobs.runtime.interpret = case.kernels == "triton"
        room = mla if case.latent else gqa
        target = self._target(case.variant.write.get("target_hidden", gqa.M))
        config = gqa.draft_config(folder)
        plan = gqa.resolve(config, target)
        assert {name: gqa.read_field(plan.spec, name) for name in case.variant.says} == case.variant.says
        # As SGLang's runner does on a CPU before it loads.
        update_config.adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), self.ranks)
        model = gqa.build(config)
        gqa.share(model, target)
        room.put_attention(model)
        served = gqa.Served(model, plan, reference=None, target=target)  # type: ignore[arg-type]
        features = served.features(9)
        states = served.in_capture_order(features)
        seen = mla.run_served(model, states) if case.latent else gqa.run_served(model, gqa.passes(), states)
        fc = model.model.fc
        result = {
            "seen": seen,
            "computed_by": model.model.computed_by,
            "hot": model.hot_token_id,
            "embedding": model.embed_origin,
            "fc": None if fc is None else fc.weight.detach().clone(),
        }
        if fc is not None:
            changed = gqa.random(*plan.spec.tensors["fc.weight"].shape) / 9
            gqa.update(model, {"fc.weight": changed})
            result["updated"] = model.model.project(states)
        return result

    def _target(self, width: int) -> gqa.Target:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        folder = self.folder / f"target{width}"
        stored = load_file(folder / "model.safetensors")
        embed, head = VocabParallelEmbedding(gqa.VOCAB, width), ParallelLMHead(gqa.VOCAB, width)
        embed.weight.weight_loader(embed.weight, stored["model.embed_tokens.weight"])
        head.weight.weight_loader(head.weight, stored["lm_head.weight"])
        return gqa.Target(ModelConfig(str(folder)), embed, head)


def run_rank(ranks: int, rank: int, port: int, folder: Path) -> None:
    """Do everything that one rank does, and leave it in a file; a failure is left in another."""
    try:
        me = Rank(ranks, rank, port, folder)
        found = {"pair": me.pair()}
        with torch.no_grad():
            for name, case in CASES.items():
                found[name] = me.draft(case, folder / name)
        torch.save(found, folder / f"{ranks}-{rank}.pt")
        torch.distributed.destroy_process_group()
    except BaseException:
        (folder / f"{ranks}-{rank}.txt").write_text(traceback.format_exc())
        raise


# ---- all ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """Run all ranks and collect what each of them saw."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # What every rank needs, imported once.
    import sglang.srt.managers.tp_worker
    import sglang.srt.models.kimi_k25_eagle3
    import sglang.srt.models.llama_eagle3
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    folder = tmp_path_factory.mktemp("ranks")
    write_target(folder / "target", hidden=32, num_layers=8)
    write_draft(
        folder / "draft",
        hidden=24,
        target_hidden=32,
        num_sources=len(SOURCES),
        tensor_changes={"embed_tokens.weight": gqa.random(96, 24)},
        config_changes={"eagle3_ext": {"sources": SOURCES}},
    )
    for width in (32, 48):
        write_target(folder / f"target{width}", hidden=width, num_layers=gqa.LAYERS)
    for name, case in CASES.items():
        case.variant.at(folder / name)
    interpret(fc_proj, norm_concat)
    gc.freeze()
    ports = {ranks: free_port() for ranks, _ in RANKS}
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(*place, ports[place[0]], folder)) for place in RANKS]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(600)
    finally:
        for process in processes:
            process.kill()
    problems = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    if problems:
        pytest.exit("\n".join(problems), returncode=1)
    return {place: torch.load(folder / f"{place[0]}-{place[1]}.pt", weights_only=False) for place in RANKS}


Seen = Mapping[tuple[int, int], Mapping[str, Any]]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(name: str, seen: Seen) -> None:
    alone, first, second = (seen[place][name] for place in RANKS)
    assert gqa.distance(first["seen"], alone["seen"]) < CLOSE
    for mine, theirs in zip(first["seen"], second["seen"], strict=True):
        assert torch.equal(mine[0], theirs[0])  # both choose the same tokens
        assert torch.equal(mine[1], theirs[1])
    for found in (first, second):
        assert found["embedding"] == alone["embedding"]
        assert (found["hot"] is None and alone["hot"] is None) or torch.equal(found["hot"], alone["hot"])
    if alone["fc"] is not None:
        size = float(alone["updated"].abs().max())
        assert float((first["updated"] - alone["updated"]).abs().max()) < CLOSE * size
        assert torch.equal(first["updated"], second["updated"])


@pytest.mark.parametrize("name", [name for name in CASES if name != "of_odd_width"])
def test_each_rank_keeps_its_columns_of_fc(name: str, seen: Seen) -> None:
    alone, first, second = (seen[place][name] for place in RANKS)
    if alone["fc"] is None:
        assert first["computed_by"] == alone["computed_by"]
        return
    if CASES[name].kernels == "off":
        assert torch.equal(first["fc"], alone["fc"])
        assert first["computed_by"].endswith("; fc: whole on each of 2 ranks")
        return
    assert torch.equal(torch.cat([first["fc"], second["fc"]]), alone["fc"])
    width = len(alone["fc"])
    assert len(first["fc"]) == len(second["fc"]) == width // 2
    assert first["computed_by"].endswith(f"; fc: {width // 2} of {width} columns on each of 2 ranks")
    assert ("Triton" in first["computed_by"]) is (CASES[name].kernels == "triton")
    assert "ranks" not in alone["computed_by"]


def test_a_width_that_ranks_cannot_share_stays_whole(seen: Seen) -> None:
    alone, first, second = (seen[place]["of_odd_width"] for place in RANKS)
    assert torch.equal(first["fc"], alone["fc"])
    assert torch.equal(second["fc"], alone["fc"])
    assert first["computed_by"].endswith("; fc: whole on each of 2 ranks, which do not divide 33 columns")


def test_every_rank_hands_out_the_same_states(seen: Seen) -> None:
    alone, first, second = (seen[place]["pair"] for place in RANKS)
    for one, mine, theirs in zip(alone["handed"], first["handed"], second["handed"], strict=True):
        assert one.shape == (6, len(SOURCES) * 32)
        torch.testing.assert_close(mine, one, rtol=0, atol=CLOSE * float(one.abs().max()))
        assert torch.equal(mine, theirs)


def test_the_states_are_proved_on_every_rank(seen: Seen) -> None:
    for ranks, rank in RANKS:
        pair = seen[ranks, rank]["pair"]
        assert pair["proof"].startswith("5 of 5 state(s) equal the residual stream, 12 tokens")
        assert pair["problems"] == ()
        for spoiled, problems in enumerate(pair["spoiled"]):
            if spoiled != rank:
                assert problems == ()
                continue
            named = f"rank {rank}: " if ranks > 1 else ""
            assert len(problems) == 2
            assert all(p.startswith(f"{named}/") and "expected the residual stream" in p for p in problems)
