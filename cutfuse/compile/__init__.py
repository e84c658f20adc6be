"""Whole models: `torch.compile(model, backend="cutfuse")`.

The backend fuses what follows each linear layer of a model that nobody has touched, and hands the rest to Inductor.
"""

from __future__ import annotations

from .model import backend, explain_model, install, installed, uninstall

__all__ = ["backend", "explain_model", "install", "installed", "uninstall"]
