"""``fc_proj`` in the corrected interpreter against the float64 oracle that multiplies source by source."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from interpreter import interpret, skip_products
from oracles import as_float64, assert_within_budget, fc_proj_oracle
from sglang_eagle3_ext.kernels import fc_proj as module
from sglang_eagle3_ext.kernels.arch import H200, FcProjLaunch, fc_proj_launch
from sglang_eagle3_ext.kernels.fc_proj import FP8, fc_proj, fc_proj_torch, quantise_fc_weight
from traffic import Traffic

interpret(module)

EPS = 1e-5
ABOUT = {"kernel": "fc_proj"}
NORMS = ["none", "per_source", "concatenation"]
SPLIT = FcProjLaunch(block_t=16, block_e=16, block_k=16, parts=2, split=True, warps=4, stages=2)
WALK = replace(SPLIT, split=False)
ROUNDED = FcProjLaunch(block_t=64, block_e=64, block_k=512, parts=1, split=False, warps=4, stages=2)


class Case(NamedTuple):
    rows: int
    sources: int
    width: int
    out: int
    launch: FcProjLaunch | None = None


# Widths that no tile divides, parts that end early, several tiles each way, one program that walks all parts.
CASES = [
    pytest.param(Case(1, 1, 1, 1), id="all-ones"),
    pytest.param(Case(5, 3, 7, 11), id="odd"),
    pytest.param(Case(3, 8, 33, 17, SPLIT), id="eight-sources"),
    pytest.param(Case(17, 2, 65, 19, SPLIT), id="past-a-tile"),
    pytest.param(Case(19, 3, 65, 17, WALK), id="walks-all-parts"),
    pytest.param(Case(2, 3, 97, 5, replace(SPLIT, parts=3)), id="last-part-shorter"),
    pytest.param(Case(4, 5, 64, 32, replace(WALK, parts=4)), id="even"),
    pytest.param(Case(7, 3, 576, 64), id="smollm2-135m"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Inputs(NamedTuple):
    sources: list[torch.Tensor]
    weight: torch.Tensor
    norm: str
    norm_weight: torch.Tensor | None
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        names = ("norm", "norm_weight", "bias", "weight_scale")
        return {name: getattr(self, name) for name in names} | {"eps": EPS}

    @property
    def packed(self) -> dict[str, Any]:
        return {"x": torch.cat(self.sources, -1), "num_sources": len(self.sources)}


def make_inputs(case: Case, norm: str, dtype: torch.dtype, *, scale: float = 1.0, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale + shift).to(dtype)

    # Sources differ in scale by three orders of magnitude, as shallow and deep states of a target do.
    sources = [draw(case.rows, case.width, scale=scale * 10.0 ** (k % 4 - 1)) for k in range(case.sources)]
    weight = draw(case.out, case.sources * case.width, scale=(case.sources * case.width) ** -0.5)
    shape = {"none": None, "per_source": (case.sources, case.width), "concatenation": (weight.shape[1],)}[norm]
    norm_weight = None if shape is None else draw(*shape, scale=0.3, shift=1.0)
    return Inputs(sources, weight, norm, norm_weight, draw(case.out))


def oracle(i: Inputs) -> np.ndarray:
    weight = as_float64(i.weight)
    return fc_proj_oracle(
        [as_float64(s) for s in i.sources],
        weight if i.weight_scale is None else weight * as_float64(i.weight_scale)[:, None],
        norm=i.norm,
        norm_weight=None if i.norm_weight is None else as_float64(i.norm_weight),
        eps=EPS,
        bias=None if i.bias is None else as_float64(i.bias),
    )


def unfused(i: Inputs) -> torch.Tensor:
    """Stock's route: norms, concatenation and projection as operators of their own, each rounded to the dtype."""

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), EPS).to(x.dtype)

    blocks = i.sources
    if i.norm == "per_source" and i.norm_weight is not None:
        blocks = [norm(b, w) for b, w in zip(blocks, i.norm_weight, strict=True)]
    x = torch.cat(blocks, dim=-1)
    if i.norm == "concatenation":
        x = norm(x, i.norm_weight)
    y = F.linear(x.float(), i.weight.float()).to(x.dtype)
    return y if i.bias is None else y + i.bias


