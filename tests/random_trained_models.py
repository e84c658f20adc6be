"""Compares random models that are trained, compiled by cutfuse and by torch.compile, with themselves in fp64.

`python tests/random_trained_models.py --models 1000 --jobs 16 --seed 0` takes the models of so many seeds, in processes
that share the devices, and gives a table of counts and each fault with its seed. A fault, a process that dies and one
that hangs are written to the file of `--faults` with the source of the model, and stop nothing else. `--models 1 --seed
SEED` runs one of these again. No model begins after `--seconds`. The exit status is 1 where there were faults.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from device_order import visible_devices
from trained_model_check import Verdict, check
from trained_models import CPU_SIZES, DEVICE_SIZES, PRECISIONS, make_model

MOST_MODELS = 100  # of a process, which keeps all kernels that it has loaded
START_SECONDS = 300
MOST_FAILED_STARTS = 3  # one after another, until a worker gives up
REPORT_SECONDS = 15
PROCESSES = multiprocessing.get_context("spawn")
_STARTING = threading.Lock()  # a process begins with the environment and the open files of this one


def serve(calls: Connection, log: str, device: str) -> None:
    """A process: answers seeds with verdicts until it is ended. What it and its compilers print goes to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device != "cpu":
        torch.zeros(1, device=device)
    calls.send(None)
    while True:
        seed = calls.recv()
        try:
            calls.send(check(seed, device))
        except Exception as error:
            calls.send(Verdict(seed, faults=[f"the check fails: {type(error).__name__}: {error}"]))


class Worker:
    """A process on one device, which is replaced where it dies or hangs.

    device: as CUDA_VISIBLE_DEVICES names it, or "cpu".
    """

    def __init__(self, number: int, device: str, folder: Path, limit: float) -> None:
        self.number, self.device, self.folder, self.limit = number, device, folder, limit
        self.process: Any = None
        self.served = self.started = self.failed_starts = 0

    def check(self, seed: int) -> Verdict:
        """The verdict on a model, which is a fault where there is none within the limit."""
        try:
            if self.process is not None and (self.served >= MOST_MODELS or not self.process.is_alive()):
                self.stop()
            if self.process is None:
                self._start()
            self.calls.send(seed)
            verdict: Verdict = self._receive(self.limit)
            self.served += 1
            if any("CUDA error" in text for text in (*verdict.faults, *verdict.pytorchs)):
                self.stop()  # nothing more can run in that process
            return verdict
        except (EOFError, OSError, TimeoutError) as error:
            reason = f"no answer within {error}" if isinstance(error, TimeoutError) else self._end()
            self.stop()
            return Verdict(seed, faults=[f"process {self.number}: {reason}; {self._last_lines()}"])

    def _start(self) -> None:
        self.started += 1
        self.failed_starts += 1
        name = f"{self.number}-{self.started}"
        self.log = self.folder / f"{name}.log"
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"{name}-cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_CACHE_DISABLE": "1",  # the driver's cache is for kernels that are needed again
        }
        if self.device != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = self.device
        with _STARTING:
            self.calls, theirs = PROCESSES.Pipe()
            arguments = (theirs, str(self.log), "cpu" if self.device == "cpu" else "cuda")
            self.process = PROCESSES.Process(target=serve, args=arguments, daemon=True)
            before = dict(os.environ)
            os.environ.update(environment)
            try:
                self.process.start()
            finally:
                os.environ.clear()
                os.environ.update(before)
            theirs.close()  # so that the end of the process is the end of what it sends
        self.served = 0
        self._receive(START_SECONDS)
        self.failed_starts = 0

    def _receive(self, limit: float) -> Any:
        if not self.calls.poll(limit):
            raise TimeoutError(f"{limit:.0f} s")
        return self.calls.recv()

    def _end(self) -> str:
        self.process.join(10)
        return f"ended with exit status {self.process.exitcode}"

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(lines[-3:])

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.calls.close()
            self.process = None


class Seeds:
    """Consecutive seeds for several threads, until the time is over."""

    def __init__(self, first: int, count: int, seconds: float) -> None:
        self._seeds = iter(range(first, first + count))
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        while time.monotonic() < self._end:
            with self._lock:
                seed = next(self._seeds, None)
            if seed is None:
                return
            yield seed


