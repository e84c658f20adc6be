"""Reads a function of PTX: statements, labels, and registers told apart by the braces that they are declared in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class Register(NamedTuple):
    scope: int
    name: str


@dataclass(frozen=True)
class Address:
    base: Register | str
    offset: int


Operand = Register | Address | str | int | list  # a string is a symbol, a label or a number in fp32 or fp64


@dataclass
class Statement:
    opcode: str
    operands: list[Operand]
    guard: Register | None = None
    negated: bool = False
    parts: list[str] = field(default_factory=list)
    rounding: str = "rn"

    def __post_init__(self) -> None:
        self.parts = self.opcode.split(".")
        self.rounding = next((part[:2] for part in self.parts if part[:2] in ("rn", "rz", "rm", "rp")), "rn")


@dataclass
class Function:
    """The body of a function, its labels, its jump tables, and where its arrays lie in local and shared memory."""

    statements: list[Statement]
    labels: dict[str, int]
    tables: dict[str, list[str]]
    locals: dict[str, int]
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0


class Parser:
    """From a function's body to statements, with registers told apart by the braces that they are declared in."""

    def __init__(self, body: str) -> None:
        self.text = re.sub(r"//[^\n]*", "", body)
        self.scopes: list[tuple[int, dict[str, int]]] = [(0, {})]
        self.count = 0
        self.local_bytes = 0
        self.function = Function([], {}, {}, {})

    def parse(self) -> Function:
        position = 0
        while position < len(self.text):
            character = self.text[position]
            if character.isspace():
                position += 1
            elif character == "{":
                self.count += 1
                self.scopes.append((self.count, {}))
                position += 1
            elif character == "}":
                self.scopes.pop()
                position += 1
            elif label := re.compile(r"([\w$]+):\s*").match(self.text, position):
                position = self.read_label(label[1], label.end())
            else:
                end = self.text.index(";", position)
                self.read(self.text[position:end].strip())
                position = end + 1
        return self.function

    def read_label(self, name: str, position: int) -> int:
        if self.text.startswith(".branchtargets", position):
            end = self.text.index(";", position)
            self.function.tables[name] = re.findall(r"\$[\w$]+", self.text[position:end])
            return end + 1
        assert name not in self.function.labels, f"two labels {name}"
        self.function.labels[name] = len(self.function.statements)
        return position

    def read(self, text: str) -> None:
        if text.startswith(".reg"):
            for name, count in re.findall(r"([%\w]+)(?:<(\d+)>)?\s*(?:,|$)", text.split(None, 2)[2]):
                self.scopes[-1][1][name] = int(count or -1)
        elif text.startswith(".local"):
            name, count = re.findall(r"(\w+)\[(\d+)\]", text)[0]
            self.function.locals[name] = self.local_bytes
            self.local_bytes += int(count) + 15 & ~15
        elif text.startswith(".shared"):
            name, count = re.findall(r"(\w+)\[(\d+)\]", text)[0]
            self.function.shared[name] = self.function.shared_bytes
            self.function.shared_bytes += int(count) + 15 & ~15
        elif not text.startswith("."):
            guard = re.match(r"@(!?)([%\w]+)\s+", text)
            opcode, _, rest = (text[guard.end() :] if guard else text).partition(" ")
            opcode, _, tab = opcode.partition("\t")
            operands = [self.operand(item) for item in split_operands(tab + rest)]
            register = self.register(guard[2]) if guard else None
            self.function.statements.append(Statement(opcode, operands, register, bool(guard and guard[1])))

    def register(self, name: str) -> Register | None:
        family = name.rstrip("0123456789")
        for scope, declared in reversed(self.scopes):
            if declared.get(name) == -1 or (name != family and int(name[len(family) :]) < declared.get(family, -1)):
                return Register(scope, name)
        return None

    def operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return [self.operand(item) for item in split_operands(text[1:-1])]
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return Address(self.register(base) or base, int(offset or 0))
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        text, _, _ = text.partition("|")  # of a shuffle's two results nobody reads the second
        return self.register(text) or text


def split_operands(text: str) -> list[str]:
    return [item.strip() for item in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{\[]+", text) if item.strip()]


def find_function(ptx: str, name: str) -> Function:
    """The function whose name contains `name`."""
    return _parse_behind(re.search(r"^\.func[^;{]*?\w*" + name + r"\w*\([^;{]*\{", ptx, re.MULTILINE), ptx, name)


def find_kernel(ptx: str, name: str) -> Function:
    """The kernel whose name starts with `name`."""
    return _parse_behind(re.search(r"\.entry\s+" + name + r"[^;{]*\{", ptx), ptx, name)


def _matching_brace(ptx: str, start: int) -> int:
    """Where the brace is closed that was opened before `start`."""
    depth = 1
    for brace in re.compile("[{}]").finditer(ptx, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise AssertionError("a brace is not closed")


def _parse_behind(found: re.Match[str] | None, ptx: str, name: str) -> Function:
    assert found, f"no function {name}"
    body = ptx[found.end() : _matching_brace(ptx, found.end())]
    parser = Parser(body)
    for array, symbol in re.findall(r"^(\.shared [^;]*?(\w+)\[\d+\]);", ptx, re.MULTILINE):
        if symbol in body:  # which the kernels of a module may share
            parser.read(array)
    return parser.parse()