def dequantised(i: Inputs) -> Inputs:
    if i.weight_scale is None:
        return i
    return i._replace(weight=i.weight.float() * i.weight_scale[:, None], weight_scale=None)


def assert_right(y: torch.Tensor, i: Inputs) -> None:
    width = i.weight.shape[1]
    assert_within_budget(y, unfused(dequantised(i)), oracle(i), reductions=(width, width))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", CASES)
def test_matches_oracle(case: Case, norm: str, dtype: torch.dtype, record: Callable[..., None]) -> None:
    i = make_inputs(case, norm, dtype)
    packed = fc_proj(weight=i.weight, launch=case.launch, **i.packed, **i.options)
    separate = fc_proj(i.sources, i.weight, launch=case.launch, **i.options)
    assert packed.dtype == dtype
    assert torch.equal(packed, separate)
    assert_right(packed, i)
    record("errors", **ABOUT, case=f"{case}, norm {norm}", dtype=dtype, oracle="float64", result=packed)


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "width"), [(1, 512), (8, 512), (32, 1024), (16, 4096), (8, 7168)])
def test_is_never_less_accurate_than_the_unfused_route(
    rows: int, width: int, norm: str, scale: float, record: Callable[..., None]
) -> None:
    i = make_inputs(Case(rows, 3, width, 64), norm, torch.bfloat16, scale=scale)
    y = fc_proj(weight=i.weight, **i.packed, **i.options)
    truth = oracle(i)
    ours, theirs = (np.abs(as_float64(t) - truth) for t in (y, unfused(i)))
    assert ours.max() <= theirs.max() + 1e-6 * np.abs(truth).max(), (ours.max(), theirs.max())
    case = f"{rows} x 3 x {width}, norm {norm}, states times {scale:g}"
    share = round(float(ours.max() / theirs.max()), 3)
    record("errors", **ABOUT, case=case, dtype=y.dtype, oracle="separate operators", error=share, bar=1.0)
    rounded = np.abs(as_float64(fc_proj(weight=i.weight, launch=ROUNDED, **i.packed, **i.options)) - truth)
    for error in (ours, rounded):
        assert np.sqrt(np.mean(error**2)) <= np.sqrt(np.mean(theirs**2))


@pytest.mark.parametrize("norm", NORMS)
def test_many_rows_are_as_accurate_on_the_whole(norm: str) -> None:
    """From 33 rows on a tile's normed states are rounded once more, for the tensor cores: as in the unfused route."""
    i = make_inputs(Case(64, 3, 1024, 64), norm, torch.bfloat16)
    truth = oracle(i)
    y = fc_proj(weight=i.weight, **i.packed, **i.options)
    ours, theirs = (np.sqrt(np.mean((as_float64(t) - truth) ** 2)) for t in (y, unfused(i)))
    assert ours <= theirs


def test_large_states_do_not_overflow_half_precision() -> None:
    """The norm comes before the rounding: ``x * norm_weight`` alone would leave the range of fp16."""
    i = make_inputs(Case(3, 2, 33, 17), "per_source", torch.float16, scale=2000.0)
    i = i._replace(norm_weight=i.norm_weight * 8)
    y = fc_proj(i.sources, i.weight, **i.options)
    assert (i.sources[1].abs().max() * i.norm_weight.abs().max()) > torch.finfo(torch.float16).max
    assert_right(y, i)


