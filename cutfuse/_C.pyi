"""The native module of a build with CUDA kernels. Written by `make stub`, from csrc/bindings*."""

from __future__ import annotations
import collections.abc
import typing

__all__: list[str] = [
    "Alternative",
    "CallFunction",
    "CallKey",
    "CallPlan",
    "CublasProduct",
    "FoldPartials",
    "FusedProduct",
    "GemmCandidate",
    "GemmProblem",
    "Issuer",
    "LinearPlan",
    "LinearRequest",
    "Memory",
    "OpInfo",
    "OperandKind",
    "Piece",
    "PlanesPieces",
    "PointwisePass",
    "Precision",
    "Program",
    "ReductionInfo",
    "ReductionPass",
    "RunWhen",
    "Specialization",
    "SpecializationMode",
    "SplitPass",
    "SplitScheme",
    "WeightPlanes",
    "backward_call",
    "build_info",
    "call_backward_operator",
    "call_joined_operator",
    "call_key",
    "call_linear",
    "call_linear_operator",
    "call_pointwise",
    "call_pointwise_operator",
    "call_reduce",
    "call_reduce_operator",
    "callable_counts",
    "class_version",
    "compare_passes",
    "compiled_count",
    "connect_calls",
    "cuda_build",
    "direct_calls",
    "dtypes",
    "evaluate",
    "finalize_partials",
    "find_epilogues",
    "find_specialization",
    "first_scheme",
    "forget_callables",
    "forget_calls",
    "forget_specializations",
    "function_call",
    "gemm",
    "gemm_convert",
    "gemm_kernels",
    "gemm_planes",
    "general_call",
    "joined_call",
    "kernel_template",
    "launch_after_product",
    "launch_fused",
    "launch_joined",
    "learn_callable",
    "learn_callable_types",
    "limits",
    "linear_call",
    "most_specializations",
    "new_callable_number",
    "op_snippets",
    "op_table",
    "operation_call",
    "pause_calls",
    "plan_linear",
    "plane_advantage",
    "planes_shape",
    "pointwise",
    "pointwise_backward",
    "pointwise_backward_kernel",
    "pointwise_backward_launch",
    "pointwise_backward_parameters",
    "pointwise_backward_row_blocks",
    "pointwise_call",
    "pointwise_kernel",
    "pointwise_parameters",
    "predict_memory_microseconds",
    "process_specialization_mode",
    "product_call",
    "recognise",
    "record_launches",
    "reduce",
    "reduce_call",
    "reduce_kernel",
    "reduce_operand_kinds",
    "reduce_parameters",
    "reduce_workspace",
    "reduction_table",
    "reductions",
    "remember_call",
    "remembered_calls",
    "set_process_specialization_mode",
    "set_stalled",
    "set_thread_specialization_mode",
    "specialization_count",
    "specialization_mode",
    "specialize_kernel",
    "split",
    "split_reference",
    "thread_specialization_mode",
    "training_backward",
    "training_call",
    "training_forward",
    "training_linear",
    "training_plan",
    "training_waits_for_host",
    "use_compiler",
    "weight_planes",
    "why_no_kernels",
    "why_not_specialized",
]

