"""The commands of the package: what `python -m cutfuse` lists, help, answers, and what they say without the module."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import cutfuse
from cutfuse import __main__ as commands
from cutfuse import demo, report
from cutfuse.epilogue import __main__ as epilogue

CALLS = """
import torch, cutfuse
x = torch.ones(4, 4)
for call in (
    lambda: cutfuse.linear(x, x, epilogue=torch.sigmoid, reduce="sum"),
    lambda: cutfuse.reduce(x, 0),
    lambda: cutfuse.nn.FusedLinear(4, 4, reduce="amax"),
):
    try:
        call()
    except ImportError as error:
        print("pip install -e ." in str(error))
"""


def test_the_commands_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 0
    listed = dict(re.findall(r"^python -m (\S+)  +(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert set(listed) == {"cutfuse.demo", "cutfuse.epilogue", "cutfuse.report", "bench"}


@pytest.mark.parametrize("command", [commands, demo, epilogue, report])
def test_each_command_has_help(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m cutfuse")


@pytest.fixture(scope="module")
def without_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree in which nothing was built."""
    folder = tmp_path_factory.mktemp("source")
    package = Path(cutfuse.__file__).parent
    shutil.copytree(package, folder / "cutfuse", ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    return folder


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    # Without site, whose .pth files would let an editable installation win over this package.
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)


@pytest.mark.parametrize("command", ["cutfuse.demo", "cutfuse.epilogue"])
def test_a_command_without_the_module_says_what_to_do(command: str, without_module: Path) -> None:
    result = run_in(without_module, "-m", command)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cutfuse's native module cannot be imported")
    assert "pip install -e ." in line


def test_a_call_with_a_reduction_without_the_module_says_what_to_do(without_module: Path) -> None:
    result = run_in(without_module, "-c", CALLS)
    assert result.stdout.split() == ["True"] * 3, result.stderr


def test_no_function_is_listed_twice() -> None:
    names = [line.partition("(")[0] for line in epilogue.listing() if re.match(r"torch\.", line)]
    assert len(names) > 100
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gelu", "approximate='tanh'"),
        ("F.silu", "a * sigmoid(a)"),
        ("torch.Tensor.add", "a + alpha * b"),
        ("+", "a + alpha * b"),
        ("arcsin", "arcsin(a)"),
        ("nn.Hardtanh", "hardtanh z"),
        ("floor_divide", "a // b"),
        ("__add__", "operator"),
    ],
)
def test_a_function_of_the_language_is_described(name: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert epilogue.main([name]) == 0
    assert part in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("softmax", "combines elements of a row or a column"),
        ("nn.Softmax", "combines elements of a row or a column"),
        ("sum", 'use reduce="sum"'),
        ("relu_", "use torch.relu"),
        ("torch.lgamma", "its derivative"),
        ("matmul", "it is a further product"),
        ("nn.Linear", "with its arguments"),
        ("gelo", "did you mean gelu"),
    ],
)
def test_what_the_language_lacks_has_a_reason(name: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert epilogue.main(["relu", name]) == 1
    assert part in capsys.readouterr().out
