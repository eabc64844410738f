"""Compile the kernels behind a call for GPUs that are not there, and read what their machine code needs.

A test file lists its calls, each of which runs a wrapper on CPU tensors for one architecture::

    CALLS: dict[str, Callable[[int], object]] = {
        "llama-8b, 8 rows": lambda arch: fc_proj(x, weight, launch=launch_for(8, 3, 4096, 4096, arch=arch)),
    }

``compile_calls(Path(__file__), 90)`` runs them in a process of its own (``python tests/compile_gate.py FILE ARCH OUT
[NAME ...]``), where every launch of a Triton kernel compiles with Triton's own specialisation of the arguments and
launches nothing. A process of its own, because a driver is chosen once and the interpreter cannot be undone.

Compilation checks neither shared memory nor tensor memory: compare with ``SHARED_LIMIT`` and
``TENSOR_MEMORY_LIMIT``. Past the latter, ptxas leaves a stub without a matrix instruction.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one thread block may have (CUDA programming guide, compute capabilities)."""
TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory of one SM of compute capability 10.0."""

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)(.*)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Code:
    """What some stretch of machine code consists of.

    Attributes:
        opcodes: how often each instruction stands in it, by its full name (``LDGSTS.E.BYPASS.128``).
    """

    opcodes: dict[str, int]

    def count(self, name: str, *modifiers: str) -> int:
        """Count an instruction by its name before the first dot, with all modifiers given (``"128"``)."""
        return sum(
            n
            for opcode, n in self.opcodes.items()
            if opcode.split(".")[0] == name and set(modifiers) <= set(opcode.split(".")[1:])
        )

    @property
    def spills(self) -> int:
        """Count loads and stores of local memory."""
        return self.count("LDL") + self.count("STL")

    @property
    def matrix_unit(self) -> str:
        """Name the kind of matrix instruction: ``tcgen05``, ``wgmma``, ``mma`` or ``none``."""
        names = {opcode.split(".")[0] for opcode in self.opcodes}
        if any(name.startswith("UTC") and name.endswith("MMA") for name in names):
            return "tcgen05"
        if any(name.endswith("GMMA") for name in names):
            return "wgmma"
        return "mma" if any(name.endswith("MMA") for name in names) else "none"


@dataclass(frozen=True)
class Compiled(Code):
    """One compiled kernel.

    Attributes:
        kernel: name of the Triton function.
        arch: compute capability, 90 for 9.0.
        registers: per thread.
        local: bytes of local memory per thread that the compiler reports (stack included).
        shared: bytes of shared memory per block.
        tensor_memory: columns, on 10.0 only; else 0.
        warps: per block.
        stages: of the software pipeline, as asked for.
        loops: the innermost loops that hold a matrix instruction.
    """

    kernel: str
    arch: int
    registers: int
    local: int
    shared: int
    tensor_memory: int
    warps: int
    stages: int
    loops: tuple[Code, ...]

    @property
    def loop_spills(self) -> int:
        """Count loads and stores of local memory inside the matrix loops."""
        return sum(loop.spills for loop in self.loops)

    @property
    def figures(self) -> dict[str, Any]:
        """Sum up what it needs, for the file of measured figures."""
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "registers": self.registers,
            "spills": self.spills,
            "loop_spills": self.loop_spills,
            "context_spills": self.loops[0].spills if self.loops else 0,
            "shared_bytes": self.shared,
            "tensor_memory": self.tensor_memory,
            "matrix_unit": self.matrix_unit,
            "async_copies": sum(loop.count("LDGSTS", "128") for loop in self.loops),
            "warps": self.warps,
            "stages": self.stages,
        }

    @property
    def fits(self) -> bool:
        """Whether a block of it can be launched: shared and tensor memory within the architecture's limits."""
        return self.shared <= SHARED_LIMIT[self.arch] and self.tensor_memory <= TENSOR_MEMORY_LIMIT