class OpInfo:
    """
    A row of ops.def.
    """
    @property
    def accurate_work(self) -> tuple[int, int]: ...
    @property
    def aliases(self) -> str: ...
    @property
    def arity(self) -> int: ...
    @property
    def fast_work(self) -> tuple[int, int]:
        """
        Instructions of the value with the fast primitives, and the special functions among them.
        """
    @property
    def formula(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def parameter_count(self) -> int: ...
    @property
    def signature(self) -> str: ...
    @property
    def special(self) -> str: ...

class ReductionInfo:
    """
    A row of reductions.def.
    """
    @property
    def gradient(self) -> str: ...
    @property
    def is_additive(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def needs_result(self) -> bool: ...

class Program:
    """
    An epilogue program, validated.
    """
    def __bytes__(self) -> bytes:
        """
        What a kernel is given.
        """
    def __init__(
        self, instructions: collections.abc.Sequence[tuple[int, int, int, int, int, float, float]], operand_count: int
    ) -> None: ...
    def __len__(self) -> int: ...
    def is_same(self, other: Program) -> bool:
        """
        Whether both run the same instructions.
        """
    def specialized_cost(self, is_accurate: bool) -> float:
        """
        What the program takes that is compiled into a kernel, with accurate primitives or fast ones.
        """
    @property
    def cost(self) -> float: ...
    @property
    def generated_cost(self) -> float:
        """
        What the program takes of a kernel that torch.compile generates, in the units of specialized_cost.
        """
    @property
    def is_interpreted(self) -> bool:
        """
        Whether kernels interpret it, unless specialized.
        """
    @property
    def operand_count(self) -> int: ...
    @property
    def scaling(self) -> tuple[float, int] | None:
        """
        (scale, weight) where it is scale * z, times operand `weight` unless that is -1.
        """
    @property
    def without_chain(self) -> Program:
        """
        The same program for kernels that have no chain compiled in, but interpret each.
        """

class GemmProblem:
    """
    What a GEMM kernel is asked for.
    """
    def __repr__(self) -> str: ...
    @property
    def input(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def lda(self) -> int:
        """
        Elements between rows of x, or between its columns.
        """
    @property
    def ldb(self) -> int:
        """
        Elements between rows of the weight, or between its columns.
        """
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def output(self) -> int: ...
    @property
    def reads_columns_of_weight(self) -> bool:
        """
        Whether the weight's columns are contiguous, and not its rows.
        """
    @property
    def reads_columns_of_x(self) -> bool:
        """
        Whether x's columns are contiguous, and not its rows.
        """
    @property
    def reduction(self) -> int: ...

class GemmCandidate:
    """
    A GEMM kernel, how it is launched and what it takes.
    """
    @property
    def microseconds(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def raster_along_m(self) -> bool: ...
    @property
    def rejection(self) -> str: ...
    @property
    def slices(self) -> int: ...
    @property
    def swizzle(self) -> int: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...

class SplitScheme:
    """
    How an fp32 matrix is split into planes of 16-bit parts.

    Members:

      split3

      split6
    """

    __members__: typing.ClassVar[dict[str, SplitScheme]]
    split3: typing.ClassVar[SplitScheme]
    split6: typing.ClassVar[SplitScheme]
    @typing.overload
    def __eq__(self, other: SplitScheme) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: SplitScheme) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class RunWhen:
    """
    When a launch over planes runs; otherwise it returns at once.

    Members:

      always

      if_clear

      if_tripped
    """

    __members__: typing.ClassVar[dict[str, RunWhen]]
    always: typing.ClassVar[RunWhen]
    if_clear: typing.ClassVar[RunWhen]
    if_tripped: typing.ClassVar[RunWhen]
    @typing.overload
    def __eq__(self, other: RunWhen) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: RunWhen) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Precision:
    """
    How fp32 matrices are multiplied.

    Members:

      ieee

      tf32

      split3

      split6

      guarded
    """

    __members__: typing.ClassVar[dict[str, Precision]]
    guarded: typing.ClassVar[Precision]
    ieee: typing.ClassVar[Precision]
    split3: typing.ClassVar[Precision]
    split6: typing.ClassVar[Precision]
    tf32: typing.ClassVar[Precision]
    @typing.overload
    def __eq__(self, other: Precision) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Precision) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Issuer:
    """
    What issues a plan's launches.

    Members:

      call

      training

      compiled_code

      compiled_cpp

      graph
    """

    __members__: typing.ClassVar[dict[str, Issuer]]
    call: typing.ClassVar[Issuer]
    compiled_code: typing.ClassVar[Issuer]
    compiled_cpp: typing.ClassVar[Issuer]
    graph: typing.ClassVar[Issuer]
    training: typing.ClassVar[Issuer]
    @typing.overload
    def __eq__(self, other: Issuer) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Issuer) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class LinearRequest:
    """
    What the plan of reduce(program(x @ weight.T + bias, operands)) depends on.
    """
    def __init__(
        self,
        *,
        x: tuple[int, int, int, int, bool],
        weight: tuple[int, int, int, int, bool],
        bias: tuple[int, bool] | None,
        input: int,
        output: int,
        reduction: int,
        epilogue_cost: float,
        specialized_cost: float | None,
        generated_cost: float,
        operand_bytes: float,
        fetched_bytes: float,
        precision: Precision,
        weight_has_planes: bool,
        stores_pre_activation: bool,
        device: tuple[int, int, int],
        issuer: Issuer,
        joined_rows: collections.abc.Sequence[int] = [],
    ) -> None:
        """
        A matrix is (rows, columns, row stride, column stride, whether it begins at a multiple of 16 bytes), bias None or (stride, the same), device (compute capability's two numbers, multiprocessors). Strides are in elements; types and the reduction are codes of dtypes() and reductions(), 0 for no reduction. specialized_cost: None where the fused kernels are to interpret the program. fetched_bytes: of operand_bytes, those of a matrix that a kernel's copy engine may bring. weight_has_planes: those of the scheme that the precision takes first. stores_pre_activation: x @ weight.T + bias is a second result. In compiled code the kernel behind cuBLAS's product is torch.compile's, and a graph's launches take nothing of the host. joined_rows: the rows of each of several weights, which are `weight` together.
        """

class Memory:
    """
    Whose memory a piece is of.

    Members:

      workspace

      weight_planes
    """

    __members__: typing.ClassVar[dict[str, Memory]]
    weight_planes: typing.ClassVar[Memory]
    workspace: typing.ClassVar[Memory]
    @typing.overload
    def __eq__(self, other: Memory) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Memory) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Piece:
    """
    Memory that launches hand on: an offset into a larger one, in bytes.
    """
    @property
    def bytes(self) -> int: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def offset(self) -> int: ...

