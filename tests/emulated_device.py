"""CPU memory as a GPU: launches that are written down instead of made, or made by PyTorch on what they are given.

`emulated_device` has calls on CPU tensors run directly, as those of an H200 would be.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import cutfuse
from cutfuse import arguments, native
from cutfuse.layer import call_plans, calls, cuda, linear_plan, planner, training_step

Result = TypeVar("Result")
core = native.module()
# PyTorch 2.8 and 2.9 have no functions in C that read tensors: there the direct path reads their attributes.
needs_exchange_api = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this PyTorch has no exchange API"
)
READERS = [pytest.param("exchange", marks=needs_exchange_api), "attributes"]


class RecordedLaunches:
    """`launches`: the arguments of each by name, and its function as `function`, in order.

    allocated: address, bytes, and how many launches were made before, of what `allocate` gave.
    """

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.allocated: list[tuple[int, int, int]] = []

    def __call__(self, function: str, arguments: dict[str, Any]) -> None:
        self.write_down(SimpleNamespace(function=function, **arguments))

    def write_down(self, launch: SimpleNamespace) -> None:
        self.launches.append(launch)

    def allocate(self, *given: Any) -> Tensor:
        """In the place of `empty_strided` of calls, where a test asks for what they allocate."""
        tensor: Tensor = calls.torch_functions(calls.CPU)["empty_strided"](*given)
        self.allocated.append((tensor.data_ptr(), tensor.nbytes, len(self.launches)))
        return tensor

    @property
    def names(self) -> list[str]:
        return [launch.function for launch in self.launches]


@contextlib.contextmanager
def recorded(launches: RecordedLaunches) -> Iterator[RecordedLaunches]:
    """Within it, launches are written down."""
    native.module().record_launches(launches)
    try:
        yield launches
    finally:
        native.module().record_launches(None)


DTYPES = {code: getattr(torch, name) for name, code in native.module().dtypes().items()}
FLOAT32 = native.module().dtypes()["float32"]
BLOCK = 64  # columns of a matrix that share a scale
REDUCTIONS = {0: "none", **{code: name for name, code in native.module().reductions().items()}}


def view(address: int, dtype: int, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The memory at an address as a strided tensor."""
    element = DTYPES[dtype].itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (span * element)).from_address(address)
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).as_strided(sizes, strides)


def matrix(fields: tuple[int, ...], extents: Sequence[int]) -> Tensor:
    address, dtype, *strides = fields
    return view(address, dtype, extents, strides).float()


def contiguous(address: int, dtype: int, sizes: Sequence[int]) -> Tensor:
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    return view(address, dtype, sizes, strides)


def evaluate(program: Any, x: Tensor, operands: list[Tensor], wrt: int = -1) -> Tensor:
    """A native program over fp32 values, or its derivative, by the native module itself."""
    x = x.contiguous()
    expanded = [t.expand(x.shape).contiguous() for t in operands]
    y = torch.empty_like(x)
    addresses = [(t.data_ptr(), 1) for t in expanded]
    native.module().evaluate(program, x.data_ptr(), y.data_ptr(), x.numel(), addresses, wrt)
    return y


