"""What the modules with a matrix product have in common: their weight can be prepared."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from ..prepare import PreparedWeight, is_exporting, prepare

_Module = TypeVar("_Module", bound="PreparesWeight")


class PreparesWeight(nn.Module):
    """Before the model among a module's bases."""

    _prepared: PreparedWeight | None = None

    def prepare(self: _Module, mode: str | None = None) -> _Module:
        """Prepares the weight by `cutfuse.prepare`, and gives the module itself.

        In training mode too. Calls raise RuntimeError where the weight has changed since, or is another one: prepare
        again. `train()` gives the memory back.
        """
        self._prepared = prepare(self._plain_weight(), mode)
        return self

    def train(self: _Module, mode: bool = True) -> _Module:
        """As `nn.Module.train`. `train()` drops what is prepared, and `eval()` keeps it."""
        if mode:
            self._prepared = None
        return super().train(mode)

    def _plain_weight(self) -> Tensor:
        """The weight itself, prepared or not."""
        raise NotImplementedError

    def _weight(self) -> Tensor | PreparedWeight:
        """What `cutfuse.linear` takes."""
        weight, prepared = self._plain_weight(), self._prepared
        if prepared is None or is_exporting():  # an exported program has the weight alone
            return weight
        if prepared.weight is not weight:
            raise RuntimeError(
                f"cutfuse.nn.{type(self).__name__}: the weight is another tensor than the one that was prepared; "
                "call prepare() again, or train() to have none prepared"
            )
        return prepared