class PlanesPieces:
    """
    What a pass that splits a matrix leaves.
    """
    @property
    def flags(self) -> Piece: ...
    @property
    def scales(self) -> Piece: ...
    @property
    def values(self) -> Piece: ...

class WeightPlanes:
    """
    The planes of a weight in memory of their own.
    """
    @property
    def bytes(self) -> int: ...
    @property
    def pieces(self) -> PlanesPieces: ...

class SplitPass:
    """
    Splits x or the weight into planes.
    """
    @property
    def cleared(self) -> Piece: ...
    @property
    def guard(self) -> list[Piece]: ...
    @property
    def is_weight(self) -> bool: ...
    @property
    def planes(self) -> PlanesPieces: ...
    @property
    def scheme(self) -> SplitScheme: ...
    @property
    def when(self) -> RunWhen: ...

class FusedProduct:
    """
    The matrix product with what follows it, by one kernel.
    """
    @property
    def arrivals(self) -> Piece: ...
    @property
    def guard(self) -> list[Piece]: ...
    @property
    def kernel(self) -> GemmCandidate: ...
    @property
    def partials(self) -> Piece: ...
    @property
    def problem(self) -> GemmProblem: ...
    @property
    def sums(self) -> Piece: ...
    @property
    def weight(self) -> PlanesPieces: ...
    @property
    def weight_flags(self) -> Piece: ...
    @property
    def when(self) -> RunWhen: ...
    @property
    def x(self) -> PlanesPieces: ...

class FoldPartials:
    """
    Folds the partials of a row reduction to the result.
    """
    @property
    def partials(self) -> Piece: ...
    @property
    def tiles(self) -> int: ...

class CublasProduct:
    """
    x @ weight.T + bias by PyTorch.
    """

class PointwisePass:
    """
    program(z, operands) over cuBLAS's result.
    """
    @property
    def in_place(self) -> bool: ...

class ReductionPass:
    """
    reduce(program(z, operands)) over cuBLAS's result.
    """

class Alternative:
    """
    A way of computing a linear layer, with all its launches.
    """
    @property
    def compared(self) -> float: ...
    @property
    def microseconds(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def rejection(self) -> str: ...
    @property
    def slices(self) -> int: ...

class LinearPlan:
    """
    How a linear layer is computed, and why not otherwise.
    """
    @property
    def alternatives(self) -> list[Alternative]: ...
    @property
    def chosen(self) -> int: ...
    @property
    def copies_bias(self) -> bool: ...
    @property
    def input(self) -> int: ...
    @property
    def is_fused(self) -> bool: ...
    @property
    def launches(
        self,
    ) -> list[SplitPass | FusedProduct | FoldPartials | CublasProduct | PointwisePass | ReductionPass]: ...
    @property
    def output(self) -> int: ...
    @property
    def output_shape(self) -> list[int]: ...
    @property
    def product_shape(self) -> tuple[int, int, int]: ...
    @property
    def reads_weight_planes(self) -> bool: ...
    @property
    def reduction(self) -> int: ...
    @property
    def ruled_out(self) -> str: ...
    @property
    def specializes(self) -> bool: ...
    @property
    def workspace_bytes(self) -> int: ...

class SpecializationMode:
    """
    What is asked for of specialized epilogues.

    Members:

      off

      background

      now
    """

    __members__: typing.ClassVar[dict[str, SpecializationMode]]
    background: typing.ClassVar[SpecializationMode]
    now: typing.ClassVar[SpecializationMode]
    off: typing.ClassVar[SpecializationMode]
    @typing.overload
    def __eq__(self, other: SpecializationMode) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: SpecializationMode) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class OperandKind:
    """
    How a kernel with a program compiled in takes an operand.

    Members:

      strided

      scalar

      row

      column

      source
    """

    __members__: typing.ClassVar[dict[str, OperandKind]]
    column: typing.ClassVar[OperandKind]
    row: typing.ClassVar[OperandKind]
    scalar: typing.ClassVar[OperandKind]
    source: typing.ClassVar[OperandKind]
    strided: typing.ClassVar[OperandKind]
    @typing.overload
    def __eq__(self, other: OperandKind) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: OperandKind) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Specialization:
    """
    A kernel with a program compiled in, on one device: one for all numbers of the program.
    """
    def __repr__(self) -> str: ...
    def claim(self) -> bool:
        """
        True for the first who asks, and who is to have the kernel compiled.
        """
    def compile(self) -> bool:
        """
        Compiles the kernel, unless that has been done or tried; whether it is there now.
        """
    @property
    def device(self) -> int: ...
    @property
    def failure(self) -> str:
        """
        Why the kernel could not be compiled; empty before that, and where it could.
        """
    @property
    def is_claimed(self) -> bool: ...
    @property
    def is_pending(self) -> bool:
        """
        Whether compiling has been neither done nor tried.
        """
    @property
    def is_ready(self) -> bool:
        """
        Whether launches take the compiled kernel.
        """
    @property
    def kernel(self) -> str: ...
    @property
    def operand_kinds(self) -> list[OperandKind]:
        """
        How the kernel takes each operand.
        """
    @property
    def seconds(self) -> float:
        """
        What compiling took; 0 before.
        """