def compile_calls(
    test_file: Path, arch: int, *, only: Collection[str] | None = None, timeout_s: float = 600
) -> dict[str, list[Compiled]]:
    """Compile what every call of a test file's ``CALLS`` launches.

    Args:
        test_file: a file that defines ``CALLS``; it is imported in a new process.
        arch: one of ``ARCHITECTURES``.
        only: names of the calls to compile; all of them by default.
        timeout_s: for all calls together.

    Returns:
        Per call the kernels in the order of their launches, equal launches once.

    Raises:
        RuntimeError: a call failed, or a kernel does not compile; all of them, each with the end of its message.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.json"
        command = [sys.executable, __file__, str(test_file), str(arch), str(out), *(only or ())]
        done = subprocess.run(
            command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode or not out.is_file():
            raise RuntimeError(f"{test_file.name} for sm_{arch}: {done.stderr[-4000:]}")
        result = json.loads(out.read_text())
    if result["problems"]:
        raise RuntimeError(f"{test_file.name} for sm_{arch}:\n" + "\n".join(result["problems"]))
    return {name: [_from_json(kernel) for kernel in kernels] for name, kernels in result["compiled"].items()}


def _from_json(kernel: dict[str, Any]) -> Compiled:
    return Compiled(**{**kernel, "loops": tuple(Code(**loop) for loop in kernel["loops"])})


def matrix_loops(sass: str) -> list[Code]:
    """Find the innermost loops (a branch backwards to a label) that hold a matrix instruction."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            if instruction[1].startswith("BRA") and (target := re.search(r"\.L_x_\d+", instruction[2])):
                start = labels.get(target[0])
                if start is not None:
                    spans.append((start, len(instructions)))
            instructions.append(instruction[1])
    innermost = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    loops = [Code(dict(Counter(instructions[a : b + 1]))) for a, b in sorted(set(innermost))]
    return [loop for loop in loops if loop.matrix_unit != "none"]


def read_binary(binary: bytes) -> tuple[int, int, str]:
    """Disassemble a cubin with the tools that Triton brings.

    Returns:
        Registers per thread, bytes of local memory per thread, and the machine code as text.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()

        def run(tool: str, *flags: str) -> str:
            return subprocess.run([tools / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout

        usage, sass = run("cuobjdump", "--dump-resource-usage"), run("nvdisasm", "-c")
    match = _RESOURCES.search(usage)
    if match is None:
        raise RuntimeError(f"cuobjdump: got {usage[-300:]!r}; expected a line with REG, STACK, SHARED and LOCAL.")
    return int(match[1]), int(match[2]) + int(match[4]), sass


class AbsentDevice:
    """As much of a Triton driver as compilation asks for, without a device behind it."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        """Return what to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the number under which Triton caches compiled kernels."""
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def _compile(test_file: Path, arch: int, only: Collection[str]) -> dict[str, Any]:
    """Run the calls of a test file; the child's half of ``compile_calls``."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(AbsentDevice(arch))
    launched: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched[f"{self.fn.__name__} {kernel.hash}"] = kernel
        return kernel

    JITFunction.run = compile_only
    spec = importlib.util.spec_from_file_location(test_file.stem, test_file)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{test_file}: cannot be imported; expected a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[test_file.stem] = module
    spec.loader.exec_module(module)
    compiled: dict[str, list[dict[str, Any]]] = {}
    problems = [f"{name}: got no such call; expected one of CALLS." for name in only if name not in module.CALLS]
    for name, call in module.CALLS.items():
        if only and name not in only:
            continue
        launched.clear()
        try:
            call(arch)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {str(error)[-600:]}")
            continue
        compiled[name] = [dataclasses.asdict(_describe(key.split()[0], arch, k)) for key, k in launched.items()]
        if not compiled[name]:
            problems.append(f"{name}: launched no kernel; expected at least one.")
    return {"compiled": compiled, "problems": problems}


def _describe(name: str, arch: int, kernel: Any) -> Compiled:
    registers, local, sass = read_binary(kernel.asm["cubin"])
    opcodes = Counter(match[1] for line in sass.splitlines() if (match := _INSTRUCTION.match(line)))
    return Compiled(
        opcodes=dict(opcodes),
        kernel=name,
        arch=arch,
        registers=registers,
        local=local,
        shared=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        loops=tuple(matrix_loops(sass)),
    )


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    Path(sys.argv[3]).write_text(json.dumps(_compile(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])))
