"""``norm_concat_torch`` against a float64 oracle row by row, and to the bit against separate operators."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from oracles import as_float64, assert_within_budget, rms_norm_oracle
from sglang_eagle3_ext.kernels.norm_concat import norm_concat_torch

EPS = 1e-5


class Case(NamedTuple):
    rows: int
    width: int
    vocab: int


CASES = [
    pytest.param(Case(1, 1, 1), id="all-ones"),
    pytest.param(Case(0, 5, 3), id="no-rows"),
    pytest.param(Case(7, 33, 19), id="odd"),
    pytest.param(Case(3, 257, 5), id="past-a-power-of-two"),
    pytest.param(Case(4, 576, 31), id="smollm2-135m"),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Inputs(NamedTuple):
    hidden: torch.Tensor
    tokens: torch.Tensor
    table: torch.Tensor
    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor

    @property
    def norms(self) -> dict:
        return {"embed_norm_weight": self.embed_norm, "hidden_norm_weight": self.hidden_norm, "eps": EPS}


def make_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale + shift).to(dtype)

    return Inputs(
        draw(case.rows, case.width, scale=30.0),
        torch.randint(case.vocab, (case.rows,), generator=g),
        draw(case.vocab, case.width, scale=0.02),
        draw(case.width, scale=0.3, shift=1.0),
        draw(case.width, scale=0.3, shift=1.0),
    )


def stock_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SGLang's RMSNorm as its documentation states it: float32, times the weight, then rounded once."""
    f = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case: Case, dtype: torch.dtype) -> None:
    i = make_inputs(case, dtype)
    cat, residual = norm_concat_torch(i.hidden, i.tokens, i.table, **i.norms)
    expected = np.concatenate(
        [
            rms_norm_oracle(as_float64(i.table)[i.tokens.numpy()], as_float64(i.embed_norm), EPS),
            rms_norm_oracle(as_float64(i.hidden), as_float64(i.hidden_norm), EPS),
        ],
        axis=1,
    )
    eager = torch.cat([stock_norm(i.table[i.tokens], i.embed_norm), stock_norm(i.hidden, i.hidden_norm)], -1)
    assert_within_budget(cat, eager, expected, reductions=(case.width,))
    assert torch.equal(cat, eager), "the contract is exact against two norms and a concatenation"
    assert residual is i.hidden


def test_post_norm_residual_is_the_normed_state_in_memory_of_its_own() -> None:
    i = make_inputs(Case(7, 33, 19), torch.bfloat16)
    cat, residual = norm_concat_torch(i.hidden, i.tokens, i.table, residual="post_norm", **i.norms)
    assert torch.equal(residual, cat[:, 33:])
    before = cat.clone()
    residual.fill_(7.0)  # the next layer adds into its residual in place
    assert torch.equal(cat, before)


def test_takes_embeddings_in_place_of_ids() -> None:
    i = make_inputs(Case(7, 33, 19), torch.float32)
    by_id, _ = norm_concat_torch(i.hidden, i.tokens.int(), i.table, **i.norms)
    by_value, _ = norm_concat_torch(i.hidden, i.table[i.tokens], **i.norms)
    assert torch.equal(by_id, by_value)


def test_writes_every_output() -> None:
    i = make_inputs(Case(7, 33, 19), torch.float32)
    out, carried = torch.full((7, 66), float("nan")), torch.full((7, 33), float("nan"))
    cat, residual = norm_concat_torch(
        i.hidden, i.tokens, i.table, residual="post_norm", out=out, residual_out=carried, **i.norms
    )
    assert cat.data_ptr() == out.data_ptr()
    assert residual.data_ptr() == carried.data_ptr()
    fresh = norm_concat_torch(i.hidden, i.tokens, i.table, residual="post_norm", **i.norms)
    assert torch.equal(out, fresh[0])
    assert torch.equal(carried, fresh[1])


H, IDS, TABLE, N = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), torch.zeros(9, 6), torch.ones(6)
REFUSALS = {
    "hidden-is-a-vector": ({"hidden": N}, "hidden: got"),
    "id-count": ({"tokens_or_embeds": IDS[:2]}, r"tokens_or_embeds: got \[2\] int64"),
    "ids-without-table": ({"embed_weight": None}, "embed_weight: got nothing"),
    "table-width": ({"embed_weight": torch.zeros(9, 5)}, r"embed_weight: got \[9, 5\] .*\[V, 6\]"),
    "embeds-width": ({"tokens_or_embeds": torch.zeros(4, 5), "embed_weight": None}, r"expected \[4, 6\]"),
    "embeds-and-table": ({"tokens_or_embeds": H}, "embed_weight: got a table beside embeddings"),
    "embed-norm": ({"embed_norm_weight": torch.ones(5)}, r"embed_norm_weight: got \[5\]"),
    "hidden-norm": ({"hidden_norm_weight": torch.ones(12)}, r"hidden_norm_weight: got \[12\]"),
    "residual": ({"residual": "both"}, "residual: got 'both'"),
    "out": ({"out": torch.zeros(4, 6)}, r"out: got \[4, 6\] .*expected \[4, 12\]"),
    "device": ({"embed_norm_weight": N.to("meta")}, "embed_norm_weight: got a tensor on meta"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_rejects(change: dict, message: str) -> None:
    arguments = {
        "hidden": H,
        "tokens_or_embeds": IDS,
        "embed_weight": TABLE,
        "embed_norm_weight": N,
        "hidden_norm_weight": N,
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=message):
        norm_concat_torch(**{**arguments, **change})