class CallFunction:
    """
    A public function or an operator with a direct path.

    Members:

      linear

      pointwise

      reduce

      linear_operator

      pointwise_operator

      reduce_operator

      backward_operator

      joined_operator
    """

    __members__: typing.ClassVar[dict[str, CallFunction]]
    backward_operator: typing.ClassVar[CallFunction]
    joined_operator: typing.ClassVar[CallFunction]
    linear: typing.ClassVar[CallFunction]
    linear_operator: typing.ClassVar[CallFunction]
    pointwise: typing.ClassVar[CallFunction]
    pointwise_operator: typing.ClassVar[CallFunction]
    reduce: typing.ClassVar[CallFunction]
    reduce_operator: typing.ClassVar[CallFunction]
    @typing.overload
    def __eq__(self, other: CallFunction) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: CallFunction) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CallKey:
    """
    All that the plan of a call depends on.
    """

class CallPlan:
    """
    What a call whose key is known does.
    """

def backward_call(
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    grad: tuple[int, int, int, int],
    x: tuple[int, int, int, int],
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int]],
    outputs: collections.abc.Sequence[
        tuple[
            int,
            tuple[tuple[int, ...], tuple[int, ...], typing.Any],
            int,
            tuple[
                typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
                tuple[int, int, int, int],
                int,
                tuple[tuple[int, ...], tuple[int, ...], typing.Any],
                int,
            ]
            | None,
        ]
    ],
    column_sum: tuple[
        tuple[tuple[int, ...], tuple[int, ...], typing.Any],
        tuple[
            typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
            tuple[int, int, int, int],
            int,
            tuple[tuple[int, ...], tuple[int, ...], typing.Any],
            int,
        ],
    ]
    | None,
    specialization: Specialization | None,
    reduction: int = 0,
    is_accurate: bool = False,
) -> CallPlan:
    """
    As of the function pointwise_backward, with a layout in place of each tensor; outputs and column_sum as of training_plan. The reduction's result and ties, where it needs them, are tensors behind the operands.
    """

def build_info() -> dict[str, str]:
    """
    What the kernels were compiled with; empty texts where there are none.
    """

def call_backward_operator(
    grad: typing.Any, x: typing.Any, operands: typing.Any, program: int, wanted: typing.Any, sums_columns: typing.Any
) -> typing.Any: ...
def call_joined_operator(x: typing.Any, weights: typing.Any, biases: typing.Any) -> typing.Any: ...
def call_key(function: CallFunction, arguments: tuple[typing.Any, ...], callable: int) -> CallKey | None:
    """
    The key of a call with these arguments, as things are now; None where it has none.
    """

def call_linear(
    x: typing.Any,
    weight: typing.Any,
    bias: typing.Any,
    epilogue: typing.Any,
    operands: typing.Any,
    reduce: typing.Any,
    keepdim: typing.Any,
    out_dtype: typing.Any,
) -> typing.Any: ...
def call_linear_operator(
    x: typing.Any,
    weight: typing.Any,
    bias: typing.Any,
    operands: typing.Any,
    program: int,
    reduction: typing.Any,
    out_dtype: typing.Any,
) -> typing.Any: ...
def call_pointwise(fn: typing.Any, x: typing.Any, operands: typing.Any, out_dtype: typing.Any) -> typing.Any: ...
def call_pointwise_operator(x: typing.Any, operands: typing.Any, program: int, out_dtype: typing.Any) -> typing.Any: ...
def call_reduce(
    x: typing.Any,
    dim: typing.Any,
    op: typing.Any,
    keepdim: typing.Any,
    prologue: typing.Any,
    operands: typing.Any,
    out_dtype: typing.Any,
) -> typing.Any: ...
def call_reduce_operator(
    x: typing.Any, operands: typing.Any, program: int, reduction: typing.Any, dims: typing.Any, out_dtype: typing.Any
) -> typing.Any: ...
def callable_counts() -> dict[str, int]:
    """
    How many nodes, numbers and hits recognise has had.
    """

def class_version(type: type) -> int:
    """
    A number that a class has until anything about it or a base changes; 0 where it has none.
    """

def compare_passes(
    m: int,
    n: int,
    k: int,
    forward_bytes: float,
    backward_bytes: float,
    program: Program,
    sums_columns: bool,
    multiprocessors: int,
    issuer: Issuer,
) -> tuple[float, float]:
    """
    The microseconds of a 16-bit layer's training step in compiled code, by cuBLAS's products: with kernels of ours for what follows them, forwards and backwards, and with torch.compile's. Bytes: those that are read and written for each element.
    """

def compiled_count() -> int:
    """
    How many specializations are compiled.
    """

def connect_calls(functions: dict[str, typing.Any] | None) -> None:
    """
    What direct calls ask PyTorch, by name; None makes every call the general path's. Forgets all plans.
    """

