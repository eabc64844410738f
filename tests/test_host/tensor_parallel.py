"""Drafts, captured states and their proof on two ranks, against one rank; run by ``test_runtimes.py``.

Once SGLang is imported, groups of processes are forked: rank 0 of 1, and ranks 0 and 1 of 2 (gloo). Some bring up a
target with a draft in the order of SGLang's scheduler and run passes through them, some build one draft after another,
some every target class of SGLang's; the tests compare what they saw, and with transformers' states of the same weights.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kimi
import pytest
import torch
import workers
from checkpoints import write_draft, write_target
from interpreter import interpret
from safetensors.torch import load_file
from sglang_eagle3_ext.kernels import fc_proj, norm_concat

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.host import capture, proof
from sglang_eagle3_ext.spec import Boundary
from tests.test_host import capture_targets as classes
from tests.test_host import draft_model as gqa
from tests.test_host import mla_draft_model as mla
from tests.test_host.latent_target import Rows, run
from tests.test_host.target_proof import fault, swap

pytestmark = pytest.mark.host

CLOSE = 1e-5
"""Float32 sums in another order lie nearer than this, in units of the largest value of their kind."""

M = 32
"""Width of every target."""


# ---- targets ------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of target and its draft.

    Attributes:
        write: writes the target's files; returns transformers' model with the same weights.
        sources: what the draft was trained on, in the order of fc's columns.
        boundaries: the same as boundaries.
        vocab: tokens that the target knows.
        close: how near two computations of one state lie, in units of its largest value; deeper targets, further.
    """

    write: Callable[[Path], Any]
    sources: Sequence[str]
    boundaries: tuple[Boundary, ...]
    vocab: int = 96
    close: float = CLOSE


def write_llama(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(write_target(folder, hidden=M, num_layers=8), dtype=torch.float32)


def write_kimi(folder: Path) -> Any:
    model = kimi.make_target(layers=34)
    kimi.write_target(folder, model)
    return model


def write_other(name: str, folder: Path, **fields: Any) -> Any:
    """Write a target as transformers does, with random weights."""
    import transformers

    sizes = classes.SIZES | classes.HEADS | {"vocab_size": 96} | fields
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class(model_class.config_class(**sizes)).eval()
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5, generator=generator)
        model.model.embed_tokens.weight.normal_(generator=generator)
    model.save_pretrained(folder)
    return model