def _plane_memory(address: int, rows: int, columns: int) -> Tensor:
    """Where the parts of a matrix lie, as many fp32 numbers: rows are padded to whole blocks, with zeros."""
    padded = -(-columns // BLOCK) * BLOCK
    memory = contiguous(address, FLOAT32, (rows, padded))
    memory[:, columns:] = 0
    return memory[:, :columns]


def _mark(scheme: int, is_weight: bool) -> float:
    """What stands in the place of the scales of parts, so that a product reads those of its own operand."""
    return scheme + is_weight / 2


def _is_marked(launch: Any, scales: int, is_weight: bool) -> bool:
    scheme = 6 if launch.kernel.startswith(("sm90_split6", "sm90_convert6")) else 3
    return contiguous(scales, FLOAT32, (1,)).item() == _mark(scheme, is_weight)


def _strides(pitch: int, by_columns: bool) -> tuple[int, int]:
    return (1, pitch) if by_columns else (pitch, 1)


class EmulatedLaunches(RecordedLaunches):
    """Writes launches down and makes them. Planes hold the matrix itself, in the memory of its parts, and a mark.

    out_of_range: of which operands every flag says that split3 would lose some: of x (False), of the weight (True).
    """

    def __init__(self, out_of_range: Collection[bool] = ()) -> None:
        super().__init__()
        self.out_of_range = out_of_range

    def write_down(self, launch: Any) -> None:
        super().write_down(launch)
        emulate = getattr(self, f"_{launch.function}", None)
        if emulate is not None:
            emulate(launch)

    def _pointwise(self, launch: Any) -> None:
        operands = [matrix(item, launch.extents) for item in launch.operands]
        y = evaluate(launch.program, matrix(launch.x, launch.extents), operands)
        _, rows, columns = launch.extents
        pitch = launch.out_pitch or columns
        view(launch.out, launch.out_dtype, launch.extents, (rows * pitch, pitch, 1)).copy_(y)

    def _pointwise_backward(self, launch: Any) -> None:
        extents = launch.extents
        x, operands = matrix(launch.x, extents), [matrix(item, extents) for item in launch.operands]
        grad = matrix(launch.grad, extents) * self._weights(launch, x, operands)
        wanted = {wrt for wrt, *_ in launch.outputs} | ({0} if launch.column_partials else set())
        gradients = {wrt: grad * evaluate(launch.program, x, operands, wrt) for wrt in wanted}
        for wrt, address, dtype in launch.outputs:
            contiguous(address, dtype, extents).copy_(gradients[wrt])
        if launch.column_partials:
            _, rows, columns = extents
            blocks = native.module().pointwise_backward_row_blocks(rows, columns)
            of_blocks = gradients[0][0].split(-(-rows // blocks))
            partials = contiguous(launch.column_partials, 0, (blocks, columns)).zero_()
            partials[: len(of_blocks)] = torch.stack([part.sum(0) for part in of_blocks])

    def _weights(self, launch: Any, x: Tensor, operands: list[Tensor]) -> Tensor | float:
        """What each element has of the gradient of the reduction behind it."""
        name, rows = REDUCTIONS[launch.reduction], (*launch.extents[:2], 1)
        if name == "none":
            return 1.0
        y, result = evaluate(launch.program, x, operands), contiguous(launch.row_result, 0, rows)
        if name == "logsumexp":
            return torch.exp(y - result)
        return (y == result) / contiguous(launch.tie_count, 0, rows)

    def _reduce(self, launch: Any) -> None:
        operands = [matrix(item, launch.extents) for item in launch.operands]
        y = evaluate(launch.program, matrix(launch.x, launch.extents), operands)
        outer, _, inner = launch.extents
        result = getattr(torch, REDUCTIONS[launch.reduction])(y, dim=1)
        contiguous(launch.out, launch.out_dtype, (outer, inner)).copy_(result)

    def _gemm(self, launch: Any) -> None:
        problem = launch.problem
        m, n, k = problem.m, problem.n, problem.k
        a = view(launch.a, problem.input, (m, k), _strides(problem.lda, problem.reads_columns_of_x)).float()
        b = view(launch.b, problem.input, (n, k), _strides(problem.ldb, problem.reads_columns_of_weight)).float()
        self._multiply(launch, a, b)

    def _split(self, launch: Any) -> None:
        if launch.guard is not None and not self._is_tripped(launch):
            return
        address, words = launch.cleared
        if words:
            contiguous(address, FLOAT32, (words,)).zero_()
        shape = (launch.rows, launch.columns)
        is_transposed = launch.columns > 1 and launch.column_stride != 1
        layout = native.module().planes_shape(*shape, launch.scheme, is_transposed, launch.is_weight)
        self._write_flags((launch.flags, layout[2]), launch.is_weight)
        contiguous(launch.scales, FLOAT32, (1,)).fill_(_mark(launch.scheme, launch.is_weight))
        source = view(launch.source, FLOAT32, shape, (launch.row_stride, launch.column_stride))
        _plane_memory(launch.values, *shape).copy_(source)

    def _gemm_planes(self, launch: Any) -> None:
        if self._runs(launch):
            problem = launch.problem
            assert _is_marked(launch, launch.a[1], is_weight=False)
            assert _is_marked(launch, launch.b[1], is_weight=True)
            a, b = _plane_memory(launch.a[0], problem.m, problem.k), _plane_memory(launch.b[0], problem.n, problem.k)
            self._multiply(launch, a, b)

    def _gemm_convert(self, launch: Any) -> None:
        data, pitch, columns, *flags = launch.b
        runs = self._runs(launch)
        self._write_flags(flags, is_weight=True)
        if runs:
            assert _is_marked(launch, launch.a[1], is_weight=False)
            b = view(data, FLOAT32, (launch.problem.n, columns), (pitch, 1))
            if launch.run == native.module().RunWhen.if_clear and True in self.out_of_range:
                b = b * torch.nan  # it stops, and the next product has to write over what it leaves
            self._multiply(launch, _plane_memory(launch.a[0], launch.problem.m, launch.problem.k)[:, :columns], b)

    def _write_flags(self, flags: Sequence[int], is_weight: bool) -> None:
        """Address and number of the words."""
        address, words = flags
        if words:
            contiguous(address, FLOAT32, (words,)).fill_(is_weight in self.out_of_range)

    def _is_tripped(self, launch: Any) -> bool:
        """What a guard's flags say: of all operands but a weight that the product itself looks at."""
        found = any(contiguous(address, FLOAT32, (words,)).any() for address, words in launch.guard)
        looks = launch.function == "gemm_convert" and launch.run == native.module().RunWhen.if_clear
        assert found == any(not (is_weight and looks) for is_weight in self.out_of_range)
        return found

    def _runs(self, launch: Any) -> bool:
        when = native.module().RunWhen
        runs = launch.run == when.always or self._is_tripped(launch) == (launch.run == when.if_tripped)
        sums, arrived = launch.slices
        if runs and launch.slice_count > 1:
            tiles = -(-launch.problem.m // launch.tile_m) * -(-launch.problem.n // launch.tile_n)
            assert not contiguous(arrived, FLOAT32, (tiles,)).any()
            contiguous(sums, FLOAT32, (tiles * launch.slice_count * launch.tile_m * launch.tile_n,)).fill_(torch.nan)
        return runs

    @staticmethod
    def _multiply(launch: Any, a: Tensor, b: Tensor) -> None:
        problem = launch.problem
        m, n = problem.m, problem.n
        z = a @ b.t()
        if launch.bias:
            z = z + view(launch.bias, problem.input, (n,), (1,)).float()
        y = evaluate(launch.program, z, [matrix(item, (1, m, n))[0] for item in launch.operands])
        if launch.pre_activation:
            contiguous(launch.pre_activation, problem.input, (m, n)).copy_(z)
        if not launch.partials:
            view(launch.d, problem.output, (m, n), (problem.ldd, 1)).copy_(y)
            return
        name = REDUCTIONS[problem.reduction]
        tiles = [getattr(torch, "sum" if name == "mean" else name)(tile, dim=1) for tile in y.split(launch.tile_n, 1)]
        contiguous(launch.partials, 0, (len(tiles), m)).copy_(torch.stack(tiles))

    def _finalize_partials(self, launch: Any) -> None:
        partials = contiguous(launch.partials, 0, (launch.tiles, launch.rows))
        name = REDUCTIONS[launch.reduction]
        y = partials.sum(0) / launch.count if name == "mean" else getattr(torch, name)(partials, dim=0)
        contiguous(launch.out, launch.out_dtype, (launch.rows,)).copy_(y)


@contextlib.contextmanager
def emulated_device(
    reader: str | None = None, launches: RecordedLaunches | None = None, **functions: Any
) -> Iterator[Any]:
    """Within it, calls on CPU tensors run directly, and `launches` is given what is launched.

    `reader`: how tensors are read, by what this PyTorch has where it is None. `functions`: in place of PyTorch's own.
    """
    found = EmulatedLaunches() if launches is None else launches
    has_exchange_api = reader != "attributes" and hasattr(Tensor, "__dlpack_c_exchange_api__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
        patch.setattr(cuda, "takes", lambda x: True)
        for module in (linear_plan, planner, training_step):
            patch.setattr(module, "device_facts", lambda device: (9, 0, 132))
        patch.setattr(call_plans, "on_device", lambda index: contextlib.nullcontext())
        patch.setattr(call_plans, "multiprocessors", lambda index: 132)
        core.connect_calls({**calls.torch_functions(calls.CPU, has_exchange_api=has_exchange_api), **functions})
        try:
            with recorded(found):
                yield found
        finally:
            calls.connect()


@pytest.fixture
def launches() -> Iterator[EmulatedLaunches]:
    """For a test within `emulated_device`."""
    with emulated_device() as found:
        yield found


@pytest.fixture(params=READERS, name="launches")
def launches_of_each_reader(request: pytest.FixtureRequest) -> Iterator[EmulatedLaunches]:
    """The same for a test of how tensors are read, with each way of that."""
    with emulated_device(request.param) as found:
        yield found


def direct_calls() -> int:
    """How many calls ran directly so far."""
    return core.direct_calls()


class Entered:
    """cutfuse's Python functions that are entered within it, in order; comprehensions are some Pythons' own.

    names: of the functions. files: in which they are.
    """

    def __enter__(self) -> Entered:
        self.names: list[str] = []
        self.files: list[str] = []
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    @property
    def changes_of_file(self) -> int:
        return sum(file != following for file, following in itertools.pairwise(self.files))

    def _count(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.names.append(code.co_name)
            self.files.append(code.co_filename)


PACKAGE = str(Path(cutfuse.__file__).parent)


def directly(call: Callable[[], Result]) -> Result:
    """The result of a call that runs directly, as one like it has been planned before."""
    before = direct_calls()
    y = call()
    assert direct_calls() == before + 1
    return y


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within it, every call takes the general path."""
    core.pause_calls(True)
    try:
        yield
    finally:
        core.pause_calls(False)
