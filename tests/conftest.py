"""Shared set-up: `gpu` tests are left out where they cannot run, hypothesis gets one profile."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# `python -m pytest` puts the source tree first on the path, where `cutfuse` has no native module. Last, it serves
# `bench`, which is no part of the distribution, and an installed cutfuse wins.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT), str(ROOT)]

from device_order import take_devices_in_turn  # noqa: E402

take_devices_in_turn()

from generators import FLOATS, GPU_WAYS, Way  # noqa: E402
from plane_device import device as device  # noqa: E402
from poison import poison  # noqa: E402
from random_runs import report  # noqa: E402

import cutfuse  # noqa: E402
from cutfuse import arguments, native  # noqa: E402
from cutfuse.layer import planner, specialize  # noqa: E402
from cutfuse.native import use_operators_everywhere  # noqa: E402

LARGE = 8 << 30  # bytes that a test on a GPU leaves to the next ones

# The first call of anything pays for imports and tracing, so deadlines would only make slow machines fail.
settings.register_profile("cutfuse", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.load_profile("cutfuse")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = find_missing(config)
    if missing:
        terminalreporter.write_line(f"Tests marked gpu were left out: {missing}.")
    report(terminalreporter)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, instead of leaving out the gpu tests")
    parser.addoption("--require-kernels", action="store_true", help="fail where the build has no CUDA kernels")
    parser.addoption("--seed", type=int, default=0, help="draws other tensors in every test")
    parser.addoption("--random-minutes", type=float, default=0, help="how long random tests try fresh seeds")
    parser.addoption("--random-seed", type=int, help="a seed that such a run printed, and no other")


def find_missing(config: pytest.Config) -> str:
    """Why the gpu tests cannot run here; empty when they can."""
    try:
        has_kernels = native.module().cuda_build
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error
    if not has_kernels:
        if config.getoption("--require-gpu") or config.getoption("--require-kernels"):
            raise pytest.UsageError("this build of cutfuse has no CUDA kernels")
        return "this build of cutfuse has no CUDA kernels"
    if not torch.cuda.is_available():
        if config.getoption("--require-gpu"):
            raise pytest.UsageError("PyTorch sees no CUDA device")
        return "PyTorch sees no CUDA device"
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's tensors do not depend on the tests before it in its process, which differ from run to run."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()) + item.config.getoption("--seed"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_missing(config):  # skipping 6,700 tests one after another takes 8 s
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Collections leave out what earlier modules made, compilers' above all: each would take a second."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free memory of the device holds NaN and 1e30 before each gpu test, neither zeros nor the results of another one.

    Tests that measure memory count what is allocated, which does not change. No call is planned before.
    """
    is_on_gpu = request.node.get_closest_marker("gpu")
    if is_on_gpu:
        native.core.forget_calls()
        poison()
    yield
    if is_on_gpu and torch.cuda.memory_reserved() > LARGE:
        torch.cuda.empty_cache()  # other processes test on the same device


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """PyTorch's precision of fp32 products and cutfuse's modes of the process are as before after each test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    cutfuse.set_precision(None)
    cutfuse.set_batch_invariant(False)
    cutfuse.set_rounding("once")
    cutfuse.set_specialization("background")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What was compiled before is not found, and nothing that the test compiles is kept."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["composed", "operators"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways of a call without a GPU: PyTorch's own operations, and the operators' CPU implementations."""
    with use_operators_everywhere() if request.param == "operators" else contextlib.nullcontext():
        yield request.param


@pytest.fixture(
    params=[
        *((way, dtype, "highest") for way in ("composed", "operators") for dtype in FLOATS),
        *(pytest.param(of_gpu, marks=pytest.mark.gpu) for of_gpu in GPU_WAYS),
    ],
    ids=lambda param: f"{param[0]} {str(param[1]).removeprefix('torch.')} {param[2]}",
)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """As `path`, and the kernels of a GPU; each with every type."""
    name, dtype, precision = request.param
    torch.set_float32_matmul_precision(precision)
    with use_operators_everywhere() if name == "operators" else contextlib.nullcontext():
        yield Way("cuda" if name == "kernels" else "cpu", dtype)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's threads, which wait for each other on a busy machine, would take most of the time of small calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hopper_at_highest() -> None:
    """PyTorch's "highest" for fp32 products, on the one architecture that has kernels over planes."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        # Other architectures have cuBLAS for these products, which PyTorch tests.
        pytest.skip("products of 16-bit parts are for compute capability 9.0")
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def guarded_products(hopper_at_highest: None) -> Iterator[None]:
    """Products in "guarded", with the memory of earlier tests free."""
    gc.collect()
    with cutfuse.precision("guarded"):
        yield


@pytest.fixture
def everything_fuses(fresh_dynamo: None) -> Iterator[None]:
    """The operators run on a CPU too, so that torch.compile's backend fuses there."""
    with use_operators_everywhere():
        yield


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """Tensors without memory, and the kernels and facts of an H200 for them."""
    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(planner, "device_facts", lambda device: (9, 0, 132))
    monkeypatch.setattr(specialize, "why_interpreted", lambda: "")
