"""Run Triton kernels on CPU tensors, with the arithmetic that a GPU would do.

``interpret(module)`` makes the kernels of a module run in Triton's interpreter for the rest of the process, whether
or not Triton or the module was imported before; no environment variable, so no other process is concerned::

    from interpreter import interpret
    from sglang_eagle3_ext.kernels import fc_proj

    interpret(fc_proj)

The interpreter of Triton 3.6 to 3.8 is silently wrong where narrow floats are concerned: it multiplies, adds and
reduces the raw bits of bf16, truncates where it should round to the nearest even, rounds fp8 half up, and multiplies
float32 exactly where a GPU rounds the operands to tf32. Importing this module corrects that, or, for reductions of
bf16, makes it an error. What stays invisible here: races, missing barriers, limits of registers and shared memory, the
smallest tile of a matrix instruction (``compile_gate`` sees the last two).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon  # noqa: F401  (the first launch loads it; it must find tl.standard compiled)
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_products = True


def interpret(*modules: ModuleType) -> None:
    """Replace every compiled kernel and helper that the modules hold, or that those call, by an interpreted one."""
    for module in modules:
        _interpret_names(vars(module))


@contextlib.contextmanager
def skip_products() -> Iterator[None]:
    """Let ``tl.dot`` return its accumulator, for runs that only count bytes; results are meaningless."""
    global _products
    _products = False
    try:
        yield
    finally:
        _products = True


def _interpret_names(names: dict[str, Any]) -> None:
    compiled = {name: value for name, value in names.items() if isinstance(value, JITFunction)}
    for name, function in compiled.items():
        if function.fn not in _interpreted:
            _interpreted[function.fn] = interpreter.InterpretedFunction(function.fn)
        names[name] = _interpreted[function.fn]
    for function in compiled.values():
        if function.fn.__globals__ is not names:
            _interpret_names(function.fn.__globals__)


_interpreted: dict[Callable[..., Any], Any] = {}


def _member(function: Any) -> Callable[..., Any]:
    """Let an interpreted function be called as a method of a tensor."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _widen(handle: Any) -> np.ndarray:
    """Return the values of a handle as numpy can compute with them."""
    dtype = handle.dtype.scalar
    if dtype == tl.bfloat16:
        return (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FP8:
        return torch.from_numpy(np.ascontiguousarray(handle.data)).view(_FP8[dtype]).float().numpy()
    return handle.data


def _narrow(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Round to the nearest even value of a dtype; fp8 saturates, as the conversion of a GPU does."""
    if dtype == tl.bfloat16:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
    if dtype in _FP8:
        limit = torch.finfo(_FP8[dtype]).max
        wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-limit, limit)
        return wide.to(_FP8[dtype]).view(torch.uint8).numpy()
    return values.astype(interpreter._get_np_dtype(dtype))


def _to_tf32(values: np.ndarray) -> np.ndarray:
    """Round float32 to the ten bits of mantissa that a tensor core reads."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _is_narrow(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16 or handle.dtype.scalar in _FP8


def _correct_arithmetic() -> None:
    """Put right what the interpreter gets wrong; the rest stays Triton's own."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    binary, unary, ternary, fma = builder.binary_op, builder.unary_op, builder.ternary_op, builder.create_fma
    cast = builder.cast_impl

    def computed(result: np.ndarray, dtype: Any) -> Any:
        return handle(result if result.dtype == bool else _narrow(result, dtype), dtype)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not (_is_narrow(left) or _is_narrow(right)):
            return binary(self, left, right, op)
        return computed(op(_widen(left), _widen(right)), left.dtype.scalar)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return computed(op(_widen(arg)), arg.dtype.scalar) if _is_narrow(arg) else unary(self, arg, op)

    def ternary_op(self: Any, first: Any, second: Any, third: Any, op: Any) -> Any:
        if op is np.where or not _is_narrow(third):
            return ternary(self, first, second, third, op)
        return computed(op(_widen(first), _widen(second), _widen(third)), third.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return computed(_widen(x) * _widen(y) + _widen(z), z.dtype.scalar) if _is_narrow(z) else fma(self, x, y, z)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _is_narrow(source) or target.scalar == tl.bfloat16 or target.scalar in _FP8:
            return handle(_narrow(_widen(source), target.scalar), target.scalar)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding: got {rounding}; expected the nearest even value.")
        return cast_impl(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, max_num_imprecise_acc: Any) -> Any:
        if not _products:
            return d
        left, right = _widen(a), _widen(b)
        if a.dtype.scalar == tl.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32:
            left, right = _to_tf32(left), _to_tf32(right)
        return handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    check = interpreter.ReduceScanOpInterface.check_tensor

    def check_tensor(self: Any, arguments: Any) -> None:
        if any(a.dtype.scalar == tl.bfloat16 for a in arguments):
            raise NotImplementedError("a reduction of bf16 in the interpreter; expected float32. Cast before it.")
        check(self, arguments)

    for corrected in (binary_op, unary_op, ternary_op, create_fma, cast_impl, create_fp_to_fp, create_dot):
        setattr(builder, corrected.__name__, corrected)
    interpreter.ReduceScanOpInterface.check_tensor = check_tensor


def _patch_language_once() -> None:
    """Interpret the language itself for good: Triton does so again in every launch and every call of a helper."""
    interpreter._patch_lang(tl.standard.zeros.fn)  # a function that sees triton.language.core ...
    interpreter._patch_lang(_sees_triton_language)  # ... and one that sees triton.language
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def _sees_triton_language() -> None:
    """Stand for a kernel of this module."""


_correct_arithmetic()
interpret(tl.standard, tl)
for _name, _value in list(vars(tl.tensor).items()):
    if isinstance(_value, JITFunction):
        setattr(tl.tensor, _name, _member(_interpreted[_value.fn]))
_patch_language_once()
