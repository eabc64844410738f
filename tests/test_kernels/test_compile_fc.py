"""What ``fc_proj`` and ``norm_concat`` need on GPUs that are not there: registers, spills, memory, instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compile_gate import ARCHITECTURES, Code, Compiled, compile_calls, matrix_loops
from sglang_eagle3_ext.kernels.arch import Arch, fc_proj_launch
from sglang_eagle3_ext.kernels.fc_proj import FP8, Norm, fc_proj
from sglang_eagle3_ext.kernels.norm_concat import norm_concat

BF16 = torch.bfloat16
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


def project(
    rows: int, m: int, e: int, norm: Norm = "none", *, separate: bool = False, gather: bool = False, fp8: bool = False
) -> Callable[[int], object]:
    """Make a call of ``fc_proj`` on three sources, in the launch that its architecture would choose."""

    def call(arch: int) -> object:
        shape = {"none": None, "per_source": (3, m), "concatenation": (3 * m,)}[norm]
        return fc_proj(
            [torch.empty(rows, m, dtype=BF16)] * 3 if separate else torch.empty(rows, 3 * m, dtype=BF16),
            torch.empty(e, 3 * m, dtype=FP8 if fp8 else BF16),
            norm=norm,
            norm_weight=None if shape is None else torch.empty(shape, dtype=BF16),
            weight_scale=torch.empty(e) if fp8 else None,
            rows=torch.empty(rows, dtype=torch.int32) if gather else None,
            num_sources=3,
            launch=fc_proj_launch(rows, 3, m, e, arch=Arch(arch, MULTIPROCESSORS[arch])),
        )

    return call


def draft_input(rows: int, e: int) -> Callable[[int], object]:
    """Make a call of ``norm_concat`` that looks tokens up and writes a residual."""
    return lambda arch: norm_concat(
        torch.empty(rows, e, dtype=BF16),
        torch.empty(rows, dtype=torch.int64),
        torch.empty(1000, e, dtype=BF16),
        embed_norm_weight=torch.empty(e, dtype=BF16),
        hidden_norm_weight=torch.empty(e, dtype=BF16),
        eps=1e-5,
        residual="post_norm",
    )


CALLS = {
    "3 x 4096 to 4096, 8 rows": project(8, 4096, 4096),
    "3 x 4096 to 4096, 8 gathered rows, norms": project(8, 4096, 4096, "per_source", gather=True),
    "3 x 7168 to 7168, 32 rows, three tensors, one norm": project(32, 7168, 7168, "concatenation", separate=True),
    "3 x 7168 to 7168, 64 rows, norms": project(64, 7168, 7168, "per_source"),
    "3 x 7168 to 896, 8 rows, fp8": project(8, 7168, 896, fp8=True),
    "3 x 4096 to 4096, 1024 rows": project(1024, 4096, 4096),
    "3 x 4096 to 4096, 1024 rows, norms": project(1024, 4096, 4096, "per_source"),
    "draft input, width 7168": draft_input(8, 7168),
}
FEW_ROWS = [name for name in CALLS if name.startswith("3 x") and "1024" not in name]
MANY_ROWS = [name for name in CALLS if "1024" in name]


def calls_for(arch: int) -> list[str]:
    """Name the calls that an architecture can run: 8.0 reads no FP8."""
    return [name for name in CALLS if arch >= 89 or "fp8" not in name]


@functools.cache
def compiled(arch: int) -> dict[str, list[Compiled]]:
    return compile_calls(Path(__file__), arch, only=calls_for(arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_loop_spills_and_every_block_fits(arch: int, record: Callable[..., None]) -> None:
    kernels = [(name, kernel) for name, kernels in compiled(arch).items() for kernel in kernels]
    for order, (name, kernel) in enumerate(kernels):
        record("resources", gate="fc", order=order, call=name, **kernel.figures)
    assert {kernel.kernel for _, kernel in kernels} == {
        "_fc_proj_kernel",
        "_add_parts_kernel",
        "_inverse_rms_kernel",
        "_norm_concat_kernel",
    }
    # On 10.0 the compiler puts a few values of the epilogue aside; inside a loop no architecture spills.
    assert [(name, kernel.kernel) for name, kernel in kernels if kernel.loop_spills] == []
    most = 8 if arch == 100 else 0
    assert [(name, kernel.kernel, kernel.spills) for name, kernel in kernels if kernel.spills > most] == []
    assert [(name, kernel.kernel, kernel.shared) for name, kernel in kernels if not kernel.fits] == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_weight_arrives_asynchronously_in_whole_words(arch: int) -> None:
    """In the loop: a matrix instruction, 16-byte asynchronous copies, and no plain load of states or weight."""
    for name in calls_for(arch):
        for kernel in compiled(arch)[name]:
            if kernel.kernel != "_fc_proj_kernel":
                continue
            assert len(kernel.loops) == 1, (name, len(kernel.loops))
            loop = kernel.loops[0]
            assert loop.count("LDGSTS", "128") >= 2, (name, loop.opcodes)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_matrix_unit_is_that_of_the_architecture(arch: int) -> None:
    native = {80: "mma", 90: "wgmma", 100: "tcgen05"}[arch]
    for name in ("3 x 7168 to 7168, 64 rows, norms", *MANY_ROWS):
        units = {kernel.matrix_unit for kernel in compiled(arch)[name] if kernel.kernel == "_fc_proj_kernel"}
        assert units == {native}, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_two_blocks_of_few_rows_share_a_multiprocessor(arch: int) -> None:
    """What the launch table counts on: twice as many programs as multiprocessors run at once."""
    for name in set(FEW_ROWS) & set(calls_for(arch)):
        for kernel in compiled(arch)[name]:
            assert 2 * kernel.registers * 32 * kernel.warps <= 65536, (name, kernel.registers)
            assert 2 * kernel.shared <= {80: 164, 90: 228, 100: 228}[arch] * 1024, (name, kernel.shared)


SASS = """
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2] ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R5, R6, R7 ;
        /*0030*/              @!P0 LDL R8, [R1] ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   STL [R1], R8 ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0070*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0080*/               @P0 BRA `(.L_x_3) ;
        /*0090*/               @P0 BRA `(.L_x_4) ;
