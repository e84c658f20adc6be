"""Whether a row of a result is to have the same bits however many rows are computed with it.

Calls of this mode run kernels that add in one order, which is chosen from the weight, the types and what follows, and
never from the number of rows. A call that no such kernel computes raises: cuBLAS and PyTorch's own operations choose by
the number of rows. A thread's innermost `with batch_invariant()` decides, then the process's `set_batch_invariant`.
"""

from __future__ import annotations

import contextlib

from . import dynamo
from .switch import Switch

_NOTHING = contextlib.nullcontext()
_INSIDE = "a compiled function reads cutfuse.batch_invariant when it runs: enter it around the call of the function"


process = Switch("cutfuse.batch_invariant")


@dynamo.disable_because(_INSIDE)
def batch_invariant(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """A context in which a row's result does not depend on how many rows this thread's calls are given with it.

    Row i of `linear`, `mlp`, `reduce`, the statistics of `linear_cross_entropy` and `linear_logprob`, and
    their modules, has the bits that it has in a batch of its own, and in any other batch. Gradients are as they are
    outside of it. Contexts nest, `enabled=False` leaves the mode, and the result decorates functions too. A compiled
    function reads the mode when it runs: enter the context around it, not inside of it.

    Calls raise NotImplementedError where no kernel keeps the promise, and say what is missing.

    Raises:
        TypeError: `enabled` is no bool.
    """
    return process.entered(_checked("batch_invariant", enabled))


@dynamo.disable_because("call cutfuse.set_batch_invariant outside of compiled functions, which read it when they run")
def set_batch_invariant(enabled: bool) -> None:
    """Makes that the mode of every thread outside of `batch_invariant`'s contexts.

    Raises:
        TypeError: `enabled` is no bool.
    """
    process.set_process(_checked("set_batch_invariant", enabled))


def get_batch_invariant() -> bool:
    """What `set_batch_invariant` was given last, whatever context this is; False before that."""
    return process.of_process


@dynamo.assume_constant_result
def _holds() -> bool:
    return process.holds()


def is_batch_invariant() -> bool:
    """Whether the mode holds now. Not while torch.compile traces: the operators of compiled code read it."""
    return not dynamo.is_tracing() and process.holds()


def may_be_batch_invariant() -> bool:
    """Whether the mode holds; while torch.compile traces, whether it does anywhere, as operators read it later."""
    return process.holds_somewhere if dynamo.is_tracing() else process.holds()


def require(why_not: str) -> None:
    """Raises where the mode holds, also while torch.compile traces. why_not: what would run without its promise."""
    if why_not and _holds():
        raise NotImplementedError(refusal(why_not))


def without_batch_invariance() -> contextlib.AbstractContextManager[None]:
    """`batch_invariant(False)` where the mode holds. Elsewhere nothing, for which backward passes do not pay."""
    return process.entered(False) if _holds() else _NOTHING


def refusal(why_not: str) -> str:
    return (
        f"cutfuse.batch_invariant: no kernel gives a row the same bits in every batch here: {why_not}. Change that, or "
        "make this call within cutfuse.batch_invariant(False)"
    )


def _checked(function: str, enabled: bool) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(f"cutfuse.{function}: enabled has to be True or False, got {enabled!r}")
    return enabled