def run(options: argparse.Namespace, devices: Sequence[str]) -> list[Verdict]:
    """The verdicts on all models, in any order. Faults are printed and written as they come."""
    done: queue.Queue[Verdict] = queue.Queue()
    seeds = Seeds(options.seed, options.models, options.seconds)
    places = itertools.islice(itertools.cycle(devices), min(options.jobs, options.models))

    def work(number: int, device: str) -> None:
        worker = Worker(number, device, Path(folder), options.model_seconds)
        for seed in seeds:
            done.put(worker.check(seed))
            if worker.failed_starts == MOST_FAILED_STARTS:
                break
        worker.stop()

    verdicts: list[Verdict] = []
    started = reported = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        threads = [threading.Thread(target=work, args=place, daemon=True) for place in enumerate(places)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or not done.empty():
            try:
                verdict = done.get(timeout=1)
            except queue.Empty:
                pass
            else:
                verdicts.append(verdict)
                if verdict.faults:
                    report(verdict, options.faults, devices)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                print(f"{reported - started:.0f} s: {summary_of(verdicts)}", flush=True)
    return verdicts


def report(verdict: Verdict, path: Path, devices: Sequence[str]) -> None:
    print(f"seed {verdict.seed}: {verdict.faults[0]}", flush=True)
    model = make_model(verdict.seed, CPU_SIZES if devices[0] == "cpu" else DEVICE_SIZES)
    with path.open("a") as file:
        file.write("\n".join((model.source, "", *verdict.faults, "", "")))


def summary_of(verdicts: Sequence[Verdict]) -> str:
    """One line."""
    faulty = sum(bool(verdict.faults) for verdict in verdicts)
    return f"{len(verdicts)} models, {faulty} with faults"


def table_of(verdicts: Sequence[Verdict]) -> str:
    """Counts by precision, and which seeds have faults."""
    rows = [("precision", "models", "faulty", "PyTorch's", "skipped", "products", "fused", "tensors", "s")]
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.precision or "unknown"].append(verdict)
        groups["all"].append(verdict)
    for name in (*PRECISIONS, "unknown", "all"):
        if group := groups[name]:
            flags = [sum(map(bool, column)) for column in zip(*map(_flags, group), strict=True)]
            sums = [sum(column) for column in zip(*((v.products, v.fused, v.tensors) for v in group), strict=True)]
            seconds = f"{sum(v.seconds for v in group) / len(group):.1f}"
            rows.append((name, str(len(group)), *map(str, flags), *map(str, sums), seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for title, chosen in (
        ("faults", [v for v in verdicts if v.faults]),
        ("PyTorch's own", [v for v in verdicts if v.pytorchs]),
        ("skipped", [v for v in verdicts if v.skipped]),
    ):
        lines += [f"{title}:"] if chosen else []
        for verdict in sorted(chosen, key=lambda verdict: verdict.seed):
            text = (verdict.faults if title == "faults" else verdict.pytorchs or [verdict.skipped])[0]
            lines.append(f"  seed {verdict.seed}, {verdict.precision or 'unknown'}: {text}")
    return "\n".join(lines)


def _flags(verdict: Verdict) -> tuple[bool, bool, bool]:
    return bool(verdict.faults), bool(verdict.pytorchs), bool(verdict.skipped)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare random trained models with themselves in fp64.")
    parser.add_argument("--models", type=int, default=1000, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others have the next ones")
    parser.add_argument("--jobs", type=int, default=16, metavar="N", help="how many processes share the devices")
    parser.add_argument("--devices", default="all", help="all, cpu, or as CUDA_VISIBLE_DEVICES has them: 0,1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when no more models begin")
    parser.add_argument("--model-seconds", type=float, default=180, help="of one model, until its process is ended")
    parser.add_argument("--faults", type=Path, default=Path("trained_model_faults.txt"), help="the file for faults")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = read_arguments(arguments)
    devices = visible_devices() if options.devices == "all" else options.devices.split(",")
    if not devices:
        print("There is no CUDA device here; --devices cpu takes the processor.", file=sys.stderr)
        return 2
    started = time.monotonic()
    verdicts = run(options, devices)
    print(table_of(verdicts))
    last = options.seed + options.models - 1
    seconds = time.monotonic() - started
    print(f"Seeds {options.seed} to {last}: {summary_of(verdicts)}, {options.models} wanted, in {seconds:.0f} s")
    return 1 if any(verdict.faults for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
