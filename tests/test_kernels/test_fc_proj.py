"""``fc_proj_torch`` against a float64 oracle that multiplies source by source."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import as_float64, assert_within_budget, fc_proj_oracle
from sglang_eagle3_ext.kernels.fc_proj import fc_proj_torch

EPS = 1e-5


class Case(NamedTuple):
    rows: int
    sources: int
    width: int
    out: int


CASES = [
    pytest.param(Case(1, 1, 1, 1), id="all-ones"),
    pytest.param(Case(0, 3, 5, 4), id="no-rows"),
    pytest.param(Case(5, 3, 7, 11), id="odd"),
    pytest.param(Case(3, 8, 33, 17), id="eight-sources"),
    pytest.param(Case(13, 2, 129, 65), id="past-powers-of-two"),
    pytest.param(Case(4, 3, 576, 576), id="smollm2-135m"),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NORMS = ["none", "per_source", "concatenation"]


class Inputs(NamedTuple):
    sources: list[torch.Tensor]
    weight: torch.Tensor
    norm_weight: torch.Tensor | None
    bias: torch.Tensor


def make_inputs(case: Case, norm: str, dtype: torch.dtype, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale + shift).to(dtype)

    # Sources differ in scale by three orders of magnitude, as shallow and deep states of a target do.
    sources = [draw(case.rows, case.width, scale=10.0 ** (k % 4 - 1)) for k in range(case.sources)]
    weight = draw(case.out, case.sources * case.width, scale=(case.sources * case.width) ** -0.5)
    shapes = {"none": None, "per_source": (case.sources, case.width), "concatenation": (weight.shape[1],)}
    shape = shapes[norm]
    return Inputs(sources, weight, None if shape is None else draw(*shape, scale=0.3, shift=1.0), draw(case.out))


def eager(inputs: Inputs, norm: str) -> torch.Tensor:
    """Norms and projection as separate operators in the input dtype: what stock code does."""
    blocks = inputs.sources
    width = blocks[0].shape[1]
    if norm == "per_source" and inputs.norm_weight is not None:
        blocks = [F.rms_norm(b, (width,), w, EPS) for b, w in zip(blocks, inputs.norm_weight, strict=True)]
    x = torch.cat(blocks, dim=-1)
    if norm == "concatenation":
        x = F.rms_norm(x, (x.shape[-1],), inputs.norm_weight, EPS)
    return F.linear(x, inputs.weight, inputs.bias)


def oracle(inputs: Inputs, norm: str):
    return fc_proj_oracle(
        [as_float64(s) for s in inputs.sources],
        as_float64(inputs.weight),
        norm=norm,
        norm_weight=None if inputs.norm_weight is None else as_float64(inputs.norm_weight),
        eps=EPS,
        bias=as_float64(inputs.bias),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case: Case, norm: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, norm, dtype)
    common = {"norm": norm, "norm_weight": inputs.norm_weight, "eps": EPS, "bias": inputs.bias}
    packed = fc_proj_torch(torch.cat(inputs.sources, -1), inputs.weight, num_sources=case.sources, **common)
    separate = fc_proj_torch(inputs.sources, inputs.weight, **common)
    assert packed.dtype == dtype
    assert torch.equal(packed, separate)
    width = case.sources * case.width
    assert_within_budget(packed, eager(inputs, norm), oracle(inputs, norm), reductions=(width, width))


def test_float64_is_accurate_to_float64() -> None:
    for norm in NORMS:
        inputs = make_inputs(Case(5, 3, 7, 11), norm, torch.float64)
        y = fc_proj_torch(
            inputs.sources,
            inputs.weight,
            norm=norm,
            norm_weight=inputs.norm_weight,
            eps=EPS,
            bias=inputs.bias,
        )
        expected = torch.from_numpy(oracle(inputs, norm))
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_change_the_result(norm: str) -> None:
    """The three norms are three functions: none may silently stand in for another."""
    inputs = make_inputs(Case(5, 3, 7, 11), norm, torch.float32)
    for other in set(NORMS) - {norm}:
        swapped = make_inputs(Case(5, 3, 7, 11), other, torch.float32)
        a = fc_proj_torch(inputs.sources, inputs.weight, norm=norm, norm_weight=inputs.norm_weight)
        b = fc_proj_torch(inputs.sources, inputs.weight, norm=other, norm_weight=swapped.norm_weight)
        assert (a - b).abs().max() > 0.1


@pytest.mark.parametrize("norm", NORMS)
def test_gathers_rows_and_reads_no_other(norm: str) -> None:
    inputs = make_inputs(Case(9, 3, 7, 5), norm, torch.float32)
    rows = torch.tensor([8, 0, 3, 3])
    common = {"norm": norm, "norm_weight": inputs.norm_weight, "bias": inputs.bias}
    expected = fc_proj_torch([s[rows] for s in inputs.sources], inputs.weight, **common)
    poisoned = [s.clone() for s in inputs.sources]
    for s in poisoned:
        s[[1, 2, 4, 5, 6, 7]] = float("nan")
    assert torch.equal(fc_proj_torch(poisoned, inputs.weight, rows=rows, **common), expected)
    packed = torch.cat(poisoned, -1)
    got = fc_proj_torch(packed, inputs.weight, rows=rows.int(), num_sources=3, **common)
    assert torch.equal(got, expected)


def test_writes_every_output() -> None:
    inputs = make_inputs(Case(5, 3, 7, 11), "none", torch.bfloat16)
    out = torch.full((5, 11), float("nan"), dtype=torch.bfloat16)
    y = fc_proj_torch(inputs.sources, inputs.weight, out=out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(out, fc_proj_torch(inputs.sources, inputs.weight))


def test_takes_a_weight_of_another_dtype() -> None:
    inputs = make_inputs(Case(5, 3, 7, 11), "per_source", torch.bfloat16)
    common = {"norm": "per_source", "norm_weight": inputs.norm_weight, "bias": inputs.bias}
    prepared = fc_proj_torch(inputs.sources, inputs.weight.float(), **common)
    assert prepared.dtype == torch.bfloat16
    assert torch.equal(prepared, fc_proj_torch(inputs.sources, inputs.weight, **common))


def test_takes_any_strides() -> None:
    inputs = make_inputs(Case(6, 3, 7, 11), "none", torch.float32)
    strided = [s.t().contiguous().t() for s in inputs.sources]
    assert torch.equal(fc_proj_torch(strided, inputs.weight), fc_proj_torch(inputs.sources, inputs.weight))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), norm=st.sampled_from(NORMS), sources=st.integers(1, 8))
def test_order_of_sources_is_a_permutation_of_columns(data: st.DataObject, norm: str, sources: int) -> None:
    """Feeding the sources in another order, with the columns and norms moved along, changes nothing."""
    order = data.draw(st.permutations(range(sources)))
    inputs = make_inputs(Case(3, sources, 5, 4), norm, torch.float64, seed=sources)
    blocks = inputs.weight.unflatten(1, (sources, 5))
    moved_norm = inputs.norm_weight
    if moved_norm is not None:
        moved_norm = moved_norm.reshape(sources, 5)[order].reshape(inputs.norm_weight.shape)
    declared = fc_proj_torch(inputs.sources, inputs.weight, norm=norm, norm_weight=inputs.norm_weight)
    captured = fc_proj_torch(
        [inputs.sources[k] for k in order], blocks[:, order].flatten(1), norm=norm, norm_weight=moved_norm
    )
    torch.testing.assert_close(captured, declared, rtol=1e-12, atol=1e-12)


X = torch.zeros(4, 6)
W = torch.zeros(5, 6)
REFUSALS = {
    "width": ({"x": X, "weight": torch.zeros(5, 7)}, r"weight: got \[5, 7\] .*expected .*\[E, 6\]"),
    "sources-do-not-divide": ({"x": X, "weight": W, "num_sources": 4}, "x: got 6 columns for 4 sources"),
    "no-source": ({"x": [], "weight": W}, "x: got an empty sequence"),
    "ragged": ({"x": [X[:, :3], X[:2, 3:]], "weight": W}, r"x\[1\]: got \[2, 3\]"),
    "dtypes": ({"x": [X[:, :3], X[:, 3:].half()], "weight": W}, r"x\[1\]: got \[4, 3\] float16"),
    "integers": ({"x": X.int(), "weight": W}, "x: got .*int32.*floating point"),
    "count-contradicts": (
        {"x": [X[:, :3], X[:, 3:]], "weight": W, "num_sources": 3},
        "num_sources: got 3; expected 2",
    ),
    "unknown-norm": ({"x": X, "weight": W, "norm": "both"}, "norm: got 'both'"),
    "norm-without-weight": (
        {"x": X, "weight": W, "norm": "concatenation"},
        r"norm_weight: got nothing; expected \[6\]",
    ),
    "norm-shape": (
        {"x": X, "weight": W, "norm": "per_source", "num_sources": 2, "norm_weight": torch.ones(6)},
        r"norm_weight: got \[6\] .*expected \[2, 3\]",
    ),
    "weight-without-norm": (
        {"x": X, "weight": W, "norm_weight": torch.ones(6)},
        'norm_weight: .*norm="none"',
    ),
    "bias": ({"x": X, "weight": W, "bias": torch.zeros(6)}, r"bias: got \[6\]"),
    "rows": ({"x": X, "weight": W, "rows": torch.zeros(2)}, "rows: got .*float32.*int32 or int64"),
    "out": ({"x": X, "weight": W, "out": torch.zeros(4, 6)}, r"out: got \[4, 6\] .*expected \[4, 5\]"),
    "device": ({"x": X, "weight": W.to("meta")}, "weight: got a tensor on meta; expected cpu"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_rejects(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fc_proj_torch(**arguments)


def test_reports_all_problems_at_once() -> None:
    with pytest.raises(ValueError, match="weight:") as error:
        fc_proj_torch(X, torch.zeros(5, 7), bias=torch.zeros(9), rows=torch.zeros(2))
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["weight", "bias", "rows"]


def test_every_pair_of_options_agrees_with_the_plain_formula() -> None:
    """Options compose: rows, bias and out in any combination."""
    inputs = make_inputs(Case(6, 2, 3, 5), "none", torch.float64)
    rows = torch.tensor([5, 1])
    full = torch.cat(inputs.sources, -1) @ inputs.weight.T
    for use_rows, use_bias, use_out in itertools.product([False, True], repeat=3):
        expected = full + inputs.bias if use_bias else full
        expected = expected[rows] if use_rows else expected
        y = fc_proj_torch(
            inputs.sources,
            inputs.weight,
            rows=rows if use_rows else None,
            bias=inputs.bias if use_bias else None,
            out=torch.empty_like(expected) if use_out else None,
        )
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
