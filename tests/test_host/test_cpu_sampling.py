"""Sampling verification and renormalisation: tokens follow the target's distribution, whatever was drafted."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.cpu import tree

VOCABULARY = 5
TOKENS = torch.tensor([0, 1, 2, 3, 4, 0])
FIRST_CHILD = torch.tensor([1, 3, -1, -1, -1, -1])
SIBLING = torch.tensor([-1, 2, -1, 4, 5, -1])
"""The root tries tokens 1 and 2; behind token 1 it tries 3, 4 and 0."""


def sample(
    probs: torch.Tensor,
    coins: torch.Tensor,
    last_coins: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> list[tuple[int, ...]]:
    """Verify the tree above once per row of coins and return the tokens that each run produced."""
    batch, size = coins.shape
    predicts = torch.full((batch * size,), -9, dtype=torch.int32)
    accepted = torch.full((batch, 3), -1, dtype=torch.int32)
    count = torch.full((batch,), -9, dtype=torch.int32)
    shared = (TOKENS, torch.arange(size), FIRST_CHILD, SIBLING)
    tree.verify_tree_sampling(
        predicts,
        accepted,
        count,
        *(tensor.expand(batch, size) for tensor in shared),
        coins,
        last_coins,
        probs.expand(batch, -1, -1),
        torch.zeros(batch, size, VOCABULARY),
        threshold_single,
        threshold_acc,
    )
    assert torch.equal(count, (accepted >= 0).sum(1).int() - 1)
    return [tuple(predicts[row[row >= 0].long()].tolist()) for row in accepted]


def chi_square(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    total = sum(observed.values())
    assert set(observed) <= set(expected)
    return sum((observed[k] - total * p) ** 2 / (total * p) for k, p in expected.items())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pairs_of_tokens_follow_the_target(seed: int) -> None:
    """First and second token are jointly distributed as sampling the target twice would have it."""
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(6, VOCABULARY, generator=generator)).softmax(-1)
    runs = 6000
    coins = torch.rand(runs, 6, generator=generator)
    produced = sample(probs, coins, torch.rand(runs, generator=generator))
    node_of_first = {1: 1, 2: 2}
    expected: dict[tuple[int, ...], float] = {}
    for first in range(VOCABULARY):
        node = node_of_first.get(first)
        if node is None:
            expected[first,] = float(probs[0, first])
            continue
        for second in range(VOCABULARY):
            expected[first, second] = float(probs[0, first] * probs[node, second])
    # Where the second token was accepted too, a third was drawn from its node; drop it here.
    observed = Counter(tokens[:2] for tokens in produced)
    freedom = len(expected) - 1
    # The 99.9 % quantile in Wilson and Hilferty's approximation.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square(observed, expected) < limit
    thirds = [tokens for tokens in produced if len(tokens) == 3]
    assert thirds
    assert all(tokens[1] in (3, 4, 0) for tokens in thirds)


def test_third_tokens_follow_their_own_node() -> None:
    probs = torch.full((6, VOCABULARY), 0.2)
    probs[3] = torch.tensor([0.1, 0.5, 0.2, 0.2, 0.0])
    runs = 8000
    generator = torch.Generator().manual_seed(5)
    produced = sample(probs, torch.rand(runs, 6, generator=generator), torch.rand(runs, generator=generator))
    thirds = Counter(tokens[2] for tokens in produced if tokens[:2] == (1, 3))
    total = sum(thirds.values())
    assert total > 200
    for token, p in enumerate(probs[3].tolist()):
        assert abs(thirds[token] / total - p) < 4 * math.sqrt(max(p * (1 - p), 1e-9) / total) + 1e-9


def test_one_certain_token_is_the_greedy_walk() -> None:
    """With all mass on one token per node (top_k = 1) sampling accepts what greedy verification accepts."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        wanted = torch.randint(0, VOCABULARY, (1, 6), generator=generator)
        logits = torch.randn(6, VOCABULARY, generator=generator)
        logits.scatter_(1, wanted.view(-1, 1), 9.0)
        probs = tree.top_k_renorm_prob(logits.softmax(-1), torch.ones(6, dtype=torch.int32))
        coins = torch.rand(1, 6, generator=generator)
        (tokens,) = sample(probs, coins, torch.rand(1, generator=generator))
        accepted = torch.full((1, 3), -1, dtype=torch.int32)
        predicts = torch.full((6,), -9, dtype=torch.int32)
        shared = (TOKENS, torch.arange(6), FIRST_CHILD, SIBLING)
        arguments = tuple(tensor.unsqueeze(0) for tensor in shared)
        tree.verify_tree_greedy(predicts, accepted, torch.zeros(1, dtype=torch.int32), *arguments, wanted)
        assert tokens == tuple(predicts[accepted[accepted >= 0].long()].tolist())