def direct_calls() -> int:
    """
    How many calls ran directly since the process began.
    """

def dtypes() -> dict[str, int]:
    """
    The number of each element type.
    """

def evaluate(
    program: Program,
    input: int,
    output: int,
    count: int,
    operands: collections.abc.Sequence[tuple[int, int]],
    wrt: int = -1,
) -> None:
    """
    Runs a program on the host over fp32 values: its value (wrt -1), or its derivative with respect to the input (0) or operand wrt - 1. Pointers are integers; an operand is (pointer, stride 0 or 1).
    """

def finalize_partials(
    stream: int, partials: int, tiles: int, rows: int, reduction: int, count: int, out: int, out_dtype: int
) -> None:
    """
    Folds fp32 partial states [tiles, rows] (pairs for logsumexp) to out [rows]; the mean divides by count.
    """

def find_epilogues(
    plan: LinearPlan, device: int, program: Program, operands: collections.abc.Sequence[tuple[int, int, int, int, int]]
) -> list[Specialization]:
    """
    The program in the kernel of each product of a fused plan; empty where they interpret it for good. Operands of which the address is not known yet have address 0, and are taken for aligned.
    """

def find_specialization(
    kernel: str,
    device: int,
    program: Program,
    operand_types: collections.abc.Sequence[int],
    operand_kinds: collections.abc.Sequence[OperandKind] = [],
) -> Specialization:
    """
    The one specialization of these, made now if there is none yet. None beyond most_specializations, and for a program that no kernel interprets. Operands are strided unless kinds are given.
    """

def first_scheme(precision: Precision) -> SplitScheme:
    """
    What of a weight is split as a rule.
    """

def forget_callables() -> None:
    """
    Forgets what callables are known. Numbers are not reused.
    """

def forget_calls() -> None:
    """
    Empties the table of plans.
    """

def forget_specializations() -> None:
    """
    Forgets all of them, and frees none. For tests.
    """

def function_call(function: typing.Any) -> CallPlan:
    """
    function(x, weight, bias or None, *operands), of a linear layer.
    """

def gemm(
    stream: int,
    problem: GemmProblem,
    candidate: GemmCandidate,
    a: int,
    b: int,
    bias: int,
    d: int,
    partials: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
) -> None:
    """
    Launches a candidate. Pointers and the stream are integers; 0 for no bias, and for whichever of d and partials the kernel does not write.
    """

def gemm_convert(
    stream: int,
    problem: GemmProblem,
    candidate: GemmCandidate,
    a: tuple[int, int],
    b: tuple[int, int, int, int, int],
    slices: tuple[int, int],
    guard: collections.abc.Sequence[tuple[int, int]],
    run: RunWhen,
    bias: int,
    d: int,
    partials: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
) -> None:
    """
    Like gemm_planes, with b in fp32: its address, row pitch and columns, and address and number of the flags that converting it leaves (0 for none).
    """

def gemm_kernels() -> list[str]:
    """
    The names of the GEMM kernels of the table, also of those that this build does not have.
    """

def gemm_planes(
    stream: int,
    problem: GemmProblem,
    candidate: GemmCandidate,
    a: tuple[int, int],
    b: tuple[int, int],
    slices: tuple[int, int],
    guard: collections.abc.Sequence[tuple[int, int]],
    run: RunWhen,
    bias: int,
    d: int,
    partials: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
) -> None:
    """
    Launches a candidate over planes: a and b are addresses of values and scales, slices those of the sums (a tile's elements in fp32 for each slice of each tile) and the arrivals (int32 for each tile, zero when the product starts: split clears them) of a candidate with slices of K, guard up to two pairs of flags and their number.
    """

def general_call() -> CallPlan:
    """
    The plan of calls that take the general path every time.
    """

def joined_call(
    plan: LinearPlan,
    has_bias: collections.abc.Sequence[bool],
    result: tuple[tuple[int, ...], tuple[int, ...], typing.Any],
) -> CallPlan:
    """
    Of the products of x with several weights, side by side; has_bias: of each weight.
    """

def kernel_template(kernel: str) -> str:
    """
    The PTX of a kernel: of a GEMM by its name in the table, of another by what pointwise_kernel says; empty for another name.
    """

def launch_after_product(
    plan: LinearPlan,
    stream: int,
    z: int,
    result: int,
    workspace: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    epilogues: collections.abc.Sequence[Specialization],
) -> None:
    """
    Of a plan that is not fused, the launches after cuBLAS's: z is its result, contiguous; result may be z. epilogues: the program in the kernel of the pass; empty where that interprets it for good.
    """

def launch_fused(
    plan: LinearPlan,
    stream: int,
    x: int,
    weight: int,
    bias: int,
    result: int,
    workspace: int,
    weight_planes: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    epilogues: collections.abc.Sequence[Specialization],
    pre_activation: int = 0,
) -> None:
    """
    The launches of a fused plan. Tensors are addresses, 0 for none, laid out as the plan's request says; an operand is (pointer, dtype, 0, row and column stride in elements). epilogues: the program in the kernel of each FusedProduct; empty where they interpret it for good. pre_activation: memory for it, where the plan stores it.
    """

