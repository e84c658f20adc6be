"""How long it takes until chains run specialized, in a process of its own: `python -m bench.chain_start COUNT`.

Everything else that a first call pays for is paid before: the context, the kernels' module, and a plan.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cutfuse
from bench.chains import DRAWS, HAND_WRITTEN, Chain, drawn_chain, operands_of
from bench.contenders import LONGEST_WAIT_S, in_mode
from bench.suite import Figures
from bench.timing import wait_for
from bench.workloads import Shape, product_tensors

SHAPE = (4096, 4096, 4096)
COLD, SECOND = "cold", "second process"
REPETITIONS = 3
PROCESS_TIMEOUT_S = 180.0
SEED = 2026  # of chains that no other case has
FIRST_CHAIN = "squash"  # interpreted, before the clock starts
# One operation behind a product may be PyTorch's own kernel, which is never specialized. The first one is of six.
LONG_DRAWS = sorted((draw for draw in DRAWS if draw.ops > 1), key=lambda draw: (draw.ops != 6, bool(draw.reduce)))


def new_chains(count: int) -> list[Chain]:
    """Chains of three to twelve operations, and of every kind of operand."""
    generator = random.Random(SEED)
    return [drawn_chain(f"start-{place:02}", LONG_DRAWS[place % len(LONG_DRAWS)], generator) for place in range(count)]


def measure(count: int, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Seconds until `count` chains behind a product run specialized, and how many kernels then do.

    Of one chain it is the first call's time, which waits for the kernel; several are called once each, and waited for.
    """
    wait = wait_for(device)
    x, weight = product_tensors(shape, "bf16", device)
    chains = new_chains(count)
    first = next(chain for chain in HAND_WRITTEN if chain.name == FIRST_CHAIN)
    operands = {chain.name: operands_of(chain, *shape[:2], "bf16", device) for chain in (first, *chains)}

    def call(chain: Chain) -> None:
        cutfuse.linear(x, weight, epilogue=chain.function, operands=operands[chain.name], reduce=chain.reduce)

    in_mode("off", call)(first)
    wait()
    mode = "now" if count == 1 else "background"
    began = time.perf_counter()
    for chain in chains:
        in_mode(mode, call)(chain)
    ready = 0 if count == 1 else cutfuse.wait(LONGEST_WAIT_S)
    wait()
    seconds = time.perf_counter() - began
    return {"wait_s": seconds, "kernels": ready or cutfuse.wait(LONGEST_WAIT_S)}


def command(count: int) -> list[str]:
    """The command line of a process that prints what `measure` gives."""
    return [sys.executable, "-m", "bench.chain_start", str(count)]


def run_process(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a fresh process prints as its last line, whose caches are in `folder`.

    Raises RuntimeError with the end of its errors where it fails.
    """
    # In this process's order: the installed cutfuse before the sources.
    paths = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)
    # The driver's compiled kernels, and cutfuse's own.
    caches = {"CUDA_CACHE_PATH": str(folder / "driver"), "XDG_CACHE_HOME": str(folder / "user")}
    environment = {**os.environ, **caches, "PYTHONPATH": paths}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, cwd=folder, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a process ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run(count: int) -> Figures:
    """The figures of a case: in processes without a cache, and for one chain in processes that find one."""
    found: dict[str, list[dict[str, Any]]] = {COLD: []}
    for _ in range(REPETITIONS if count == 1 else 1):
        with tempfile.TemporaryDirectory() as folder:
            found[COLD].append(run_process(command(count), Path(folder)))
            if count == 1:
                found.setdefault(SECOND, []).append(run_process(command(count), Path(folder)))
    contenders: dict[str, Figures] = {}
    for name, own in found.items():
        fewest = min(one["kernels"] for one in own)
        contenders[name] = {"wait_s": statistics.median(one["wait_s"] for one in own), "kernels": fewest}
        if fewest < count:
            contenders[name] = {"note": f"failed: {fewest} of {count} chains ran specialized"}
    return {"contenders": contenders}


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(measure(int(sys.argv[1]), SHAPE, torch.device("cuda"))))