OF_SIX = {
    "sources": ("layer2", "embed", "final_norm", "last", "layer0", "layer4"),
    "boundaries": (3, 0, "final_norm", 6, 1, 5),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

KINDS: dict[str, Kind] = {
    "LlamaForCausalLM": Kind(
        write_llama,
        ("layer5", "embed", "final_norm", "last", "layer2", "layer6", "layer0"),
        (6, 0, "final_norm", 8, 3, 7, 1),
    ),
    "KimiK25ForConditionalGeneration": Kind(
        write_kimi,
        ("layer31", "embed", "final_norm", "last", "layer3", "layer0", "layer32"),
        (32, 0, "final_norm", 34, 4, 1, 33),
        kimi.VOCAB,
        2e-5,
    ),
    # Whose layers attend to everything: the CPU platform has no windows.
    "Gemma3ForCausalLM": Kind(partial(write_other, "Gemma3", layer_types=["full_attention"] * 6), **OF_SIX),
    "Qwen3MoeForCausalLM": Kind(partial(write_other, "Qwen3Moe", **EXPERTS), **OF_SIX),
}


class Case(NamedTuple):
    """One draft and how it is served: ``EAGLE3_EXT_KERNELS``, or ``triton`` for the kernels in the interpreter."""

    variant: gqa.Variant
    kernels: str = "on"
    latent: bool = False
    fp8: bool = False
    """Whether ``fc`` reads a copy of its weight in FP8."""


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
    "every_bias_in_fp8_by_kernels": Case(gqa.VARIANTS["every_bias"], "triton", fp8=True),
    "norms_per_source_in_fp8": Case(gqa.VARIANTS["norms_per_source_permuted"], fp8=True),
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


def tokens(kind: Kind, count: int, seed: int) -> list[int]:
    return torch.randint(3, kind.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def write_pair(kind: Kind, place: Path) -> Any:
    """Write a target and a draft of its sources; return the target as transformers has it."""
    model = kind.write(place)
    write_draft(
        place.with_name(f"{place.name}-draft"),
        hidden=24,
        target_hidden=M,
        num_sources=len(kind.sources),
        vocab=kind.vocab,
        config_changes={"eagle3_ext": {"sources": list(kind.sources)}},
    )
    return model


def run_pair(kind: Kind, place: Path, ranks: int, rank: int, port: int) -> dict[str, Any]:
    """Bring up target and draft, run passes through the target, and let the proof find faults."""
    settings = workers.settings(
        place,
        place.with_name(f"{place.name}-draft"),
        tp_size=ranks,
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
    )
    workers.join(settings, port, rank)
    draft = workers.make_workers(settings, port, rank)
    runner, model = draft.target_worker.model_runner, draft.draft_runner.model
    healthy = proof.prove(draft, model.plan)
    problems, agreed = [], []
    for spoiled in range(ranks if len(model.plan.capture) > 1 else 0):
        with fault(runner, swap if rank == spoiled else lambda states: states):
            verdict = proof.prove(draft, model.plan)
        problems.append(verdict.problems)
        agreed.append(proof.of_all_ranks(verdict))
    first, second, more = (tokens(kind, count, seed) for seed, count in enumerate((11, 6, 2)))
    states = {
        "alone": run(runner, "EXTEND", [Rows(1, first, 0)]).states,
        "first chunk": run(runner, "EXTEND", [Rows(2, first[:5], 0)]).states,
        "later chunk, and another beside it": run(runner, "EXTEND", [Rows(2, first[5:], 5), Rows(3, second, 0)]).states,
        "one token each": run(runner, "DECODE", [Rows(3, more[1:], 6), Rows(2, more[:1], 11)]).states,
    }
    with torch.no_grad():
        projected = model.model.project(states["alone"].flatten(1))
    return {
        "capture": model.plan.capture,
        "proof": healthy.text,
        "problems": healthy.problems,
        "spoiled": problems,
        "agreed": agreed,
        "states": states,
        "projected": projected,
    }


def run_drafts(folder: Path, ranks: int, rank: int, port: int) -> dict[str, Any]:
    """Build one draft after another and run their passes."""
    settings = workers.settings(folder / "LlamaForCausalLM", folder / "LlamaForCausalLM-draft", tp_size=ranks)
    workers.join(settings, port, rank)
    with torch.no_grad():
        return {name: run_draft(case, folder, name, ranks) for name, case in CASES.items()}


def run_draft(case: Case, folder: Path, name: str, ranks: int) -> dict[str, Any]:
    """Build a draft and run its passes."""
    import triton
    from sglang.srt.configs import update_config
    from sglang.srt.configs.load_config import LoadConfig

    os.environ["EAGLE3_EXT_KERNELS"] = "off" if case.kernels == "off" else "on"
    triton.knobs.runtime.interpret = case.kernels == "triton"
    room = mla if case.latent else gqa
    target = load_target(folder / f"target{case.variant.write.get('target_hidden', gqa.M)}")
    config = gqa.draft_config(folder / name)
    plan = gqa.resolve(config, target)
    assert {name: gqa.read_field(plan.spec, name) for name in case.variant.says} == case.variant.says
    # As SGLang's runner does on a CPU before it loads.
    update_config.adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), ranks)
    model = gqa.build(config)
    gqa.share(model, target)
    room.put_attention(model)
    if case.fp8:
        model.model.operators = replace(model.model.operators, fp8_weight=True)
        model.finish_load()
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


def load_target(folder: Path) -> gqa.Target:
    """Load what a draft shares with its target."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    stored = load_file(folder / "model.safetensors")
    width = stored["lm_head.weight"].shape[1]
    embed, head = VocabParallelEmbedding(gqa.VOCAB, width), ParallelLMHead(gqa.VOCAB, width)
    embed.weight.weight_loader(embed.weight, stored["model.embed_tokens.weight"])
    head.weight.weight_loader(head.weight, stored["lm_head.weight"])
    return gqa.Target(ModelConfig(str(folder)), embed, head)


def run_classes(folder: Path, ranks: int, rank: int, port: int) -> dict[str, Any]:
    """Build every target class with stand-ins of which each rank computes a share; run one pass through each."""
    workers.join(workers.settings(folder / "LlamaForCausalLM", tp_size=ranks), port, rank)
    spec = formats.read_draft(str(folder / "LlamaForCausalLM-draft"))
    found = {}
    for case in classes.CASES:
        if not case.serves:
            continue
        with pytest.MonkeyPatch.context() as patch:
            target = classes.build(case, patch, **ON_RANKS.get(case.module, {}))
            fill(target.model)
            if not classes.carries_residual(case):
                share(patch, rank, ranks)
            plan = classes.plan_for(spec, case.serves)
            capture.install(target.model, plan)
            with proof._watching(target.model) as seen:
                handed = classes.run(target)
        problems = proof.compare(plan, [proof.Pass(handed, seen)], torch.float32)
        found[case.architecture] = {"handed": handed, "problems": problems}
    return found


ON_RANKS = {module: {"qk_norm_type": "per_head"} for module in ("minimax_m3", "minimax_m3_vl")}
"""Fields of a configuration without which SGLang cannot build a class on two ranks; public files have them."""


def fill(model: torch.nn.Module) -> None:
    """Give a model values that do not depend on how many ranks hold it."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        for name, module in model.named_modules():
            if isinstance(module, VocabParallelEmbedding):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                module.weight_loader(
                    module.weight, torch.randn(module.org_vocab_size, module.embedding_dim, generator=generator)
                )


