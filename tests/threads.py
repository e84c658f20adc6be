"""Threads that begin together."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_in_threads(works: list[Callable[[], None]]) -> None:
    """All at once; raises what one of them raised first."""
    start = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
