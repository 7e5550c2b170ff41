"""From the import of this file on vLLM's engines have model runner V2, and its Triton kernels run on the CPU.

PyPI's Triton has no backend for a CPU, and its interpreter spends its time on type checks (30 us an operation). A
kernel that uses only names of `tl` below runs here as Python over numpy arrays, 20 to 40 times as fast. All others go
to the interpreter.

In what V2's kernels compute, integers and floats have Triton's widths, and an operation never changes its operands.
bfloat16 is loaded as float32.
"""

import ctypes
import os
from collections import Counter
from inspect import signature
from types import FunctionType, SimpleNamespace

import numpy

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # torch may import Triton
import torch
import triton.backends
from triton.runtime import interpreter

WORD = 64  # all pointers count from this address: numpy takes an array at 0 for one that must be allocated
BFLOAT16 = "bfloat16"
DTYPES = {"int1": numpy.bool_, "int32": numpy.int32, "int64": numpy.int64, "uint16": numpy.uint16,
          "uint32": numpy.uint32, "uint64": numpy.uint64, "float16": numpy.float16, "float32": numpy.float32,
          "float64": numpy.float64}  # fmt: skip
PROCESS = (ctypes.c_char * (1 << 60)).from_address(WORD)  # more than there is
MEMORY = {kind: numpy.frombuffer(PROCESS, kind) for kind in DTYPES.values()}
MEMORY[BFLOAT16] = MEMORY[numpy.uint16]
launches = Counter()  # by kernel and executor


# ------------------------------------------------------------------------------------------------ values
class Block(numpy.ndarray):
    """A tensor of a kernel."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        """Without `out`: `a += b` makes a new array, because in a kernel another name may have the old one."""
        if isinstance(inputs[-1], Pointer):
            return NotImplemented
        plain = [each.view(numpy.ndarray) if isinstance(each, Block) else each for each in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        if result.dtype.itemsize == 8:
            kinds = [each.dtype for each in plain if isinstance(each, numpy.ndarray | numpy.generic)]
            large = any(isinstance(each, int) and each.bit_length() > 31 for each in plain)
            if not large and all(kind.itemsize < 8 for kind in kinds):  # numpy has widened it
                narrow = numpy.float32 if result.dtype.kind == "f" else numpy.int32
                result = result.astype(numpy.uint32 if numpy.uint32 in kinds else narrow)
        return block(result)

    def to(self, dtype, **_):
        return block(self.astype(dtype))


def block(value, dtype=None) -> Block:
    return numpy.asarray(value, dtype).view(Block)


class Integer(int):
    """A signed number: an argument, a loop's index, or one that was loaded. Its width is not kept, for speed."""

    def to(self, dtype, **_):
        return self if dtype in (numpy.int32, numpy.int64) else block(self, numpy.int64).to(dtype)


def integer_operator(usual):
    def operate(self, other):
        result = usual(self, other)
        return result if result is NotImplemented else Integer(result)

    return operate


for each in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "radd", "rsub", "rmul"):
    setattr(Integer, f"__{each}__", integer_operator(getattr(int, f"__{each}__")))