def share(patch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Leave each rank some columns of what a stand-in computes: SGLang's boundaries sum over the ranks."""
    whole = classes.StandIn.__call__

    def part(self: classes.StandIn, *args: Any, **kwargs: Any) -> Any:
        result = whole(self, *args, **kwargs)
        summand, *rest = result if isinstance(result, tuple) else (result,)
        mine = torch.arange(summand.shape[-1]) % ranks == rank
        return (summand * mine, *rest) if rest else summand * mine

    patch.setattr(classes.StandIn, "__call__", part)


# ---- all ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, Any]:
    """Write every pair; return the targets as transformers has them."""
    return {name: write_pair(kind, folder / name) for name, kind in KINDS.items()}


Seen = Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]
"""By what was done, by the number of ranks: what each rank saw."""


@pytest.fixture(scope="session")
def seen(folder: Path, models: dict[str, Any]) -> Seen:
    """Run all ranks and collect what each of them saw."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # What every rank needs, imported once.
    import sglang.srt.managers.tp_worker
    import sglang.srt.models.registry
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
    from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM

    for width in (32, 48):
        write_target(folder / f"target{width}", hidden=width, num_layers=gqa.LAYERS)
    for name, case in CASES.items():
        case.variant.at(folder / name)
    interpret(fc_proj, norm_concat)
    work = {"drafts": partial(run_drafts, folder), "classes": partial(run_classes, folder)}
    work |= {name: partial(run_pair, kind, folder / name) for name, kind in KINDS.items()}
    with pytest.MonkeyPatch.context() as patch:
        # It names a window also where no layer has one.
        patch.delattr(Gemma3ForCausalLM, "get_attention_sliding_window_size")
        return workers.on_ranks(work, folder / "seen")


def by_rank(seen: Seen, work: str, name: str | None = None) -> list[Any]:
    """Return what was seen alone, on the first rank of two, and on the second."""
    found = [*seen[work][1], *seen[work][2]]
    return found if name is None else [one[name] for one in found]


# ---- drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(name: str, seen: Seen) -> None:
    alone, first, second = by_rank(seen, "drafts", name)
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
    alone, first, second = by_rank(seen, "drafts", name)
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
    alone, first, second = by_rank(seen, "drafts", "of_odd_width")
    assert torch.equal(first["fc"], alone["fc"])
    assert torch.equal(second["fc"], alone["fc"])
    assert first["computed_by"].endswith("; fc: whole on each of 2 ranks, which do not divide 33 columns")


# ---- captured states ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, Any]]:
    """Collect what was found; kept in the file that ``RANKS_RESULTS`` names."""
    found: dict[str, Any] = {"served": {}, "classes": []}
    yield found
    if file := os.environ.get("RANKS_RESULTS"):
        Path(file).write_text(json.dumps(found, indent=1) + "\n")


def stream(model: Any, ids: Sequence[int]) -> dict[Boundary, torch.Tensor]:
    """Run a text through transformers; return its residual stream [T, M] at every boundary, and the normed state."""
    states: dict[Boundary, torch.Tensor] = {}
    layers = model.model.layers

    def before(boundary: int) -> Any:
        def keep(_layer: Any, args: Any, kwargs: Any) -> None:
            states[boundary] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return keep

    def behind(_layer: Any, _args: Any, out: Any) -> None:
        states[len(layers)] = (out[0] if isinstance(out, tuple) else out).view(-1, M).clone()

    hooks = [layer.register_forward_pre_hook(before(b), with_kwargs=True) for b, layer in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(behind))
    with torch.no_grad():
        states["final_norm"] = model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return states


def distance(some: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference in units of the largest value."""
    return float((some - other).abs().max() / other.abs().max())