def quantised(i: Inputs) -> Inputs:
    weight, scale = quantise_fc_weight(i.weight)
    return i._replace(weight=weight, weight_scale=scale)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_takes_an_fp8_weight(dtype: torch.dtype, norm: str, record: Callable[..., None]) -> None:
    """Against the float64 truth of the quantised weight: neither kernel nor twin adds an error of its own."""
    plain = make_inputs(Case(5, 3, 65, 33), norm, dtype)
    i = quantised(plain)
    assert i.weight.dtype == FP8
    # Three bits of mantissa; the smallest step, 2^-9 of the scale, below the normal range.
    error = (dequantised(i).weight - plain.weight.float()).abs()
    assert (error <= plain.weight.float().abs() / 16 + 2.0**-10 * i.weight_scale[:, None]).all()
    for y in (
        fc_proj(i.sources, i.weight, launch=SPLIT, **i.options),
        fc_proj(i.sources, i.weight, launch=WALK, **i.options),
        fc_proj_torch(i.sources, i.weight, **i.options),
    ):
        assert_right(y, i)
    split = fc_proj(i.sources, i.weight, launch=SPLIT, **i.options)
    record("errors", **ABOUT, case=f"norm {norm}", dtype=dtype, stored=FP8, oracle="float64", result=split)


def test_an_all_zero_column_quantises_to_zero() -> None:
    weight, scale = quantise_fc_weight(torch.tensor([[0.0, 0.0], [3.0, -1.5]], dtype=torch.bfloat16))
    assert (weight.float() * scale[:, None]).tolist() == [[0.0, 0.0], [3.0, -1.5]]


def test_rows_bias_out_and_padding_in_any_combination() -> None:
    """Gathers what is asked for, reads nothing else, writes its result and nothing else."""
    i = make_inputs(Case(9, 3, 7, 5), "per_source", torch.float32)
    rows = torch.tensor([8, 0, 3, 3])
    nan = float("nan")
    padded = torch.full((9, 24), nan)
    padded[:, :21] = torch.cat(i.sources, -1)
    weight = torch.full((5, 40), nan)
    weight[:, :21] = i.weight
    for use_rows, use_bias, use_out, launch in itertools.product(*[[False, True]] * 3, [None, WALK]):
        x = padded.clone()
        if use_rows:
            x[[1, 2, 4, 5, 6, 7]] = nan
        expected = fc_proj_torch(
            i.sources, i.weight, **i.options | {"bias": i.bias if use_bias else None}, rows=rows if use_rows else None
        )
        buffer = torch.full((len(expected), 9), nan)
        y = fc_proj(
            x[:, :21],
            weight[:, :21],
            num_sources=3,
            **i.options | {"bias": i.bias if use_bias else None},
            rows=rows.int() if use_rows else None,
            out=buffer[:, :5] if use_out else None,
            launch=launch,
        )
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        if use_out:
            assert y.data_ptr() == buffer.data_ptr()
            assert buffer[:, 5:].isnan().all()


def test_no_rows_launch_nothing() -> None:
    i = make_inputs(Case(0, 3, 5, 4), "none", torch.bfloat16)
    with Traffic() as traffic:
        y = fc_proj(i.sources, i.weight, **i.options)
    assert y.shape == (0, 4)
    assert traffic.launches == []


def mutated(t: torch.Tensor | None, *at: int) -> torch.Tensor:
    assert t is not None
    t = t.clone()
    t[at] = t[at] * 1.5 + 0.25
    return t