def test_impossible_tokens_are_never_accepted() -> None:
    probs = torch.zeros(6, VOCABULARY)
    probs[:, 4] = 1.0
    coins = torch.zeros(40, 6)
    assert set(sample(probs, coins, torch.linspace(0, 0.999, 40))) == {(4,)}


def test_rounding_at_the_end_of_the_distribution_draws_a_possible_token() -> None:
    probs = torch.zeros(6, VOCABULARY)
    probs[:, 0] = 1 / 3
    probs[:, 3] = 2 / 3
    assert sample(probs, torch.ones(1, 6), torch.tensor([1.0])) == [(3,)]


def test_thresholds_accept_more() -> None:
    probs = torch.full((6, VOCABULARY), 0.2)
    unwilling, last = torch.full((1, 6), 0.99), torch.tensor([0.0])
    assert sample(probs, unwilling, last) == [(0,)]
    assert sample(probs, unwilling, last, threshold_single=0.2) == [(1, 3, 0)]
    assert sample(probs, unwilling, last, threshold_acc=0.2) == [(1, 3, 0)]


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 301])
def test_top_k_keeps_the_likeliest(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.randn(4, vocabulary, generator=generator).softmax(-1)
    top_k = torch.tensor([1, 2, 1 << 30, 5], dtype=torch.int32)
    kept = tree.top_k_renorm_prob(probs, top_k)
    for row, k, out in zip(probs.double(), top_k.tolist(), kept, strict=True):
        expected = torch.zeros(vocabulary, dtype=torch.float64)
        for token in sorted(range(vocabulary), key=lambda t: -float(row[t]))[:k]:
            expected[token] = row[token]
        assert torch.allclose(out.double(), expected / expected.sum(), atol=1e-6)


def test_top_k_of_everything_changes_nothing() -> None:
    probs = torch.randn(3, 9).softmax(-1)
    assert tree.top_k_renorm_prob(probs, torch.full((3,), 1 << 30)) is probs


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 301])
def test_top_p_keeps_the_fewest_that_reach_it(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probs = (3 * torch.randn(4, vocabulary, generator=generator)).softmax(-1)
    top_p = torch.tensor([0.05, 0.5, 0.93, 1.0])
    kept = tree.top_p_renorm_prob(probs, top_p)
    for row, p, out in zip(probs.double(), top_p.tolist(), kept, strict=True):
        expected = torch.zeros(vocabulary, dtype=torch.float64)
        for token in sorted(range(vocabulary), key=lambda t: -float(row[t])):
            if expected.sum() >= p:
                break
            expected[token] = row[token]
        assert torch.allclose(out.double(), expected / expected.sum(), atol=1e-6)


def test_other_mask_layouts_are_refused() -> None:
    nothing = torch.empty(0)
    with pytest.raises(UnsupportedError, match=r"tree_mask_mode: got 2; expected FULL_MASK or QLEN_ONLY"):
        tree.build_tree(*([nothing] * 8), 1, 1, 2, 2)