def furthest(kind: Kind, found: Mapping[str, Any], model: Any) -> float:
    """Compare what a rank saw with transformers' states of each text alone; return the largest difference.

    The rank saw the text in one pass, in chunks, beside another request, and token by token.
    """
    first, second, more = (tokens(kind, count, seed) for seed, count in enumerate((11, 6, 2)))
    mine, other = stream(model, [*first, more[0]]), stream(model, [*second, more[1]])
    order = found["capture"]
    assert order == tuple(sorted(kind.boundaries, key=lambda b: 99 if b == "final_norm" else b))
    worst = 0.0
    for i, boundary in enumerate(order):
        a, b = mine[boundary], other[boundary]
        expected = [a[:11], a[:5], torch.cat([a[5:11], b[:6]]), torch.stack([b[6], a[11]])]
        for (case, states), wanted in zip(found["states"].items(), expected, strict=True):
            assert states.shape == (len(wanted), len(order), M)
            off = distance(states[:, i], wanted)
            assert off < kind.close, (case, boundary)
            worst = max(worst, off)
    return float(f"{worst:.1e}")


@pytest.mark.parametrize("name", KINDS)
def test_states_are_those_of_each_text_alone(
    name: str, seen: Seen, models: dict[str, Any], results: dict[str, Any]
) -> None:
    results["served"][name] = max(furthest(KINDS[name], found, models[name]) for found in by_rank(seen, name))


@pytest.mark.parametrize("name", KINDS)
def test_both_ranks_hand_out_the_same_bits(name: str, seen: Seen) -> None:
    alone, first, second = by_rank(seen, name)
    for case, states in first["states"].items():
        assert torch.equal(states, second["states"][case])
        for i in range(states.shape[1]):
            assert distance(states[:, i], alone["states"][case][:, i]) < KINDS[name].close, (case, i)
    assert torch.equal(first["projected"], second["projected"])


@pytest.mark.parametrize("name", KINDS)
def test_fc_reads_them_in_the_order_declared(name: str, seen: Seen, models: dict[str, Any], folder: Path) -> None:
    kind = KINDS[name]
    states = stream(models[name], tokens(kind, 11, seed=0))
    weight = load_file(folder / f"{name}-draft" / "model.safetensors")["fc.weight"]
    expected = torch.cat([states[b] for b in kind.boundaries], -1) @ weight.T
    ascending = torch.cat([states[b] for b in by_rank(seen, name)[0]["capture"]], -1) @ weight.T
    assert distance(ascending, expected) > 0.1
    for found in by_rank(seen, name):
        assert distance(found["projected"], expected) < kind.close


@pytest.mark.parametrize("name", KINDS)
def test_the_states_are_proved_on_every_rank(name: str, seen: Seen) -> None:
    count = len(KINDS[name].sources)
    for ranks, found in seen[name].items():
        for rank, mine in enumerate(found):
            assert mine["proof"].startswith(f"{count} of {count} state(s) equal the residual stream, 12 tokens")
            assert mine["problems"] == ()
            for spoiled, problems in enumerate(mine["spoiled"]):
                if spoiled != rank:
                    assert problems == ()
                    continue
                named = f"rank {rank}: " if ranks > 1 else ""
                assert len(problems) == 2
                assert all(p.startswith(f"{named}/") and "expected the residual stream" in p for p in problems)
        for spoiled in range(ranks):
            # Every rank stops for one, and says for which.
            verdicts = {mine["agreed"][spoiled] for mine in found}
            assert verdicts == {proof.Verdict("FAILED", found[spoiled]["spoiled"][spoiled])}


# ---- every class --------------------------------------------------------------------------------------------------


@classes.serving_cases
def test_every_class_hands_out_on_two_ranks_what_it_does_on_one(
    case: classes.Case, seen: Seen, results: dict[str, Any]
) -> None:
    alone, first, second = by_rank(seen, "classes", case.architecture)
    assert first["problems"] == second["problems"] == alone["problems"] == []
    assert torch.equal(first["handed"], alone["handed"])
    assert torch.equal(second["handed"], alone["handed"])
    results["classes"].append(case.architecture)
