"""The order in which a graph's nodes run, and what may not be moved in it."""

from __future__ import annotations

from torch import fx

from .epochs import find_epochs, find_writes, memory_of


class Schedule:
    """What the searches of one graph share. order: the place of each node. taken: the nodes of regions so far."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.epochs = find_epochs(graph)
        self.writes = find_writes(graph)
        self.taken: set[fx.Node] = set()

    def is_written_after(self, node: fx.Node, end: fx.Node) -> bool:
        """Whether a node's memory is written to after another node."""
        last = self.writes.get(memory_of(node))
        return last is not None and self.order[last] > self.order[end]
