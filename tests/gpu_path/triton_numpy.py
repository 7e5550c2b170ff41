"""From the import of this file on vLLM's engines have model runner V2, and its Triton kernels run on the CPU.

PyPI's Triton has no backend for a CPU, and its interpreter spends its time on type checks (30 us an operation). Here a
kernel runs as Python over numpy arrays, 20 to 40 times as fast. If it uses a name of Triton's that `tl` does not have,
that is an AttributeError.

In what V2's kernels compute, integers and floats have Triton's widths, and an operation never changes its operands.
bfloat16 is loaded as float32.
"""

import ctypes
import os
from functools import cache
from inspect import signature
from types import FunctionType, SimpleNamespace

import numpy

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # torch may import Triton
import torch
import triton.backends
from triton.runtime import interpreter

WORD = 64  # all pointers count from this address: numpy takes an array at 0 for one that must be allocated
BFLOAT16 = "bfloat16"
DTYPES = {f"{kind}{bits}": numpy.dtype(f"{kind}{bits}") for kind in ("int", "uint", "float") for bits in (16, 32, 64)}
DTYPES["int1"] = numpy.dtype(bool)
PROCESS = (ctypes.c_char * (1 << 60)).from_address(WORD)  # more than there is
MEMORY = {kind: numpy.frombuffer(PROCESS, kind) for kind in DTYPES.values()}
MEMORY[BFLOAT16] = MEMORY[DTYPES["uint16"]]


# ------------------------------------------------------------------------------------------------ values
class Block(numpy.ndarray):
    """A tensor of a kernel, or a number in it."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        """Without `out`: `a += b` makes a new array, because in a kernel another name may have the old one."""
        if isinstance(inputs[-1], Pointer):
            return NotImplemented
        plain = [each.view(numpy.ndarray) if isinstance(each, Block) else each for each in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        kinds = [each.dtype for each in plain if hasattr(each, "dtype")]
        if result.dtype.itemsize == 8 and all(kind.itemsize < 8 for kind in kinds):  # numpy has widened it
            narrow = numpy.float32 if result.dtype.kind == "f" else numpy.int32
            result = result.astype(numpy.uint32 if numpy.uint32 in kinds else narrow)
        return block(result)

    def to(self, dtype, **_):
        return block(self.astype(dtype))


def block(value, dtype=None) -> Block:
    return numpy.asarray(value, dtype).view(Block)


class Pointer:
    """Elements of the process's memory: `index` counts them from WORD."""

    __array_ufunc__ = None

    def __init__(self, kind, index):
        self.kind, self.index, self.memory = kind, index, MEMORY[kind]

    def __add__(self, offset):
        return Pointer(self.kind, self.index + numpy.asarray(offset, numpy.int64))

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset


def argument_of(value):
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.").replace("bool", "int1")
        return Pointer(DTYPES.get(name, name), (value.data_ptr() - WORD) // value.itemsize)
    return block(value, numpy.int32 if value.bit_length() < 32 else numpy.int64) if type(value) is int else value


# ------------------------------------------------------------------------------------------------ triton.language
def load(pointer, mask=True, other=0, **_):
    index, mask = numpy.broadcast_arrays(pointer.index, mask)
    found = numpy.zeros(index.shape, pointer.memory.dtype)
    found[mask] = pointer.memory[index[mask]]
    if pointer.kind == BFLOAT16:
        found = (found.astype(numpy.uint32) << 16).view(numpy.float32)
    return block(numpy.where(mask, found, numpy.asarray(other, found.dtype)))


def store(pointer, value, mask=True, **_):
    index, value, mask = numpy.broadcast_arrays(pointer.index, value, mask)
    if pointer.kind == BFLOAT16:
        rounded = torch.from_numpy(value.astype(numpy.float32)).bfloat16()
        value = rounded.view(torch.uint16).numpy()
    pointer.memory[index[mask]] = value[mask].astype(pointer.memory.dtype)


def cast(value, kind, **_):
    """A number in another dtype, or an address as a pointer."""
    if not isinstance(kind, Pointer):
        return block(value).to(kind)
    return Pointer(kind.kind, (int(value) - WORD) // kind.memory.itemsize)


def maximum_of(value, axis=None, return_indices=False, **_):
    found = block(value.max(axis))
    return (found, block(value.argmax(axis), numpy.int32)) if return_indices else found


def atomic(change):
    def one_by_one(pointer, value, mask=True, **_):
        index, value, mask = numpy.broadcast_arrays(pointer.index, value, mask)
        for place, each in zip(index[mask], value[mask], strict=True):
            pointer.memory[place] = change(pointer.memory[place], each)

    return one_by_one


tl = SimpleNamespace(
    program_id=lambda axis: argument_of(tl.place[axis]),
    num_programs=lambda axis: argument_of(tl.grid[axis]),
    arange=lambda start, end: block(numpy.arange(start, end, dtype=numpy.int32)),
    full=lambda shape, value, dtype: block(numpy.full(shape, value, dtype)),
    zeros=lambda shape, dtype: block(numpy.zeros(shape, dtype)),
    where=lambda condition, one, other: block(numpy.where(condition, one, other)),
    min=lambda value, axis=None, **_: block(value.min(axis)),
    sum=lambda value, axis=None, **_: block(numpy.add.reduce(block(value), axis)),
    cumsum=lambda value, axis=0, **_: block(numpy.add.accumulate(block(value), axis)),
    range=lambda *bounds, **_: map(argument_of, range(*map(int, bounds))),
    pointer_type=lambda dtype: Pointer(dtype, 0),
    multiple_of=lambda value, *_: value, cdiv=lambda one, other: -(-one // other),
    reshape=lambda value, *shape: block(numpy.reshape(value, shape)),
    atomic_add=atomic(numpy.add), atomic_or=atomic(numpy.bitwise_or),
    maximum=numpy.maximum, minimum=numpy.minimum, exp=numpy.exp, log=numpy.log, sqrt=numpy.sqrt, abs=numpy.abs,
    max=maximum_of, load=load, store=store, cast=cast, **DTYPES,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ kernels
@cache
def translated(kernel):
    """The function of Triton's InterpretedFunction over `tl`."""
    scope = kernel.fn.__globals__ | {"tl": tl}
    for name in scope.keys() & {*kernel.fn.__code__.co_names}:
        if isinstance(scope[name], type(kernel)):
            scope[name] = translated(scope[name])
        scope[name] = getattr(scope[name], "value", scope[name])  # of a constexpr
    function = FunctionType(kernel.fn.__code__, scope, kernel.fn.__name__, kernel.fn.__defaults__)
    function.__kwdefaults__ = kernel.fn.__kwdefaults__
    return function


def run(kernel, *arguments, grid, warmup, **named):
    """In place of InterpretedFunction.run: one call for each place of the grid, in order."""
    if warmup:
        return
    parameters = signature(kernel.fn).parameters.keys()
    values = [*map(argument_of, arguments)], {name: argument_of(named[name]) for name in parameters & named.keys()}
    tl.grid = (*map(int, grid), 1, 1)[:3]
    with numpy.errstate(all="ignore"):
        for place in numpy.ndindex(tl.grid):
            tl.place = place
            translated(kernel)(*values[0], **values[1])


# ------------------------------------------------------------------------------------------------ from this import on
# vLLM only asks for the name "cpu" and for an active driver.
DRIVER = type("Driver", (), {"is_active": lambda: True, "get_current_target": lambda self: None})
triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=DRIVER)
interpret = interpreter.InterpretedFunction.run
interpreter.InterpretedFunction.run = run
