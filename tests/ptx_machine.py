"""Runs a function or a kernel of PTX on the CPU, for many threads at once: what the text says, bit by bit.

Approximations (ex2.approx, rcp.approx, div.full and the like) are computed in fp64 and rounded, which is within what
PTX promises of them; a GPU's own last bits may differ. Everything else is exact, and NaN is 7FFFFFFF wherever
arithmetic makes one. Threads that branch apart go on at the first instruction that any of them waits for, and so meet
again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from ptx_arithmetic import (
    APPROXIMATIONS,
    SIGNED,
    UNSIGNED,
    Array,
    bits_of,
    compare,
    convert,
    exact_sum,
    extreme,
    float_of,
    flushed,
    size_of,
    to_single,
)
from ptx_parser import Address, Function, Operand, Register, Statement

MEMORY_BASE = 1 << 16
LOCAL_BASE = 1 << 40
LOCAL_BYTES = 2048
WARP = 32
PARAMETER_BASE = 1 << 50  # of a kernel's one parameter
PARAMETER = re.compile(r"_param_(\d+)$")


class Machine:
    """Threads that run one function. Memory is one array of bytes for all, local memory one for each.

    `special`: the values of special registers, such as %tid.x. `stores`: where the threads may write. `block_threads`:
    of the blocks that they come in, one block after another, each with a shared memory whose addresses begin at 0.
    """

    def __init__(
        self,
        threads: int,
        memory: bytes = b"",
        symbols: dict[str, int] | None = None,
        special: dict[str, Array] | None = None,
        stores: range = range(0),
        block_threads: int = 1,
    ) -> None:
        self.threads = threads
        self.memory = np.frombuffer(memory or bytes(16), np.uint8).copy()
        self.symbols = symbols or {}
        self.special = special or {}
        self.stores = stores
        self.block_of = np.arange(threads) // block_threads
        self.local = np.zeros((threads, LOCAL_BYTES), np.uint8)
        self.registers: dict[Register, Array] = {}
        self.numbers: dict[tuple[int, str], Array] = {}
        self.active = np.ones(threads, bool)
        self.uniform = True

    def run(self, function: Function, parameters: Sequence[Array], result_bytes: int = 64) -> Array:
        """Parameters are arrays of bytes, a row for each thread; so is the result."""
        self.parameters = parameters
        self.result = np.zeros((self.threads, result_bytes), np.uint8)
        self.function = function
        end = len(function.statements)
        self.shared = np.zeros((self.block_of[-1] + 1, function.shared_bytes), np.uint8)
        self.counters = np.zeros(self.threads, np.int64)
        with np.errstate(all="ignore"):
            while (at := int(self.counters.min())) < end:
                self.active = self.counters == at
                self.uniform = bool(self.active.all())
                waiting = end if self.uniform else int(self.counters[~self.active].min())
                while at < waiting and not self.step(function.statements[at], at):
                    at += 1
                    self.counters[self.active] = at
        return self.result

    def step(self, statement: Statement, at: int) -> bool:
        """Whether the threads may be apart afterwards."""
        root = statement.parts[0]
        if root in ("bra", "brx", "ret"):
            self.jump(statement, at)
            return True
        handler = getattr(self, f"do_{root}", None)
        assert handler, f"the machine does not know {statement.opcode}"
        if statement.guard is None:
            handler(statement)
            return False
        active, uniform = self.active, self.uniform
        self.active = active & (self.registers[statement.guard] ^ statement.negated)
        self.uniform = bool(self.active.all())
        if self.active.any():
            handler(statement)
        self.active, self.uniform = active, uniform
        return False

    def jump(self, statement: Statement, at: int) -> None:
        taken = self.active
        if statement.guard is not None:
            taken = taken & (self.registers[statement.guard] ^ statement.negated)
        if statement.parts[0] == "ret":
            target = np.full(self.threads, len(self.function.statements))
        elif statement.parts[0] == "brx":
            targets = np.array([self.function.labels[name] for name in self.function.tables[statement.operands[1]]])
            target = targets[np.where(taken, self.read(statement.operands[0], "u32"), 0)]
        else:
            target = np.full(self.threads, self.function.labels[statement.operands[0]])
        self.counters = np.where(taken, target, np.where(self.active, at + 1, self.counters))

    def read(self, operand: Operand, kind: str) -> Array:
        """The bits of an operand, as unsigned integers of the type's size; predicates as they are."""
        if isinstance(operand, Register):
            size = size_of(kind)
            value = self.registers.get(operand)
            if value is None:  # a loop that rotates registers reads each before its first value
                value = np.zeros(self.threads, bool if kind == "pred" else UNSIGNED[size])
            return value if kind == "pred" or value.itemsize == size else value.astype(UNSIGNED[size])
        if isinstance(operand, list):
            parts = [self.read(item, f"b{size_of(kind) * 8 // len(operand)}") for item in operand]
            return np.ascontiguousarray(np.stack(parts, axis=-1)).view(UNSIGNED[size_of(kind)])[:, 0]
        if isinstance(operand, str):
            if operand in self.special:
                return self.special[operand].astype(UNSIGNED[size_of(kind)])
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else self.address_of(operand)
        else:
            number = operand
        value = self.numbers.get((number, kind))
        if value is None:
            value = np.full(self.threads, number & (1 << 8 * size_of(kind)) - 1, UNSIGNED[size_of(kind)])
            value.flags.writeable = False
            self.numbers[number, kind] = value
        return value

    def address_of(self, symbol: str) -> int:
        if PARAMETER.search(symbol):
            return PARAMETER_BASE
        if symbol in self.function.locals:
            return LOCAL_BASE + self.function.locals[symbol]
        if symbol in self.function.shared:
            return self.function.shared[symbol]
        return MEMORY_BASE + self.symbols[symbol]

    def read_float(self, operand: Operand, kind: str) -> Array:
        return float_of(self.read(operand, kind))

    def read_signed(self, operand: Operand, kind: str) -> Array:
        bits = self.read(operand, kind)
        return bits.view(SIGNED[bits.itemsize]) if kind[0] == "s" else bits

    def read_number(self, operand: Operand, kind: str) -> Array:
        return self.read_float(operand, kind) if kind[0] == "f" else self.read_signed(operand, kind)

    def write(self, operand: Operand, value: Array) -> None:
        if isinstance(operand, list):
            width = value.itemsize // len(operand)
            parts = np.ascontiguousarray(value).view(UNSIGNED[width]).reshape(self.threads, len(operand))
            for item, part in zip(operand, parts.T, strict=True):
                self.write(item, part)
            return
        assert isinstance(operand, Register), f"{operand} is no register"
        if not self.uniform:
            before = self.registers.get(operand)
            value = np.where(self.active, value, np.zeros_like(value) if before is None else before)
        self.registers[operand] = value

    def do_mov(self, statement: Statement) -> None:
        self.write(statement.operands[0], self.read(statement.operands[1], statement.parts[-1]))

    def do_cvta(self, statement: Statement) -> None:
        self.do_mov(statement)  # one address space

    def arithmetic(self, statement: Statement, integers: Callable[[Array, Array], Array]) -> None:
        kind, parts = statement.parts[-1], statement.parts
        target, first, second = statement.operands
        if kind[0] != "f":
            a, b = self.read(first, kind), self.read(second, kind)
            self.write(target, integers(a, b))
            return
        a, b = self.read_float(first, kind), self.read_float(second, kind)
        if statement.rounding == "rn" or kind == "f64":
            result = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[parts[0]](a, b)
        else:
            assert parts[0] == "add", f"the machine does not know {statement.opcode}"
            result = to_single(exact_sum(a.astype(np.float64), b.astype(np.float64)), statement.rounding)
        self.write(target, bits_of(result))

    def do_add(self, statement: Statement) -> None:
        self.arithmetic(statement, np.add)

    def do_sub(self, statement: Statement) -> None:
        self.arithmetic(statement, np.subtract)

    def do_mul(self, statement: Statement) -> None:
        if "wide" in statement.parts:
            self.write(statement.operands[0], self.wide_product(statement))
        else:
            self.arithmetic(statement, np.multiply)

    def wide_product(self, statement: Statement) -> Array:
        kind = statement.parts[-1]
        a, b = (self.read_signed(item, kind) for item in statement.operands[1:3])
        wide = np.int64 if kind[0] == "s" else np.uint64
        return (a.astype(wide) * b.astype(wide)).view(np.uint64)

    def do_mad(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        if "wide" in statement.parts:
            self.write(statement.operands[0], self.wide_product(statement) + self.read(statement.operands[3], "u64"))
        else:
            a, b, c = (self.read(item, kind) for item in statement.operands[1:])
            self.write(statement.operands[0], a * b + c)

    def do_fma(self, statement: Statement) -> None:
        a, b, c = (self.read_float(item, "f32").astype(np.float64) for item in statement.operands[1:])
        assert statement.opcode == f"fma.{statement.rounding}.f32", statement.opcode
        self.write(statement.operands[0], bits_of(to_single(exact_sum(a * b, c), statement.rounding)))

    def do_neg(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        value = self.read(statement.operands[1], kind)
        top = value.dtype.type(1 << 8 * value.itemsize - 1)
        self.write(statement.operands[0], value ^ top if kind[0] == "f" else value.dtype.type(0) - value)

    def do_abs(self, statement: Statement) -> None:
        assert statement.parts[-1] == "f32", statement.opcode
        self.write(statement.operands[0], self.read(statement.operands[1], "f32") & np.uint32(0x7FFFFFFF))

    def do_copysign(self, statement: Statement) -> None:
        sign, value = (self.read(item, "f32") for item in statement.operands[1:])
        self.write(statement.operands[0], (value & np.uint32(0x7FFFFFFF)) | (sign & np.uint32(0x80000000)))

    def do_min(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        a, b = (self.read_number(item, kind) for item in statement.operands[1:])
        if kind == "f32":
            self.write(statement.operands[0], bits_of(extreme(a, b, statement.parts)))
        else:
            result = np.maximum(a, b) if statement.parts[0] == "max" else np.minimum(a, b)
            self.write(statement.operands[0], result.view(UNSIGNED[result.itemsize]))

    do_max = do_min

    def approximate(self, statement: Statement) -> None:
        assert statement.parts[-1] == "f32", statement.opcode
        arguments = [self.read_float(item, "f32") for item in statement.operands[1:]]
        if "ftz" in statement.parts:
            arguments = [flushed(argument) for argument in arguments]
        exact = APPROXIMATIONS[statement.parts[0]](*(argument.astype(np.float64) for argument in arguments))
        result = exact.astype(np.float32)
        self.write(statement.operands[0], bits_of(flushed(result) if "ftz" in statement.parts else result))

    do_ex2 = do_lg2 = do_rcp = do_rsqrt = do_sqrt = do_sin = do_cos = do_tanh = approximate

    def do_div(self, statement: Statement) -> None:
        if statement.parts[-1] == "f32":
            self.approximate(statement)
        else:
            self.divide(statement, np.floor_divide)

    def do_rem(self, statement: Statement) -> None:
        self.divide(statement, np.remainder)

    def divide(self, statement: Statement, operation: Callable[[Array, Array], Array]) -> None:
        kind = statement.parts[-1]
        a, b = (self.read_signed(item, kind) for item in statement.operands[1:])
        assert kind[0] == "u" or (a[self.active] >= 0).all(), "the machine divides no negative numbers"
        self.write(statement.operands[0], operation(a, np.where(self.active, b, 1)).view(UNSIGNED[a.itemsize]))

    def do_popc(self, statement: Statement) -> None:
        bits = self.read(statement.operands[1], statement.parts[-1]).view(np.uint8).reshape(self.threads, -1)
        self.write(statement.operands[0], np.unpackbits(bits, axis=1).sum(axis=1, dtype=np.uint32))

    def do_setp(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        a, b = (self.read_number(item, kind) for item in statement.operands[1:])
        assert len(statement.parts) == 3, statement.opcode
        self.write(statement.operands[0], compare(statement.parts[1], a, b))

    def do_selp(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        target, yes, no, condition = statement.operands
        self.write(target, np.where(self.read(condition, "pred"), self.read(yes, kind), self.read(no, kind)))

    def logic(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        operation = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[statement.parts[0]]
        a, b = (self.read(item, kind) for item in statement.operands[1:])
        self.write(statement.operands[0], operation(a, b))

    do_and = do_or = do_xor = logic

    def do_not(self, statement: Statement) -> None:
        self.write(statement.operands[0], ~self.read(statement.operands[1], statement.parts[-1]))

    def do_shl(self, statement: Statement) -> None:
        self.shift(statement, np.left_shift)

    def do_shr(self, statement: Statement) -> None:
        self.shift(statement, np.right_shift)

    def shift(self, statement: Statement, operation: Callable[..., Array]) -> None:
        kind = statement.parts[-1]
        value = self.read_signed(statement.operands[1], kind)
        count = self.read(statement.operands[2], "u32")
        bits = 8 * value.itemsize
        shifted = operation(value, np.minimum(count, bits - 1).astype(value.dtype))
        if kind[0] != "s":
            shifted = np.where(count >= bits, value.dtype.type(0), shifted)
        self.write(statement.operands[0], shifted.view(UNSIGNED[value.itemsize]))

    def do_bfi(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        source, base = (self.read(item, kind) for item in statement.operands[1:3])
        start, length = statement.operands[3:]
        assert isinstance(start, int), statement.opcode
        assert isinstance(length, int), statement.opcode
        mask = base.dtype.type(((1 << length) - 1) << start)
        self.write(statement.operands[0], (base & ~mask) | (source << base.dtype.type(start) & mask))

    def do_cvt(self, statement: Statement) -> None:
        to, origin = statement.parts[-2:]
        modifiers = statement.parts[1:-2]
        if to.endswith("x2"):  # the first source becomes the upper half
            sources = [self.read(item, origin) for item in statement.operands[1:]]
            high, low = (convert(item, to[:-2], origin, modifiers).view(np.uint16) for item in sources)
            self.write(statement.operands[0], high.astype(np.uint32) << np.uint32(16) | low)
            return
        source = self.read(statement.operands[1], "b16" if origin == "bf16" else origin)
        self.write(statement.operands[0], convert(source, to, origin, modifiers))

    def places(self, address: Address, count: int) -> tuple[Array, Array, bool]:
        """Where the bytes of each active thread are, and whether that is local memory."""
        if isinstance(address.base, Register):
            start = self.registers[address.base].astype(np.int64) + address.offset
        else:
            start = np.full(self.threads, self.address_of(address.base) + address.offset)
        is_local = start >= LOCAL_BASE
        local = bool(is_local[self.active].all())
        assert local or not is_local[self.active].any(), "threads load from different memories"
        origin, limit = (LOCAL_BASE, LOCAL_BYTES) if local else (MEMORY_BASE, len(self.memory))
        offsets = np.where(self.active, start - origin, 0)
        assert (offsets >= 0).all(), "an address before the memory"
        assert (offsets + count <= limit).all(), "an address behind the memory"
        return offsets[:, None] + np.arange(count), np.arange(self.threads)[:, None], local

    def do_ld(self, statement: Statement) -> None:
        kind, target = statement.parts[-1], statement.operands[0]
        targets = target if isinstance(target, list) else [target]
        size = size_of(kind)
        address = statement.operands[1]
        assert isinstance(address, Address), statement.opcode
        if "param" in statement.parts:
            data = self.parameter_at(address, size * len(targets))
        elif "shared" in statement.parts:
            data = self.shared[self.block_of[:, None], self.shared_places(address, size * len(targets))]
        else:
            columns, rows, local = self.places(address, size * len(targets))
            data = self.local[rows, columns] if local else self.memory[columns]
        values = np.ascontiguousarray(data).view(UNSIGNED[size])
        for item, value in zip(targets, values.T, strict=True):
            self.write(item, np.ascontiguousarray(value) if size > 1 else value.astype(np.uint16))

    def parameter_at(self, address: Address, count: int) -> Array:
        if isinstance(address.base, Register):
            start = self.registers[address.base].astype(np.int64) - PARAMETER_BASE + address.offset
            start = np.where(self.active, start, 0)
            return self.parameters[0][np.arange(self.threads)[:, None], start[:, None] + np.arange(count)]
        number = PARAMETER.search(address.base)
        assert number, f"no parameter {address.base}"
        return self.parameters[int(number[1])][:, address.offset : address.offset + count]

    def do_st(self, statement: Statement) -> None:
        kind, (address, source) = statement.parts[-1], statement.operands
        assert isinstance(address, Address), statement.opcode
        values = [self.read(item, kind) for item in (source if isinstance(source, list) else [source])]
        data = np.ascontiguousarray(np.stack(values, axis=-1)).view(np.uint8)
        if "param" in statement.parts:
            place = slice(address.offset, address.offset + data.shape[1])
            self.result[self.active, place] = data[self.active]
            return
        if "shared" in statement.parts:
            places = self.shared_places(address, data.shape[1])
            self.shared[self.block_of[self.active, None], places[self.active]] = data[self.active]
            return
        columns, rows, local = self.places(address, data.shape[1])
        if local:
            self.local[rows[self.active], columns[self.active]] = data[self.active]
            return
        taken = columns[self.active]
        assert taken.min() >= self.stores.start, "a store outside the result"
        assert taken.max() < self.stores.stop, "a store outside the result"
        self.memory[taken] = data[self.active]

    def shared_places(self, address: Address, count: int) -> Array:
        start = np.full(self.threads, address.offset, np.int64)
        is_register = isinstance(address.base, Register)
        start += self.read(address.base, "u64").astype(np.int64) if is_register else self.address_of(address.base)
        assert (start[self.active] + count <= self.shared.shape[1]).all(), "an address behind a block's memory"
        return np.where(self.active, start, 0)[:, None] + np.arange(count)

    def do_shfl(self, statement: Statement) -> None:
        assert statement.parts[1:3] == ["sync", "bfly"], statement.opcode
        target, source, distance = statement.operands[:3]
        lanes = np.arange(self.threads)
        others = lanes ^ self.read(distance, "u32").astype(np.int64)
        assert self.active[others[self.active]].all(), "a thread asks one that is elsewhere"
        assert (others // WARP == lanes // WARP).all(), "a thread asks one of another warp"
        self.write(target, self.read(source, "b32")[others])

    def do_bar(self, statement: Statement) -> None:
        """Threads meet again at the first instruction that any of them waits for, and so at this one."""
        here = np.bincount(self.block_of, self.active)
        assert np.isin(here, (0, np.bincount(self.block_of).max())).all(), "a part of a block waits at a barrier"