def launch_joined(
    plan: LinearPlan,
    stream: int,
    x: int,
    weights: collections.abc.Sequence[int],
    biases: collections.abc.Sequence[int],
    result: int,
) -> None:
    """
    The launch of a fused plan that joins weights: addresses of each weight and bias, 0 for no bias.
    """

def learn_callable(trail: typing.Any, number: int) -> bool:
    """
    Has recognise give the number for callables that read what a trail says; False where that cannot be.
    """

def learn_callable_types(partial: type, epilogue: type) -> None:
    """
    Tells recognise the types whose values it looks into.
    """

def limits() -> dict[str, int]:
    """
    The most instructions, operands and slots that a program has.
    """

def linear_call(
    plan: LinearPlan,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int]],
    epilogues: collections.abc.Sequence[Specialization],
    result: tuple[tuple[int, ...], tuple[int, ...], typing.Any],
) -> CallPlan:
    """
    An operand is (dtype, outer, row and column stride), a result (sizes, strides, torch.dtype).
    """

def new_callable_number() -> int:
    """
    A number that no callable has had.
    """

def op_snippets() -> str:
    """
    The PTX that specialized epilogues are put together from.
    """

def op_table() -> list[OpInfo]:
    """
    The rows of ops.def, in the order of their codes.
    """

def operation_call(function: typing.Any, arguments: collections.abc.Sequence[int]) -> CallPlan:
    """
    PyTorch's own linear layer, then function(*arguments): 0 for the layer's result, k for operand k - 1.
    """

def pause_calls(paused: bool) -> None:
    """
    Makes every call the general path's, until it is called with False as often as with True.
    """

def plan_linear(request: LinearRequest, only: str = "") -> LinearPlan:
    """
    The plan of a request; only: the name of the one alternative that is wanted, whatever it would take.
    """

def planes_shape(
    rows: int, columns: int, scheme: int, transposed: bool, is_weight: bool
) -> tuple[int, int, int, int, int, int]:
    """
    (pitch, scale_pitch, flag_count, bytes of values, of scales, of flags) of a matrix split by plan 3 or 6; transposed: its column stride is not 1; is_weight: it is a product's second operand.
    """

def pointwise(
    stream: int,
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    out: int,
    out_dtype: int,
    specialization: Specialization | None,
) -> None:
    """
    out = program(x, operands) over (outer, rows, columns); out is contiguous. A tensor is (pointer, dtype, outer, row and column stride in elements). specialization: the program in the kernel that pointwise_kernel names; None to interpret it.
    """

def pointwise_backward(
    stream: int,
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    grad: tuple[int, int, int, int, int],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    outputs: collections.abc.Sequence[tuple[int, int, int]],
    column_partials: int,
    reduction: int,
    row_result: int,
    tie_count: int,
    specialization: Specialization | None,
    is_accurate: bool = False,
) -> None:
    """
    For each output (wrt, pointer, dtype): grad * weight * d program / d input, contiguous. column_partials: fp32 [pointwise_backward_row_blocks, columns] or 0. row_result, tie_count: fp32 [outer, rows] or 0. specialization: the program in the kernel that pointwise_backward_kernel names; None to interpret it. is_accurate: it is interpreted with accurate primitives, as the kernels of reductions are.
    """

def pointwise_backward_kernel(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    grad: tuple[int, int, int, int, int],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    outputs: collections.abc.Sequence[tuple[int, int, int]],
    sums_columns: bool,
) -> str:
    """
    The kernel that such a call of pointwise_backward, without a reduction, runs with the program's derivatives compiled in; empty where they have to be interpreted. Of an address no more counts than whether it is a multiple of 32.
    """

def pointwise_backward_launch(
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"], dtype: int, pitch: int, keep_columns: bool
) -> tuple[int, int, int, int]:
    """
    How the kernel that interprets is launched for rows of such a pitch in elements: blocks, threads of a block, columns of a block, and blocks beside each other. For tests.
    """

def pointwise_backward_parameters(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    grad: tuple[int, int, int, int, int],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    outputs: collections.abc.Sequence[tuple[int, int, int]],
    column_partials: int,
) -> tuple[bytes, int, int]:
    """
    The same of a call of pointwise_backward that has a specialized kernel. For tests.
    """

def pointwise_backward_row_blocks(rows: int, columns: int) -> int:
    """
    Rows of column partial sums that pointwise_backward writes.
    """

def pointwise_call(
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int],
    out_dtype: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int]],
    result: tuple[tuple[int, ...], tuple[int, ...], typing.Any],
    specialization: Specialization | None,
) -> CallPlan:
    """
    As of the function pointwise, with a layout in place of each tensor.
    """

def pointwise_kernel(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    out: int,
    out_dtype: int,
) -> str:
    """
    The kernel that such a call of pointwise runs with its program compiled in; empty where the program has to be interpreted. Of an address no more counts than whether it is a multiple of 16.
    """

