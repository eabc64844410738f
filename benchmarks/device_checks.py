"""Every option of every kernel on the device at hand against float64: what ``make gpu`` shows before it takes times.

The trees are those that the kernels' tests run in the interpreter. What takes long on a device is compiling, so the
checks are dealt out to a few processes.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang_eagle3_ext.kernels.fc_proj import Norm, fc_proj, fc_proj_torch, quantise_fc_weight
from sglang_eagle3_ext.kernels.norm_concat import norm_concat, norm_concat_torch
from sglang_eagle3_ext.kernels.split_merge import pack_mask, plan_splits

from benchmarks.draft_trees import (
    E4M3,
    FP32,
    GQA_CASES,
    MLA_CASES,
    SMALL_LATENT,
    Case,
    bits_of,
    excess,
    latents,
    make_batch,
    oracle,
    plan_of,
    verify_gqa,
    verify_mla,
)
from benchmarks.kernel_bench import progress

EPS = 1e-5
WORKERS = 8
FAR_SLOTS = 3_000_000

Row = dict[str, Any]
Check = Callable[[torch.device], tuple[float, float]]
"""Runs on a device; returns the error and the largest that is right."""


class Projection(NamedTuple):
    """One call of ``fc_proj``.

    Attributes:
        rows: T.
        sources: K.
        width: M.
        out: E.
        norm: as the kernel has it.
        dtype: of everything but an FP8 weight.
        fp8: whether the weight is stored so.
        packed: whether the sources stand in one tensor.
        bias: whether there is one.
        gathered: whether every second row is asked for, the last one first.
    """

    rows: int
    sources: int
    width: int
    out: int
    norm: Norm = "none"
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    packed: bool = True
    bias: bool = False
    gathered: bool = False


PROJECTIONS = {
    "one number": Projection(1, 1, 1, 1),
    "odd": Projection(5, 3, 7, 11, "per_source"),
    "float16": Projection(17, 2, 65, 19, "concatenation", torch.float16, bias=True),
    "float32": Projection(3, 3, 97, 17, "per_source", FP32, packed=False),
    "eight sources, apart": Projection(3, 8, 33, 17, packed=False),
    "gathered rows": Projection(40, 3, 576, 64, "per_source", gathered=True, bias=True),
    "fp8": Projection(5, 3, 65, 33, "concatenation", fp8=True),
    "fp8, float16, many rows": Projection(200, 3, 512, 128, "per_source", torch.float16, fp8=True),
    "many rows": Projection(1000, 3, 1024, 256, "per_source"),
}


def check_projection(case: Projection, device: torch.device) -> tuple[float, float]:
    """Project, and compare with float64; twice the error of the PyTorch twin and one rounding are right."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale + shift).to(case.dtype)

    k, m = case.sources, case.width
    # Sources differ in scale as shallow and deep states of a target do.
    sources = [draw(case.rows, m, scale=10.0 ** (i % 4 - 1)) for i in range(k)]
    served = weight = draw(case.out, k * m, scale=(k * m) ** -0.5)
    scale, exact = None, weight.double()
    if case.fp8:
        served, scale = quantise_fc_weight(weight)
        exact = served.double() * scale.double()[:, None]
    shapes: dict[str, tuple[int, ...] | None] = {"none": None, "per_source": (k, m), "concatenation": (k * m,)}
    shape = shapes[case.norm]
    norm_weight = None if shape is None else draw(*shape, scale=0.3, shift=1.0)
    bias = draw(case.out) if case.bias else None
    rows = torch.arange(case.rows - 1, -1, -2) if case.gathered else None

    wide = torch.cat(sources, 1).double() if rows is None else torch.cat(sources, 1).double()[rows]
    if norm_weight is not None:
        blocks = wide.unflatten(1, (k, m)) if case.norm == "per_source" else wide
        blocks = blocks * (blocks.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm_weight.double()
        wide = blocks.reshape(len(wide), -1)
    truth = wide @ exact.T + (0.0 if bias is None else bias.double())

    def call(operator: Callable[..., torch.Tensor], where: torch.device) -> torch.Tensor:
        x = [source.to(where) for source in sources]
        options = {"norm_weight": norm_weight, "bias": bias, "weight_scale": scale, "rows": rows}
        there = {name: None if t is None else t.to(where) for name, t in options.items()}
        y = operator(
            torch.cat(x, 1) if case.packed else x,
            served.to(where),
            norm=case.norm,
            eps=EPS,
            num_sources=k if case.packed else 1,
            **there,
        )
        return y.cpu()

    twin = (call(fc_proj_torch, torch.device("cpu")).double() - truth).abs().max().item()
    error = (call(fc_proj, device).double() - truth).abs().max().item()
    return error, _budget(twin, truth, case.dtype, k * m)


def check_norm_concat(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Normalise and concatenate, and compare with float64 in the same way."""
    g = torch.Generator().manual_seed(0)
    hidden = (30 * torch.randn(rows, width, generator=g)).to(dtype)
    table = (0.02 * torch.randn(19, width, generator=g)).to(dtype)
    left, right = (1 + 0.3 * torch.randn(2, width, generator=g)).to(dtype)
    tokens = torch.randint(19, (rows,), generator=g)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    def call(operator: Callable[..., tuple[torch.Tensor, torch.Tensor]], where: torch.device) -> torch.Tensor:
        there = (t.to(where) for t in (hidden, tokens, table))
        norms = {"embed_norm_weight": left.to(where), "hidden_norm_weight": right.to(where)}
        both, residual = operator(*there, **norms, eps=EPS, residual="post_norm")
        return torch.cat([both, residual], 1).cpu()

    normed = exact(hidden, right)
    truth = torch.cat([exact(table[tokens], left), normed, normed], 1)
    twin = (call(norm_concat_torch, torch.device("cpu")).double() - truth).abs().max().item()
    error = (call(norm_concat, device).double() - truth).abs().max().item()
    return error, _budget(twin, truth, dtype, width)


def _budget(twin: float, truth: torch.Tensor, dtype: torch.dtype, terms: int) -> float:
    """Allow twice the twin's error, one rounding, and float32 sums in another order."""
    largest = truth.abs().max().item()
    return 2 * twin + largest * (torch.finfo(dtype).eps / 2 + torch.finfo(torch.float32).eps * math.sqrt(terms))


def check_tree(case: Case, latent: bool, device: torch.device) -> tuple[float, float]:
    """Verify a batch of trees; errors count in what rounding the truth to the result's dtype costs at most.

    Where chunks do not depend on the rest of the batch, each request must also have the bits that it has alone.
    """
    verify = verify_mla if latent else verify_gqa
    batch = latents(case) if latent else make_batch(case)
    truth, there = oracle(batch), batch.on(device)
    y = verify(there)
    if case.batch_invariant:
        alone = torch.cat([verify(there.alone(b)) for b in range(len(case.lengths))])
        if not torch.equal(y, alone):
            raise RuntimeError("a request's result depends on what stands beside it; expected equal bits. Report it.")
    return _tree_error(case, y.cpu(), truth)


def _tree_error(case: Case, y: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    if case.dtype == FP32:
        # Sums of hundreds of keys: the rounding of one float32 is no measure for them.
        return ((y.double() - truth).abs() / (2e-6 + 1e-5 * truth.abs())).max().item(), 1.0
    if torch.equal(y.double(), truth):  # one key: its value, to the bit
        return 0.0, 0.0
    return excess(y, truth), 1.5 if case.kv_dtype is None else 2.0


def check_replay(latent: bool, device: torch.device) -> tuple[float, float]:
    """Verify other requests in the memory of earlier ones, as a CUDA graph does that was captured once.

    Plan and bits are made in the graph, from lengths and masks that change between replays. Without a CUDA device the
    same calls are made again.
    """
    first, second = Case((300, 40), 8, heads=8, kv_heads=2, target=8), Case((65, 180), 8, heads=8, kv_heads=2, target=8)
    if latent:
        first, second = (case._replace(kv_heads=1, **SMALL_LATENT) for case in (first, second))
    drawn = [latents(case, seed) if latent else make_batch(case, seed) for seed, case in enumerate((first, second))]
    there = [batch.on(device) for batch in drawn]
    memory, operator = there[0], verify_mla if latent else verify_gqa
    plan, bits = plan_of(memory), bits_of(memory)
    mask = memory.mask.to(device)
    out = torch.empty(len(memory.q), first.heads, memory.v_draft.shape[2], dtype=memory.q.dtype, device=device)

    def step() -> None:
        pack_mask(mask, memory.kv_indptr, first.num_draft, out=bits)
        plan_splits(memory.kv_indptr, target=first.target, min_chunk=first.min_chunk, out=plan)
        operator(memory, plan=plan, bits=bits, out=out)

    step()
    replay: Callable[[], object] = step
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    for name in ("q", "k_draft", "k_pool", "kv_indptr", "kv_slots", *(() if latent else ("v_draft", "v_pool"))):
        new = getattr(there[1], name)
        getattr(memory, name)[: len(new)].copy_(new)
    mask.copy_(drawn[1].mask)
    out.fill_(float("nan"))
    replay()
    return _tree_error(second, out.cpu(), oracle(drawn[1]))


def check_far_slots(device: torch.device) -> tuple[float, float]:
    """Verify out of a pool of three million slots, past what 32 bits address; needs 12 GB of the device."""
    batch = make_batch(Case((90, 33), 6, heads=8, kv_heads=8, width=128))
    used = torch.cat(batch.token_slots)
    far = FAR_SLOTS - 1 - 7 * torch.arange(len(used))
    there, pools = batch.on(device), {}
    for name in ("k_pool", "v_pool"):
        pools[name] = torch.empty(FAR_SLOTS, 8, 128, dtype=torch.bfloat16, device=device)
        pools[name][far.to(device)] = getattr(batch, name)[used].to(device)
    y = verify_gqa(there, k_pool=pools["k_pool"], v_pool=pools["v_pool"], kv_slots=far.to(device))
    return _tree_error(batch.case, y.cpu(), oracle(batch))


CHECKS: dict[tuple[str, str], Check] = {
    **{("fc_proj", name): partial(check_projection, case) for name, case in PROJECTIONS.items()},
    **{
        ("norm_concat", f"{rows} x {width}, {str(dtype).removeprefix('torch.')}"): partial(
            check_norm_concat, rows, width, dtype
        )
        for (rows, width), dtype in itertools.product(
            ((1, 1), (7, 33), (3, 7168)), (torch.bfloat16, torch.float16, FP32)
        )
    },
    **{("tree_verify_gqa", name): partial(check_tree, case, False) for name, case in GQA_CASES.items()},
    ("tree_verify_gqa", "slots past 32 bits"): check_far_slots,
    ("tree_verify_gqa", "other requests in a replay"): partial(check_replay, False),
    ("tree_verify_mla", "other requests in a replay"): partial(check_replay, True),
    **{("tree_verify_mla", name): partial(check_tree, case, True) for name, case in MLA_CASES.items()},
}
"""By operator and case."""


def why_not(check: tuple[str, str], device: torch.device) -> str | None:
    """Say why a device cannot run a check, if it cannot."""
    operator, name = check
    if device.type != "cuda":
        return None
    case = {"fc_proj": PROJECTIONS, "tree_verify_gqa": GQA_CASES, "tree_verify_mla": MLA_CASES}.get(operator, {})
    told = case.get(name)
    reads_e4m3 = told is not None and (getattr(told, "fp8", False) or getattr(told, "kv_dtype", None) == E4M3)
    if reads_e4m3 and torch.cuda.get_device_capability(device) < (8, 9):
        return "reads FP8, which needs compute capability 8.9"
    if name == "slots past 32 bits" and torch.cuda.mem_get_info(device)[0] < 16 << 30:
        return "needs 16 GiB of free memory"
    return None


def run_check(check: tuple[str, str], device: torch.device) -> Row:
    """Run one check; whatever goes wrong is in its row.

    Returns:
        ``op``, ``case``, ``error`` and ``bar`` (null where there are none), ``problem`` (null where it is right) and
        ``skipped`` (null, or why).
    """
    row = _row(check)
    try:
        row["skipped"] = why_not(check, device)
        if row["skipped"] is None:
            row["error"], row["bar"] = CHECKS[check](device)
            if not row["error"] <= row["bar"]:  # NaN counts as wrong
                row["problem"] = f"got an error of {row['error']:.3g}; expected at most {row['bar']:.3g}. Report it."
    except Exception as problem:
        row["problem"] = f"{type(problem).__name__}: {str(problem)[-400:]}"
    return row


def _row(check: tuple[str, str], problem: str | None = None) -> Row:
    return {"op": check[0], "case": check[1], "error": None, "bar": None, "problem": problem, "skipped": None}


def run_checks(device: torch.device) -> Iterator[Row]:
    """Run all checks, in processes of their own beside one another, with a progress bar.

    A process that dies breaks the checks that had not ended, each of which says so.
    """
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        begun = {pool.submit(run_check, check, device): check for check in CHECKS}
        for done in progress(as_completed(begun), len(begun), "checks"):
            error = done.exception()
            yield done.result() if error is None else _row(begun[done], f"{type(error).__name__}: {error}")
