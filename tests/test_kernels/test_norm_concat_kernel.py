"""``norm_concat`` in the corrected interpreter against a float64 oracle row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from interpreter import interpret
from oracles import as_float64, assert_within_budget, rms_norm_oracle
from sglang_eagle3_ext.kernels import norm_concat as module
from sglang_eagle3_ext.kernels.norm_concat import norm_concat, norm_concat_torch
from traffic import Traffic

interpret(module)

EPS = 1e-5
NAN = float("nan")


class Case(NamedTuple):
    rows: int
    width: int
    vocab: int


CASES = [
    pytest.param(Case(1, 1, 1), id="all-ones"),
    pytest.param(Case(0, 5, 3), id="no-rows"),
    pytest.param(Case(7, 33, 19), id="odd"),
    pytest.param(Case(3, 257, 5), id="past-a-power-of-two"),
    pytest.param(Case(2, 7168, 11), id="kimi-k2.5"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Inputs(NamedTuple):
    hidden: torch.Tensor
    tokens: torch.Tensor
    table: torch.Tensor
    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor

    @property
    def norms(self) -> dict[str, Any]:
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


def oracle(i: Inputs) -> np.ndarray:
    left = rms_norm_oracle(as_float64(i.table)[i.tokens.numpy()], as_float64(i.embed_norm), EPS)
    return np.concatenate([left, rms_norm_oracle(as_float64(i.hidden), as_float64(i.hidden_norm), EPS)], axis=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case: Case, dtype: torch.dtype, record: Callable[..., None]) -> None:
    i = make_inputs(case, dtype)
    cat, residual = norm_concat(i.hidden, i.tokens, i.table, **i.norms)
    twin, _ = norm_concat_torch(i.hidden, i.tokens, i.table, **i.norms)
    assert_within_budget(cat, twin, oracle(i), reductions=(case.width,))
    assert residual is i.hidden
    by_value, _ = norm_concat(i.hidden, i.table[i.tokens], **i.norms)
    assert torch.equal(cat, by_value)
    with Traffic() as traffic:
        other, normed = norm_concat(i.hidden, i.tokens.int(), i.table, residual="post_norm", **i.norms)
    assert torch.equal(other, cat)
    assert torch.equal(normed, cat[:, case.width :])
    assert len(traffic.launches) == (1 if case.rows else 0)
    record("errors", kernel="norm_concat", case=str(case), dtype=dtype, oracle="float64", result=cat)
    if case.width == 7168 and dtype == torch.bfloat16:
        # tokens, their embeddings, states and norms read once, three blocks of columns written once
        least = case.rows * (4 + 5 * 7168 * 2) + 2 * 7168 * 2
        total = round(traffic.bytes() / least, 3)
        record("traffic", kernel="norm_concat", shape=f"width 7168, {case.rows} rows", total=total, bar=1.2)
        assert total <= 1.2  # the norms, read once a row


def test_reads_its_rows_and_writes_its_results_and_nothing_else() -> None:
    i = make_inputs(Case(7, 33, 19), torch.bfloat16)
    expected = norm_concat(i.hidden, i.tokens, i.table, residual="post_norm", **i.norms)
    hidden, table = torch.full((7, 40), NAN, dtype=torch.bfloat16), torch.full((19, 35), NAN, dtype=torch.bfloat16)
    hidden[:, :33] = i.hidden
    used = i.tokens.unique()
    table[used, :33] = i.table[used]
    out, carried = torch.full((7, 70), NAN, dtype=torch.bfloat16), torch.full((7, 34), NAN, dtype=torch.bfloat16)
    cat, residual = norm_concat(
        hidden[:, :33],
        i.tokens,
        table[:, :33],
        residual="post_norm",
        out=out[:, :66],
        residual_out=carried[:, :33],
        **i.norms,
    )
    assert cat.data_ptr() == out.data_ptr()
    assert residual.data_ptr() == carried.data_ptr()
    assert torch.equal(cat, expected[0])
    assert torch.equal(residual, expected[1])
    assert out[:, 66:].isnan().all()
    assert carried[:, 33:].isnan().all()


def test_post_norm_residual_is_in_memory_of_its_own() -> None:
    i = make_inputs(Case(3, 9, 4), torch.bfloat16)
    cat, residual = norm_concat(i.hidden, i.tokens, i.table, residual="post_norm", **i.norms)
    before = cat.clone()
    residual.fill_(7.0)  # the next layer adds into its residual in place
    assert torch.equal(cat, before)


@pytest.mark.parametrize("changed", ["hidden", "tokens", "table", "embed_norm", "hidden_norm"])
def test_one_wrong_value_is_seen(changed: str) -> None:
    i = make_inputs(Case(7, 33, 19), torch.bfloat16)
    right, _ = norm_concat(i.hidden, i.tokens, i.table, **i.norms)
    value = getattr(i, changed).clone()
    at = (4,) if value.dim() == 1 else (int(i.tokens[4]) if changed == "table" else 4, 5)
    value[at] = (value[at] + 1) % 19 if changed == "tokens" else value[at] * 1.5 + 0.25
    j = i._replace(**{changed: value})
    wrong, _ = norm_concat(j.hidden, j.tokens, j.table, **j.norms)
    with pytest.raises(AssertionError, match="exceeds budget"):
        assert_within_budget(wrong, right, oracle(i), reductions=(33,))


H, IDS, TABLE, N = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), torch.zeros(9, 6), torch.ones(6)
REFUSALS = {
    "float64": ({"hidden": H.double()}, r"hidden: got .*float64.*norm_concat_torch"),
    "columns": ({"hidden": H.T.contiguous().T}, r"hidden: got strides \[1, 4\]"),
    "table-columns": ({"embed_weight": TABLE.T.contiguous().T}, r"embed_weight: got strides"),
    "too-wide": (
        {"hidden": torch.zeros(1, 16385), "tokens_or_embeds": torch.zeros(1, 16385), "embed_weight": None}
        | {"embed_norm_weight": torch.ones(16385), "hidden_norm_weight": torch.ones(16385)},
        "hidden: got 16385 columns",
    ),
    "out": ({"out": torch.zeros(4, 6)}, r"out: got \[4, 6\] .*expected \[4, 12\]"),
    "residual-out": ({"residual": "post_norm", "residual_out": torch.zeros(4, 5)}, r"residual_out: got \[4, 5\]"),
    "residual": ({"residual": "both"}, "residual: got 'both'"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_rejects(change: dict[str, Any], message: str) -> None:
    arguments = {"hidden": H, "tokens_or_embeds": IDS, "embed_weight": TABLE, "eps": EPS}
    arguments |= {"embed_norm_weight": N, "hidden_norm_weight": N}
    with pytest.raises(ValueError, match=message):
        norm_concat(**arguments | change)
