"""``ReferenceDraft`` in float64 against a dense oracle that loops over rows, heads and keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import draft_oracle, project_oracle
from reference_drafts import latent_attention, make_spec, random_inputs, random_tensors

from sglang_eagle3_ext.reference import Chains, KVCache, ReferenceDraft
from sglang_eagle3_ext.spec import DraftSpec, Rope

LENGTH = 8

VARIANTS = {
    "classic": {},
    "one-source": {"num_sources": 1},
    "two-sources": {"num_sources": 2},
    "eight-sources": {"num_sources": 8},
    "no-fc": {"num_sources": 0},
    "per-source-norms": {"norms": {"around_fc": "per_source"}},
    "concatenation-norm": {"norms": {"around_fc": "concatenation"}},
    "residual-post-norm": {"norms": {"residual": "post_norm"}},
    "recurrent-post-norm": {"norms": {"recurrent_state": "post_norm"}},
    "no-final-norm": {"norms": {"final_norm": False}},
    "all-norms": {"norms": {"around_fc": "per_source", "residual": "post_norm", "recurrent_state": "post_norm"}},
    "three-layers": {"attention": {"num_layers": 3}},
    "qk-norm": {"attention": {"qk_norm": True}},
    "qkv-bias": {"attention": {"qkv_bias": True}},
    "o-bias": {"attention": {"o_bias": True}},
    "fc-bias": {"fc_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "window-1": {"attention": {"sliding_window": 1}},
    "window-3": {"attention": {"sliding_window": 3, "num_layers": 2}},
    "theta": {"rope": Rope(theta=7.0)},
    "linear-rope": {"rope": Rope(theta=100.0, scaling={"rope_type": "linear", "factor": 4.0})},
    "mrope": {"rope": Rope(theta=100.0, scaling={"rope_type": "mrope", "mrope_section": [1, 1]})},
    "partial-rope": {"attention": {"head_dim": 8}, "rope": Rope(theta=100.0, partial_rotary_factor=0.5)},
    "narrow-draft": {"hidden_size": 10, "target_hidden_size": 14, "attention": {"heads": 5, "kv_heads": 1}},
    "heads-wider-than-draft": {"attention": {"heads": 3, "kv_heads": 3, "head_dim": 14}},
    "mla": {"attention": latent_attention(), "rope": Rope(theta=100.0, interleaved=True)},
    "mla-halves": {"attention": latent_attention(), "rope": Rope(theta=100.0)},
    "mla-one-query-projection": {"attention": latent_attention(None), "rope": Rope(theta=100.0, interleaved=True)},
    "mla-layers-norms": {
        "attention": latent_attention(num_layers=3),
        "rope": Rope(theta=100.0, interleaved=True),
        "norms": {"around_fc": "per_source", "residual": "post_norm", "recurrent_state": "post_norm"},
        "mlp_bias": True,
        "fc_bias": True,
    },
    "absolute-vocabulary": {"vocab": {"map": "absolute"}},
    "whole-vocabulary": {"vocab": {"map": "none", "draft": 50}},
}


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: t.numpy() for name, t in tensors.items()}


def oracle_steps(
    spec: DraftSpec,
    tensors: dict[str, torch.Tensor],
    features: torch.Tensor,
    sequence: torch.Tensor,
    row: int,
    continuations: Sequence[int],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compute logits and state after ``row`` and after each forced continuation, rerunning every row each time."""
    w = as_arrays(tensors)
    table = w["embed_tokens.weight"]
    hidden = list(project_oracle(spec, w, features[: row + 1].numpy()))
    embeds = [table[t] for t in sequence[1 : row + 2].tolist()]
    results = []
    for token in (*continuations, None):
        n = len(embeds)
        # Feature rows lie on one causal line, and so do the recurrent rows that follow row `row`.
        logits, states = draft_oracle(
            spec, w, np.stack(embeds), np.stack(hidden), list(range(n)), np.tril(np.ones((n, n), dtype=bool))
        )
        results.append((logits[-1], states[-1]))
        if token is not None:
            embeds.append(table[token])
            hidden.append(states[-1])
    return results


def assert_same(actual: torch.Tensor, expected: np.ndarray) -> None:
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_matches_the_oracle(changes: dict) -> None:
    spec = make_spec(**changes)
    tensors = random_tensors(spec)
    features, sequence = random_inputs(spec, LENGTH)
    draft = ReferenceDraft(spec, tensors, dtype=torch.float64)
    projected = draft.project(features)
    assert_same(projected, project_oracle(spec, as_arrays(tensors), features.numpy()))
    step, cache = draft.feature_pass(projected, sequence)
    forced = [3, 41, 17]
    rows = torch.arange(len(cache))
    chains = Chains(draft, cache, rows)
    steps = [step]
    for token in forced:
        steps.append(chains.advance(torch.full((len(rows),), token), steps[-1].state))
    for row in (0, 3, LENGTH - 2):
        expected = oracle_steps(spec, tensors, features, sequence, row, forced)
        for got, (logits, state) in zip(steps, expected, strict=True):
            assert_same(got.logits[row], logits)
            assert_same(got.state[row], state)


def test_interleaving_matters() -> None:
    specs = [make_spec(attention=latent_attention(), rope=Rope(theta=100.0, interleaved=i)) for i in (True, False)]
    features, sequence = random_inputs(specs[0], LENGTH)
    logits = []
    for spec in specs:
        draft = ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)
        logits.append(draft.feature_pass(draft.project(features), sequence)[0].logits)
    assert (logits[0] - logits[1])[2:].abs().amax(-1).min() > 1e-3