class Pointer:
    """Elements of the process's memory: `index` counts them from WORD."""

    __array_ufunc__ = None

    def __init__(self, kind, index):
        self.kind, self.index, self.memory = kind, index, MEMORY[kind]

    def __add__(self, offset):
        if not isinstance(offset, int):
            offset = numpy.asarray(offset).astype(numpy.int64)
        return Pointer(self.kind, self.index + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset


def pointer_to(tensor: torch.Tensor) -> Pointer:
    name = str(tensor.dtype).removeprefix("torch.").replace("bool", "int1")
    return Pointer(DTYPES.get(name, name), (tensor.data_ptr() - WORD) // tensor.itemsize)


# ------------------------------------------------------------------------------------------------ triton.language
def load(pointer, mask=None, other=0, **_):
    if mask is None and isinstance(pointer.index, int) and pointer.kind in (numpy.int32, numpy.int64):
        return Integer(pointer.memory[pointer.index])
    if mask is None:
        found = pointer.memory[pointer.index]
    else:
        index, mask = numpy.broadcast_arrays(pointer.index, mask)
        found = numpy.zeros(index.shape, pointer.memory.dtype)
        found[mask] = pointer.memory[index[mask]]
    if pointer.kind == BFLOAT16:
        found = (numpy.asarray(found, numpy.uint32) << 16).view(numpy.float32)
    if mask is not None:
        found = numpy.where(mask, found, numpy.asarray(0 if other is None else other, found.dtype))
    return block(found)


def store(pointer, value, mask=None, **_):
    index, value, mask = numpy.broadcast_arrays(pointer.index, value, True if mask is None else mask)
    if pointer.kind == BFLOAT16:
        rounded = torch.from_numpy(value.astype(numpy.float32)).bfloat16()
        value = rounded.view(torch.uint16).numpy()
    pointer.memory[index[mask]] = value[mask].astype(pointer.memory.dtype)


def cast(value, kind, **_):
    """A number in another dtype, or an address as a pointer."""
    if not isinstance(kind, Pointer):
        return block(value).to(kind)
    return Pointer(kind.kind, (int(value) - WORD) // kind.memory.itemsize)


def loop(*bounds, **_):
    return map(Integer, range(*map(int, bounds)))


def maximum_of(value, axis=None, return_indices=False, **_):
    found = block(value.max(axis))
    return (found, block(value.argmax(axis), numpy.int32)) if return_indices else found


tl = SimpleNamespace(
    program_id=lambda axis: Integer(tl.place[axis]),
    num_programs=lambda axis: Integer(tl.grid[axis]),
    arange=lambda start, end: block(numpy.arange(start, end, dtype=numpy.int32)),
    zeros=lambda shape, dtype: block(numpy.zeros(shape, dtype)),
    where=lambda condition, one, other: block(numpy.where(condition, one, other)),
    min=lambda value, axis=None, **_: block(value.min(axis)),
    sum=lambda value, axis=None, **_: block(numpy.add.reduce(block(value), axis)),
    cumsum=lambda value, axis=0, **_: block(numpy.add.accumulate(block(value), axis)),
    pointer_type=lambda dtype: Pointer(dtype, 0),
    multiple_of=lambda value, *_: value,
    maximum=numpy.maximum, minimum=numpy.minimum, exp=numpy.exp, log=numpy.log, sqrt=numpy.sqrt, abs=numpy.abs,
    max=maximum_of, range=loop, load=load, store=store, cast=cast, **DTYPES,
)  # fmt: skip
KNOWN = {*vars(tl), "tl", "triton", "to", "constexpr"}


# ------------------------------------------------------------------------------------------------ kernels
TRANSLATED = {}


def translated(kernel):
    """The kernel's function over `tl`; None if it uses another name. `kernel` is Triton's InterpretedFunction."""
    if kernel in TRANSLATED:
        return TRANSLATED[kernel]
    TRANSLATED[kernel] = None
    function = kernel.fn
    scope = dict(function.__globals__)
    for name in {*function.__code__.co_names} - KNOWN:
        value = scope.get(name)
        if isinstance(value, type(kernel)):
            scope[name] = translated(value)
        elif hasattr(value, "value"):  # a constexpr
            scope[name] = value.value
        elif name not in scope["__builtins__"]:
            scope[name] = None
        if scope.get(name, True) is None:
            return None
    made = FunctionType(function.__code__, scope | {"tl": tl}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    TRANSLATED[kernel] = made
    return made


def launch(function, arguments: dict, grid) -> None:
    """One call for each place of the grid, in order."""
    def value_of(argument):
        if isinstance(argument, torch.Tensor):
            return pointer_to(argument)
        return Integer(argument) if type(argument) is int else argument

    values = {name: value_of(argument) for name, argument in arguments.items()}
    sizes = grid(values) if callable(grid) else grid
    tl.grid = (*map(int, sizes), 1, 1)[:3]
    with numpy.errstate(all="ignore"):
        for place in numpy.ndindex(tl.grid):
            tl.place = place
            function(**values)


def run(kernel, *arguments, grid, warmup, **named):
    """In place of InterpretedFunction.run."""
    if warmup:
        return
    function = translated(kernel)
    launches[kernel.fn.__name__, "numpy" if function else "interpreter"] += 1
    if not function:
        interpret(kernel, *arguments, grid=grid, warmup=False, **named)
        return
    parameters = signature(kernel.fn)
    known = {name: value for name, value in named.items() if name in parameters.parameters}
    bound = parameters.bind(*arguments, **known)
    bound.apply_defaults()
    launch(function, bound.arguments, grid)


def patch_language(function):
    """In the interpreter too the index of `tl.range` has a method `to`."""
    scope = usual_patch(function)
    usual = interpreter.tl.range
    scope.set_attr(interpreter.tl, "range", lambda *bounds, **named: map(Index, usual(*bounds, **named)))
    return scope


class Index(int):
    def to(self, dtype):
        return self


# ------------------------------------------------------------------------------------------------ from this import on
# vLLM only asks for the name "cpu" and for an active driver.
DRIVER = type("Driver", (), {"is_active": lambda: True, "get_current_target": lambda self: None})
triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=DRIVER)
interpret = interpreter.InterpretedFunction.run
usual_patch = interpreter._patch_lang
interpreter.InterpretedFunction.run = run
interpreter._patch_lang = patch_language