def pointwise_parameters(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    out: int,
    out_dtype: int,
) -> tuple[bytes, int, int]:
    """
    What the specialized kernel of such a call of pointwise is given, and how many blocks and threads of a block are launched, on a device of one multiprocessor. For tests.
    """

def predict_memory_microseconds(bytes: float) -> float:
    """
    The microseconds that reading or writing so many bytes takes behind the kernel that stores them.
    """

def process_specialization_mode() -> SpecializationMode: ...
def product_call() -> CallPlan:
    """
    The plan of PyTorch's own linear layer.
    """

def recognise(callable: typing.Any) -> int:
    """
    A number that stands for what a callable computes, 0 where it is not known. None is 1.
    """

def record_launches(callback: collections.abc.Callable[[str, dict[str, typing.Any]], None] | None) -> None:
    """
    Gives callback(function, arguments) each launch instead of making it; None makes launches again. For tests.
    """

def reduce(
    stream: int,
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    reduction: int,
    out: int,
    out_dtype: int,
    workspace: int,
    specialization: Specialization | None,
) -> None:
    """
    Reduces program(x, operands) over the middle one of (outer, reduced, inner) to out [outer, inner]. specialization: the program in the kernel that reduce_kernel names; None to interpret it.
    """

def reduce_call(
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int],
    reduction: int,
    out_dtype: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int]],
    result: tuple[tuple[int, ...], tuple[int, ...], typing.Any],
    workspace_bytes: int,
    specialization: Specialization | None,
) -> CallPlan:
    """
    As of the function reduce, with a layout in place of each tensor.
    """

def reduce_kernel(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    reduction: int,
) -> str:
    """
    The kernel that such a call of reduce runs with its program compiled in; empty where the program has to be interpreted. Of an address no more counts than whether it is a multiple of 16.
    """

def reduce_operand_kinds(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    reduction: int,
) -> list[OperandKind]:
    """
    How each operand lies along the lines that threads of that kernel walk along, which it has compiled in.
    """

def reduce_parameters(
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    reduction: int,
    out: int,
    out_dtype: int,
    workspace: int,
    multiprocessors: int,
) -> tuple[bytes, int, int]:
    """
    The same of such a call of reduce, on a device of so many multiprocessors. For tests.
    """

def reduce_workspace(
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    dtype: int,
    reduction: int,
    multiprocessors: int,
) -> int:
    """
    Bytes of workspace that reduce needs, 0 for none.
    """

def reduction_table() -> list[ReductionInfo]:
    """
    The rows of reductions.def.
    """

def reductions() -> dict[str, int]:
    """
    The number of each reduction.
    """

def remember_call(
    function: CallFunction, arguments: tuple[typing.Any, ...], callable: int, before: CallKey, plan: CallPlan
) -> bool:
    """
    Puts a plan into the table for calls with these arguments. before: their key before the plan was made. False where it is another by now.
    """

def remembered_calls() -> int:
    """
    How many plans the table holds.
    """

def run_call(
    plan: CallPlan, tensors: collections.abc.Sequence[typing.Any], first_operand: int, device: int
) -> typing.Any:
    """
    What a plan gives for tensors laid out as those that it was made for, in the order of the call's arguments, on the current stream of their device, which is the current one. Of plans of operators.
    """

def set_process_specialization_mode(mode: SpecializationMode) -> None: ...
def set_stalled(stalled: bool) -> None:
    """
    Whether specializations are queued that no thread compiles: calls that wait for one try again.
    """

def set_thread_specialization_mode(mode: SpecializationMode | None) -> None: ...
def specialization_count() -> int: ...
def specialization_mode() -> SpecializationMode:
    """
    This thread's mode where it has one, and the process's elsewhere.
    """

def specialize_kernel(
    kernel: str,
    program: Program,
    operand_types: collections.abc.Sequence[int],
    snippets: str = "",
    kinds: collections.abc.Sequence[OperandKind] = [],
    derivatives: collections.abc.Sequence[int] = [],
    inlines: bool = False,
    stores_pre_activation: bool = True,
    reduction: int = 0,
) -> str:
    """
    A kernel's PTX with a program compiled in, given the types of the program's operands and how they lie (all strided unless that is said); snippets takes the place of op_snippets(). derivatives: of a kernel of such, what they are with respect to, ascending: 0 for x, k for operand k - 1. inlines: put a short program in the place of the epilogue function's calls, as the driver is given it. stores_pre_activation: whether a GEMM may be asked to. reduction: that a GEMM of rows computes, where its text is to have that alone.
    """

def split(
    stream: int,
    scheme: int,
    is_weight: bool,
    source: int,
    rows: int,
    columns: int,
    row_stride: int,
    column_stride: int,
    values: int,
    scales: int,
    flags: int,
    guard: collections.abc.Sequence[tuple[int, int]] | None = None,
    cleared: tuple[int, int] = (0, 0),
) -> None:
    """
    Splits an fp32 matrix to planes, which are 128-byte aligned. guard: None, or at most two (flags, count) of split3's planes: nothing is written unless a flag says that it would lose accuracy. cleared: address and number of words that are set to zero.
    """