MUTATIONS: dict[str, Callable[[Inputs], Inputs]] = {
    "one state": lambda i: i._replace(sources=[i.sources[0], mutated(i.sources[1], 2, 6), i.sources[2]]),
    "one weight": lambda i: i._replace(weight=mutated(i.weight, 10, 20)),
    "one norm weight": lambda i: i._replace(norm_weight=mutated(i.norm_weight, 2, 3)),
    "one bias": lambda i: i._replace(bias=mutated(i.bias, 10)),
    "two sources swapped": lambda i: i._replace(sources=[i.sources[0], i.sources[2], i.sources[1]]),
    "two rows swapped": lambda i: i._replace(sources=[s[[0, 2, 1, 3, 4]] for s in i.sources]),
    "one scale": lambda i: i._replace(weight_scale=mutated(i.weight_scale, 3)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_wrong_value_is_seen(name: str) -> None:
    """The budget is tight enough to tell one changed value anywhere."""
    i = make_inputs(Case(5, 3, 7, 11), "per_source", torch.bfloat16)
    if name == "one scale":
        i = quantised(i)
    right, wrong = (fc_proj(j.sources, j.weight, launch=SPLIT, **j.options) for j in (i, MUTATIONS[name](i)))
    assert_right(right, i)
    with pytest.raises(AssertionError, match="exceeds budget"):
        assert_right(wrong, i)


@pytest.mark.parametrize(("rows", "most_pulled"), [(8, 1.15), (64, 1.70)])
def test_the_weight_is_read_once(rows: int, most_pulled: float, record: Callable[..., None]) -> None:
    """Two column tiles of 3 x 4096 -> 4096; everything but x is linear in them."""
    launch = fc_proj_launch(rows, 3, 4096, 4096, arch=H200)
    e = 2 * launch.block_e
    x, weight = torch.zeros(rows, 3 * 4096, dtype=torch.bfloat16), torch.zeros(e, 3 * 4096, dtype=torch.bfloat16)
    with skip_products(), Traffic() as traffic:
        fc_proj(x, weight, num_sources=3, launch=launch)
    assert traffic.bytes(arguments={"W"}) == weight.nbytes
    assert [launched.kernel for launched in traffic.launches] == ["_fc_proj_kernel", "_add_parts_kernel"]
    least = weight.nbytes + x.nbytes * e // 4096 + rows * e * 2
    total = traffic.bytes() / least
    assert total <= most_pulled, total
    shape = f"3 x 4096 to 4096, {rows} rows"
    record("traffic", **ABOUT, shape=shape, total=round(total, 3), bar=most_pulled)


@pytest.mark.parametrize("out", [896, 4096, 7168])
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 64, 128, 500, 8192])
def test_a_launch_fills_the_device(rows: int, out: int) -> None:
    launch = fc_proj_launch(rows, 3, 4096, out, arch=H200)
    tiles = -(-rows // launch.block_t) * -(-out // launch.block_e)
    programs = tiles * 3 * launch.parts if launch.split else tiles
    assert programs >= H200.multiprocessors
    partial = 4 * rows * out * 3 * launch.parts if launch.split else 0
    assert partial <= 2 * 3 * 4096 * out, "partial sums larger than the weight"


X, W = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(5, 6, dtype=torch.bfloat16)
REFUSALS = {
    "float64": ({"x": X.double(), "weight": W.double()}, r"x: got .*float64.*fc_proj_torch"),
    "weight-dtype": ({"weight": W.float()}, r"weight: got .*float32.*x's dtype"),
    "fp8-without-scale": ({"weight": W.to(FP8)}, "weight_scale: got nothing"),
    "scale-without-fp8": ({"weight_scale": torch.ones(5)}, "weight_scale: got .*expected none"),
    "columns": ({"x": X.T.contiguous().T}, r"x: got strides \[1, 4\]"),
    "weight-columns": ({"weight": W.T.contiguous().T}, r"weight: got strides"),
    "row-strides": ({"x": [X[:, :3].contiguous(), X[:, 3:]]}, "x: got sources of different row strides"),
    "nine-sources": ({"x": [torch.zeros(4, 1, dtype=X.dtype)] * 9, "weight": W.new_zeros(5, 9)}, "got 9 tensors"),
    "out": ({"out": torch.zeros(4, 6, dtype=X.dtype)}, r"out: got \[4, 6\] .*expected \[4, 5\]"),
    "width": ({"weight": W[:, :5]}, r"weight: got \[5, 5\]"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_rejects(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fc_proj(**{"x": X, "weight": W} | change)


def test_fp8_needs_a_device_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "arch_of", lambda device: replace(H200, capability=80))
    with pytest.raises(ValueError, match=r"weight: got float8_e4m3fn on compute capability 8.0; expected 8.9"):
        fc_proj(X, W.to(FP8), weight_scale=torch.ones(5))
