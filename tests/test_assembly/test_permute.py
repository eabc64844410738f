"""The permutation law: permuting ``fc`` at load equals putting the captured states into column order.

The oracle is the definition: concatenate the states in the order in which the draft was trained.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import write_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.spec import TargetFacts, parse_source

N = 40


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return formats.read_draft(write_draft(tmp_path_factory.mktemp("draft")))


def plan_for(spec, boundaries, width):
    texts = ["final_norm" if b == "final_norm" else f"boundary{b}" for b in boundaries]
    fc_in = len(boundaries) * width
    declared = replace(
        spec,
        sources=tuple(parse_source(t) for t in texts),
        order="as_listed",
        num_sources=len(boundaries),
        target_hidden_size=width,
        fc_in=fc_in,
        origins={**spec.origins, "sources": "override"},
    )
    plan = assembly.plan(declared, TargetFacts("t", "LlamaForCausalLM", N, width, 96, None))
    assert not any(f.severity == "error" for f in plan.findings)
    return plan


@st.composite
def assemblies(draw):
    count = draw(st.integers(1, 8))
    places = st.one_of(st.integers(0, N), st.just("final_norm"))
    boundaries = draw(st.lists(places, min_size=count, max_size=count, unique=True))
    return boundaries, draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(0, 2**16))


def emit(states, plan):
    """Hand out the states as a target does: ascending, the state after the final norm last."""
    numbers = sorted(b for b in states if b != "final_norm")
    order = [*numbers, *(["final_norm"] if "final_norm" in states else [])]
    assert list(plan.capture) == order
    return [states[b] for b in order]


def rms_norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@settings(deadline=None)
@given(assemblies())
def test_exact_on_integers(spec, drawn):
    boundaries, width, rows, seed = drawn
    plan = plan_for(spec, boundaries, width)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-9, 10, (5, len(boundaries) * width), generator=generator).float()
    states = {b: torch.randint(-9, 10, (rows, width), generator=generator).float() for b in boundaries}
    expected = torch.cat([states[b] for b in boundaries], dim=-1) @ weight.T
    got = torch.cat(emit(states, plan), dim=-1) @ assembly.permute_fc_weight(weight, plan).T
    assert torch.equal(got, expected)


@pytest.mark.parametrize("norms", ["none", "per_source", "concatenation"])
@settings(deadline=None, max_examples=50)
@given(drawn=assemblies())
def test_within_rounding_in_float64(spec, norms, drawn):
    boundaries, width, rows, seed = drawn
    plan = plan_for(spec, boundaries, width)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5

    weight, over_all = random(5, len(boundaries) * width), random(len(boundaries) * width)
    per_source = [random(width) for _ in boundaries]
    states = {b: random(rows, width) for b in boundaries}

    def project(parts, weight, per_source, over_all):
        if norms == "per_source":
            parts = [rms_norm(part, w) for part, w in zip(parts, per_source, strict=True)]
        joined = torch.cat(parts, dim=-1)
        return (rms_norm(joined, over_all) if norms == "concatenation" else joined) @ weight.T

    expected = project([states[b] for b in boundaries], weight, per_source, over_all)
    got = project(
        emit(states, plan),
        assembly.permute_fc_weight(weight, plan),
        assembly.permute_blocks(per_source, plan),
        assembly.permute_fc_weight(over_all, plan),
    )
    assert ((got - expected).abs() / expected.abs()).max() <= 1e-12


@settings(deadline=None, max_examples=30)
@given(drawn=assemblies())
def test_the_tensors_of_a_draft_move_together_and_the_rest_not_at_all(spec, drawn):
    boundaries, width, rows, seed = drawn
    plan = plan_for(spec, boundaries, width)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5

    stored = {f"fc_norm.{i}.weight": random(width) for i in range(len(boundaries))}
    stored |= {"fc.weight": random(5, len(boundaries) * width), "norm.weight": random(5)}
    states = {b: random(rows, width) for b in boundaries}

    def project(parts, tensors):
        normed = [rms_norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        return torch.cat(normed, dim=-1) @ tensors["fc.weight"].T

    moved = assembly.permute_tensors(stored, plan)
    assert moved.keys() == stored.keys()
    assert moved["norm.weight"] is stored["norm.weight"]
    expected = project([states[b] for b in boundaries], stored)
    assert ((project(emit(states, plan), moved) - expected).abs() / expected.abs()).max() <= 1e-12
    over_all = random(len(boundaries) * width)
    alone = assembly.permute_tensors({"input_norm.weight": over_all}, plan)
    assert torch.equal(alone["input_norm.weight"], assembly.permute_fc_weight(over_all, plan))


def test_identity_hands_out_the_very_tensor(spec):
    plan = plan_for(spec, [0, 4, "final_norm"], 3)
    weight = torch.randn(2, 9)
    assert plan.is_identity
    assert assembly.permute_fc_weight(weight, plan) is weight


def test_every_value_keeps_its_bits_and_type(spec):
    plan = plan_for(spec, [9, 1, 5], 3)
    weight = torch.tensor([[0.0, -0.0, float("nan"), 1, 2, 3, 4, 5, 6]], dtype=torch.bfloat16)
    permuted = assembly.permute_fc_weight(weight, plan)
    assert permuted.dtype == torch.bfloat16
    assert permuted.is_contiguous()
    expected = torch.cat([weight[:, 3:6], weight[:, 6:9], weight[:, 0:3]], dim=-1)
    assert torch.equal(permuted.view(torch.int16), expected.view(torch.int16))


def test_refuses_what_is_not_made_of_blocks(spec):
    plan = plan_for(spec, [9, 1, 5], 3)
    with pytest.raises(ValueError, match="got 8 columns; expected a multiple of the 3 sources"):
        assembly.permute_fc_weight(torch.ones(2, 8), plan)
    with pytest.raises(ValueError, match="got 2; expected one for each of the 3 sources"):
        assembly.permute_blocks([1, 2], plan)