def split_reference(
    source: int, rows: int, columns: int, scheme: int, is_weight: bool, values: int, scales: int
) -> int:
    """
    What split does, on the host: splits a contiguous fp32 matrix to values [pitch / 64, 2 or 3, rows, 64] of 16 bits and scales [pitch / 64, scale_pitch], and returns the flags, for the matrix as a whole.
    """

def thread_specialization_mode() -> SpecializationMode | None:
    """
    None where this thread follows the process.
    """

def training_backward(
    plan: typing.Any,
    needed: typing.Any,
    grad: typing.Any,
    x: typing.Any,
    weight: typing.Any,
    *z_and_operands: typing.Any,
) -> typing.Any: ...
def training_call(
    apply: typing.Any, plan: typing.Any, epilogues: collections.abc.Sequence[Specialization] = []
) -> CallPlan:
    """
    apply(plan, x, weight, bias, *operands), of an autograd.Function. epilogues: the program in the kernels of its passes, for which a capture waits.
    """

def training_forward(plan: typing.Any, z: typing.Any, *operands: typing.Any) -> typing.Any: ...
def training_linear(
    plan: typing.Any, x: typing.Any, weight: typing.Any, bias: typing.Any, *operands: typing.Any
) -> typing.Any: ...
def training_plan(
    z: typing.Any,
    operand_tensors: collections.abc.Sequence[typing.Any],
    y: typing.Any,
    rows: int,
    columns: int,
    z_dtype: int,
    out_dtype: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int]],
    is_read: collections.abc.Sequence[bool],
    outputs: collections.abc.Sequence[
        tuple[
            int,
            tuple[tuple[int, ...], tuple[int, ...], typing.Any],
            int,
            tuple[
                typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
                tuple[int, int, int, int],
                int,
                tuple[tuple[int, ...], tuple[int, ...], typing.Any],
                int,
            ]
            | None,
        ]
    ],
    result: tuple[tuple[int, ...], tuple[int, ...], typing.Any],
    column_sum: tuple[
        tuple[tuple[int, ...], tuple[int, ...], typing.Any],
        tuple[
            typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
            tuple[int, int, int, int],
            int,
            tuple[tuple[int, ...], tuple[int, ...], typing.Any],
            int,
        ],
    ]
    | None,
    forward: Specialization | None,
    backward: Specialization | None,
    product: LinearPlan | None,
    epilogues: collections.abc.Sequence[Specialization],
    pre_activation: tuple[tuple[int, ...], tuple[int, ...], typing.Any],
    identity: Program,
    grad_x: tuple[LinearPlan, typing.Any, bool, tuple[tuple[int, ...], tuple[int, ...], typing.Any]] | None,
    grad_weight: tuple[LinearPlan, typing.Any, bool, tuple[tuple[int, ...], tuple[int, ...], typing.Any]] | None,
    hands_gradient_on: bool,
) -> typing.Any:
    """
    What training_linear, training_forward and training_backward take: of y = program(z, operands) over tensors like these. is_read: which operands the backward pass reads. An output is (wrt, layout of a result, dtype, and None or how it is summed: extents (outer, reduced, inner), the layout of what is summed, bytes of workspace, the sum's layout, dtype); column_sum is None or (partials' layout, how they are summed). forward, backward: the program in the kernels of the two passes. product: a fused plan that stores the pre-activation, of this layout, with its epilogues; None where the forward pass is PyTorch's product and a pass. grad_x, grad_weight: the products of the backward pass, each None where PyTorch multiplies, or (a fused plan of z's gradient and another tensor, that tensor, whether it is the first of the two, the layout of the result); identity is their program. hands_gradient_on: the program adds operands, so that all outputs are the gradient that arrives; the partial sums are then that gradient's rows.
    """

def training_waits_for_host(m: int, n: int, k: int, dtype: int, multiprocessors: int, as_tf32: bool) -> bool:
    """
    Whether the host takes longer to issue the training step of a layer whose products cuBLAS runs than the device to run it; as_tf32: fp32 products do so in tf32.
    """

def use_compiler(compile: collections.abc.Callable[[str, int, Program, list[int]], int] | None) -> None:
    """
    Gives compile(kernel, device, program, operand types) what the driver would compile; None gives it to the driver again. For tests.
    """

def weight_planes(rows: int, columns: int, scheme: int, transposed: bool) -> WeightPlanes:
    """
    The memory of a weight's planes by plan 3 or 6; transposed as in planes_shape.
    """

def why_no_kernels(device: tuple[int, int, int]) -> str:
    """
    Why no fused kernel runs on a device, described as in a request; empty where they do.
    """

def why_not_specialized() -> str:
    """
    Why no program can be compiled into a kernel; empty where it can.
    """

cuda_build: bool
most_specializations: int = 512
plane_advantage: float = 0.95
