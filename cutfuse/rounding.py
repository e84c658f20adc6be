"""Whether linear layers round as PyTorch does in eager mode, after each operation, or once.

"once" computes what follows a product in fp32 and rounds the result. "eager" gives the bits that PyTorch's own
operations give on the same device: by kernels where these are known to give them, and else by those operations. A
thread's innermost `with rounding(mode)` decides, then the process's `set_rounding`; "once" where neither was called.
"""

from __future__ import annotations

import contextlib

from . import dynamo
from .switch import Switch

MODES = ("once", "eager")
_INSIDE = "a compiled function takes the mode in which it is traced: enter cutfuse.rounding around its call"

process = Switch("cutfuse.rounding")


@dynamo.disable_because(_INSIDE)
def rounding(mode: str) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread's linear layers round as `mode` says: "eager" or "once".

    With "eager", `cutfuse.linear` and `cutfuse.nn.FusedLinear` give the bits of `torch.nn.functional.linear` and the
    epilogue after it, on the same device and with the same PyTorch. `cutfuse.explain` says whether a kernel of cutfuse
    or PyTorch itself computes them. Contexts nest, and the result decorates functions too.

    Raises:
        ValueError: `mode` is not "eager" or "once".
    """
    return process.entered(is_eager(mode))


@dynamo.disable_because("call cutfuse.set_rounding outside of compiled functions")
def set_rounding(mode: str) -> None:
    """Makes `mode` that of every thread outside of `rounding`'s contexts.

    Raises:
        ValueError: `mode` is not "eager" or "once".
    """
    process.set_process(is_eager(mode))


def get_rounding() -> str:
    """The mode that `set_rounding` was given last, whatever context this is; "once" before that."""
    return MODES[process.of_process]


def is_eager(mode: str | None) -> bool:
    """Of a call's own mode; None is the context's.

    While torch.compile traces, the context's is "eager" if it is anywhere in the process: compiled code serves all
    threads, and is compiled again where that changes.

    Raises:
        ValueError: `mode` is none.
    """
    if mode is None:
        return process.holds_somewhere if dynamo.is_tracing() else process.holds()
    if mode not in MODES:
        raise ValueError(f'cutfuse: a rounding is "eager" or "once", got {mode!r}')
    return mode == "eager"