SWITCHES = ("residual-post-norm", "recurrent-post-norm", "no-final-norm", "window-1", "theta", "linear-rope")


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_change_the_result(name: str) -> None:
    """No switch may be read and then ignored, by the draft and the oracle alike."""
    features, sequence = random_inputs(make_spec(), LENGTH)
    third_steps = []
    for spec in (make_spec(), make_spec(**VARIANTS[name])):
        draft = ReferenceDraft(spec, random_tensors(make_spec()), dtype=torch.float64)
        here, cache = draft.feature_pass(draft.project(features), sequence)
        chains = Chains(draft, cache, torch.arange(len(cache)))
        for token in (3, 41):
            here = chains.advance(torch.full((len(cache),), token), here.state)
        third_steps.append(here.logits)
    assert (third_steps[0] - third_steps[1])[1:].abs().amax(-1).min() > 1e-3


@settings(deadline=None, max_examples=25)
@given(
    sources=st.integers(0, 4),
    around_fc=st.sampled_from(["none", "per_source", "concatenation"]),
    residual=st.sampled_from(["pre_norm", "post_norm"]),
    recurrent=st.sampled_from(["pre_norm", "post_norm"]),
    final_norm=st.booleans(),
    layers=st.integers(1, 3),
    biases=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    qk_norm=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5]),
)
def test_variants_combine(
    sources: int,
    around_fc: str,
    residual: str,
    recurrent: str,
    final_norm: bool,
    layers: int,
    biases: tuple[bool, bool, bool, bool],
    qk_norm: bool,
    window: int | None,
) -> None:
    fc_bias, mlp_bias, qkv_bias, o_bias = biases
    spec = make_spec(
        num_sources=sources,
        fc_bias=fc_bias,
        mlp_bias=mlp_bias,
        norms={
            "around_fc": around_fc if sources else "none",
            "residual": residual,
            "recurrent_state": recurrent,
            "final_norm": final_norm,
        },
        attention={
            "num_layers": layers,
            "qkv_bias": qkv_bias,
            "o_bias": o_bias,
            "qk_norm": qk_norm,
            "sliding_window": window,
        },
    )
    tensors = random_tensors(spec)
    features, sequence = random_inputs(spec, 5)
    draft = ReferenceDraft(spec, tensors, dtype=torch.float64)
    step, cache = draft.feature_pass(draft.project(features), sequence)
    here = step[-1:]
    expected = oracle_steps(spec, tensors, features, sequence, 3, [7, 9])
    for token, (logits, state) in zip([7, 9, 0], expected, strict=True):
        assert_same(here.logits[0], logits)
        assert_same(here.state[0], state)
        here = draft.forward(torch.tensor([token]), here.state, torch.tensor([len(cache)]), cache)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_chains_side_by_side_equal_one_chain_after_another(changes: dict) -> None:
    spec = make_spec(**changes)
    features, sequence = random_inputs(spec, LENGTH)
    draft = ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)
    together = draft.propose_chains(draft.project(features), sequence, 4)
    assert together.shape == (LENGTH - 1, 4)
    for row in range(LENGTH - 1):
        alone = draft.propose_chain(features[: row + 1], sequence[: row + 2], 4)
        assert torch.equal(together[row], alone)
    some = torch.tensor([5, 0])
    assert torch.equal(draft.propose_chains(draft.project(features), sequence, 4, some), together[some])


def test_feature_rows_may_come_in_pieces() -> None:
    """A draft extended piece by piece, with cropped rows between, equals one pass over all rows."""
    spec = make_spec(attention={"num_layers": 2, "sliding_window": 4})
    features, sequence = random_inputs(spec, LENGTH)
    draft = ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)
    hidden = draft.project(features)
    whole, full_cache = draft.feature_pass(hidden, sequence)
    cache = KVCache(spec, torch.float64)
    logits = []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        positions = torch.arange(start, stop)
        piece = draft.forward(sequence[start + 1 : stop + 1], hidden[start:stop], positions, cache)
        logits.append(piece.logits)
        rejected = piece.state[-1:].expand(2, -1)
        draft.forward(torch.tensor([1, 2]), rejected, torch.tensor([stop, stop + 1]), cache)
        cache.crop(stop)
    torch.testing.assert_close(torch.cat(logits), whole.logits, rtol=1e-12, atol=1e-12)
    assert len(cache) == len(full_cache) == LENGTH - 1


def test_long_sequences_are_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    features, sequence = random_inputs(spec, 20)
    draft = ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)
    at_once = draft.propose_chains(draft.project(features), sequence, 3)
    monkeypatch.setattr("sglang_eagle3_ext.reference._ROWS_AT_ONCE", 3)
    assert torch.equal(draft.propose_chains(draft.project(features), sequence, 3), at_once)


def test_float32_is_close_to_float64() -> None:
    spec = make_spec(norms={"around_fc": "per_source"}, attention={"num_layers": 2})
    tensors = random_tensors(spec)
    features, sequence = random_inputs(spec, LENGTH)
    single, double = (ReferenceDraft(spec, tensors, dtype=d) for d in (torch.float32, torch.float64))
    a, _ = single.feature_pass(single.project(features), sequence)
    b, _ = double.feature_pass(double.project(features), sequence)
    assert a.logits.dtype == torch.float32
    torch.testing.assert_close(a.logits.double(), b.logits, rtol=1e-4, atol=1e-4)