.L_x_4:
        /*00a0*/                   EXIT ;
"""


def test_loops_are_read_from_machine_code() -> None:
    """The innermost loop with a matrix instruction; not the one around it, one without, or a branch forwards."""
    assert matrix_loops(SASS) == [Code({"HMMA.16816.F32.BF16": 1, "LDL": 1, "BRA": 1})]
    code = Code({"LDGSTS.E.BYPASS.128": 3, "LDGSTS.E": 2, "LDG.E.128": 4, "LDL.64": 1, "STL": 2, "UTCHMMA": 1})
    assert code.count("LDGSTS") == 5
    assert code.count("LDGSTS", "128") == 3
    assert code.spills == 3
    assert code.matrix_unit == "tcgen05"
    assert Code({"HGMMA.64x8x16.F32.BF16": 1, "HMMA": 2}).matrix_unit == "wgmma"
    assert Code({"IMAD": 1}).matrix_unit == "none"


def test_a_kernel_that_does_not_compile_is_reported_by_name(tmp_path: Path) -> None:
    source = tmp_path / "broken_calls.py"
    source.write_text("import torch\nCALLS = {'broken': lambda arch: 1 / 0, 'idle': lambda arch: None}\n")
    with pytest.raises(RuntimeError, match=r"broken: ZeroDivisionError.*\n.*idle: launched no kernel"):
        compile_calls(source, 90)
    with pytest.raises(RuntimeError, match="absent: got no such call"):
        compile_calls(source, 90, only=["absent"])
