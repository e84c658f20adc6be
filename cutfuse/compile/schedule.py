"""The order in which a graph's nodes run, and what may not be moved in it."""

from __future__ import annotations

from typing import Any

from torch import fx

from .epochs import find_epochs


class Schedule:
    """What the searches of one graph share.

    order: the place of each node. epochs: see `find_epochs`. writes: see `last_writes`. taken: the nodes of regions so
    far.
    """

    def __init__(self, graph: fx.Graph, writes: dict[Any, float]) -> None:
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.epochs = find_epochs(graph)
        self.writes = writes
        self.taken: set[fx.Node] = set()
