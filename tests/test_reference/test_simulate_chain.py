"""``simulate_chain`` against a literal replay of a server: extend, draft, verify, forget, one request at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_drafts import make_spec, random_tensors

from sglang_eagle3_ext.reference import ChainResult, KVCache, ReferenceDraft, simulate_chain


def make_draft(**changes: object) -> ReferenceDraft:
    spec = make_spec(vocab={"draft": 6, "target": 9}, **changes)
    return ReferenceDraft(spec, random_tensors(spec), dtype=torch.float64)


def write_text(draft: ReferenceDraft, prompt: int, length: int, agree: float, seed: int):
    """Write a text that goes on as the draft proposes with the given probability at each token."""
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(length, draft.spec.num_sources * 12, generator=g, dtype=torch.float64) * 3
    tokens = torch.randint(9, (prompt + 1,), generator=g).tolist()
    while len(tokens) < length:
        proposed = draft.propose_chain(features, torch.tensor(tokens), 1).item()
        other = int(torch.randint(9, (1,), generator=g))
        tokens.append(proposed if float(torch.rand(1, generator=g)) < agree else other)
    return torch.tensor(tokens), features


def serve(
    draft: ReferenceDraft, tokens: torch.Tensor, features: torch.Tensor, prompt: int, steps: int, answer: int
) -> ChainResult:
    """Serve one request with explicit state: a draft cache, a committed length, a pending first proposal.

    ``tokens`` is what the target writes; each verify reads it as the target's greedy choice after every draft
    that was accepted. The draft extend runs over the whole width of the tree, rejected rows included, and the
    cache keeps the committed ones.
    """
    known = tokens.tolist()
    hidden = draft.project(features)
    cache = KVCache(draft.spec, draft.dtype)
    histogram = [0] * (steps + 1)
    step = draft.forward(tokens[1 : prompt + 1], hidden[:prompt], torch.arange(prompt), cache)[-1:]
    committed, emitted = prompt, 1
    while emitted < answer:
        chain: list[int] = []
        here = step
        for k in range(steps):
            chain.append(int(draft.to_target(here.best())))
            if k < steps - 1:
                here = draft.forward(torch.tensor(chain[-1:]), here.state, torch.tensor([committed + k]), cache)
        cache.crop(committed)
        accepted = 0
        for token in chain:
            at = committed + 1 + accepted
            if at >= len(known) or token != known[at]:
                break
            accepted += 1
        histogram[accepted] += 1
        emitted += accepted + 1
        if emitted >= answer:
            break
        # Rows committed .. committed+steps were verified; what the target wrote after the last accepted row, and
        # its states there, depend on rejected drafts and must not matter: poison them.
        rows = torch.arange(committed, committed + steps + 1)
        inputs = torch.tensor([known[r + 1] if r <= committed + accepted else 0 for r in rows.tolist()])
        states = hidden[rows.clamp(max=len(hidden) - 1)].clone()
        states[accepted + 1 :] = 1e3
        extended = draft.forward(inputs, states, rows, cache)
        step = extended[accepted : accepted + 1]
        committed += accepted + 1
        cache.crop(committed)
    return ChainResult(tuple(histogram), answer)


@settings(deadline=None, max_examples=40)
@given(
    prompt=st.integers(1, 5),
    answer=st.integers(1, 18),
    steps=st.integers(1, 5),
    agree=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    recurrent=st.sampled_from(["pre_norm", "post_norm"]),
    window=st.sampled_from([None, 3]),
    beyond=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_counts_what_a_server_counts(
    prompt: int,
    answer: int,
    steps: int,
    agree: float,
    recurrent: str,
    window: int | None,
    beyond: bool,
    seed: int,
) -> None:
    draft = make_draft(norms={"recurrent_state": recurrent}, attention={"sliding_window": window})
    length = prompt + answer + (steps if beyond else 0)
    tokens, features = write_text(draft, prompt, length, agree, seed)
    expected = serve(draft, tokens, features, prompt, steps, answer)
    got = simulate_chain(draft, tokens, features, prompt, steps, completion_tokens=answer)
    assert got == expected


def test_histogram_has_every_outcome_somewhere() -> None:
    """The texts above reach deep acceptance; without it the test would prove nothing."""
    draft = make_draft()
    total = ChainResult((0,) * 4, 0)
    for seed in range(8):
        tokens, features = write_text(draft, 3, 40, 0.8, seed)
        total += simulate_chain(draft, tokens, features, 3, 3)
    assert min(total.histogram) > 0
    assert total.completion_tokens == 8 * 37


def test_states_past_the_last_row_are_not_read() -> None:
    draft = make_draft()
    tokens, features = write_text(draft, 3, 20, 0.7, 1)
    longer = torch.cat([features, torch.full((5, features.shape[1]), float("nan"), dtype=torch.float64)])
    assert simulate_chain(draft, tokens, longer, 3, 3) == simulate_chain(draft, tokens, features, 3, 3)
    assert simulate_chain(draft, tokens, features[:-1], 3, 3) == simulate_chain(draft, tokens, features, 3, 3)


def test_result_speaks_sglangs_words() -> None:
    result = ChainResult((5, 3, 0, 2), 20)
    assert result.verify_steps == 10
    assert result.accept_length == 2.0
    assert result.accept_per_position == (0.5, 0.2, 0.2)
    assert result + result == ChainResult((10, 6, 0, 4), 40)
    with pytest.raises(ValueError, match="histogram: got 2 steps; expected 3"):
        result + ChainResult((1, 1, 1), 3)


def test_an_answer_of_one_token_needs_no_verify_step() -> None:
    draft = make_draft()
    tokens, features = write_text(draft, 3, 4, 1.0, 0)
    result = simulate_chain(draft, tokens, features, 3, 3)
    assert result == ChainResult((0, 0, 0, 0), 1)
    assert math.isnan(result.accept_length)
    assert all(math.isnan(share) for share in result.accept_per_position)


@pytest.mark.parametrize(("prompt", "steps", "answer"), [(0, 3, None), (20, 3, None), (3, 0, None), (3, 3, 18)])
def test_rejects_lengths_that_do_not_fit(prompt: int, steps: int, answer: int | None) -> None:
    draft = make_draft()
    tokens, features = torch.zeros(20, dtype=torch.int64), torch.zeros(20, 36)
    with pytest.raises(ValueError, match="tokens: got 20 with a prompt of"):
        simulate_chain(draft, tokens, features, prompt, steps, completion_tokens=answer)
