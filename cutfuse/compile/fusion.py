"""Fuses what follows the linear layers of a graph, reports what became of each, and is the pass that Inductor runs."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import warnings
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .. import native
from ..layer import inductor
from ..layer.planner import UNKNOWN_SIZES
from .attention import keep_attention
from .choice import why_left
from .joining import Together, join_products
from .layouts import RowCopy, lay_out_by_rows
from .nodes import last_writes, module_of, needs_gradient, uses_transforms
from .products import find_product
from .regions import Region, Search, find_regions
from .report import ProductReport, report, report_own
from .rewriting import Rewriter, UnfitError

_TRANSFORMED = "a transform of torch.func, such as vmap or grad, is in the same graph"
_OWN_LAYERS = {f"cutfuse.{name}.default" for name in ("linear", "linear_with_pre_activation")}
_LOG = logging.getLogger("cutfuse.compile")


def fuse(module: fx.GraphModule, predicts: bool = False) -> list[ProductReport]:
    """Rewrites a graph in place, and the graphs of activation checkpoints in it.

    predicts: tell of each product what it is predicted to take too.

    An error leaves the region, or the whole graph, to the compiler, with a warning.
    """
    reports = []
    written: set[Any] = set()
    for graph_module, is_transformed in graphs_of(module).items():
        try:
            with enable_python_dispatcher():  # of which examples with symbolic sizes have need in PyTorch 2.8
                if is_transformed:
                    reports += [report(search, predicts) for search in _left_searches(graph_module.graph)]
                else:
                    reports += _fuse_graph(graph_module, written, predicts)
        except Exception as error:
            _warn("a graph", error)
    return reports


def graphs_of(module: fx.GraphModule, is_transformed: bool = False) -> dict[fx.GraphModule, bool]:
    """The graph, and those of the bodies of activation checkpoints, which run as they are.

    Of each: whether it, or one around it, uses transforms of torch.func.
    """
    found = {module: is_transformed or uses_transforms(module.graph)}
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            body = node.args[0]
            inner = getattr(module, str(body.target), None) if isinstance(body, fx.Node) else None
            if isinstance(inner, fx.GraphModule):
                for graph_module, is_inside in graphs_of(inner, found[module]).items():
                    found[graph_module] = is_inside or found.get(graph_module, False)
    return found


def _fuse_graph(module: fx.GraphModule, written: set[Any], predicts: bool) -> list[ProductReport]:
    """written: the memory that the graphs around this one write to, to which its own is added."""
    graph = module.graph
    if keep_attention(graph, last_writes(graph, written), functools.partial(_warn, "attention")):
        module.recompile()
    copies: list[RowCopy] = []
    try:
        searches = _find_regions_by_rows(graph, written, copies)
    except Exception:
        _undo(copies, ())
        raise
    written.update(last_writes(graph))
    rewriter = Rewriter(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    own = _own_layers(module, order) if predicts else []
    failures: dict[int, str] = {}
    for search in searches:
        if search.error is not None:
            failures[id(search)] = _describe(search.error)
            _warn(search.module, search.error)
    with_region = [search for search in searches if search.region is not None]
    before = {id(search): report(search, predicts) for search in searches}
    for search in sorted(with_region, key=lambda found: order[found.region.out]):  # type: ignore[union-attr]
        try:
            rewriter.rewrite(search.region)  # type: ignore[arg-type]
        except UnfitError as error:
            failures[id(search)] = str(error)
        except GuardOnDataDependentSymNode:
            failures[id(search)] = UNKNOWN_SIZES
        except Exception as error:
            failures[id(search)] = _describe(error)
            _warn(search.module, error)
    _undo(copies, [region for region in _regions_of(searches) if region.out in rewriter.replaced])
    joined = _join(graph)
    if rewriter.replaced or joined:
        graph.lint()
        module.recompile()
    reports = [
        _changed(before[id(search)], failures.get(id(search), ""), joined.get(search.product.node))
        for search in searches
    ]
    products = zip((order[search.product.node] for search in searches), reports, strict=True)
    return [product for _, product in sorted([*products, *own], key=itemgetter(0))]


def _own_layers(module: fx.GraphModule, order: dict[fx.Node, int]) -> list[tuple[int, ProductReport]]:
    """The layers of cutfuse's that the model calls itself, with their places: of trained ones the forward pass's."""
    found = []
    for node, place in order.items():
        nodes: Iterable[fx.Node] = [node]
        if getattr(node.target, "__name__", str(node.target)) == "autograd_function_apply":
            nodes = getattr(module, str(node.args[0].target)).graph.nodes  # type: ignore[union-attr]
        found += [
            (place, report_own(own, own is not node or needs_gradient(own)))
            for own in nodes
            if str(own.target) in _OWN_LAYERS
        ]
    return found


def _join(graph: fx.Graph) -> dict[fx.Node, Together]:
    """Joins the products that are left, unless that fails: for each, what to report."""
    warn = functools.partial(_warn, "products of one input")
    try:
        return join_products(graph, warn)
    except Exception as error:
        warn(error)
        return {}


def _find_regions_by_rows(graph: fx.Graph, written: set[Any], copies: list[RowCopy]) -> list[Search]:
    """The products with their regions, after `copies` were inserted that give regions values by rows."""
    lay_out_by_rows(graph, copies)
    searches = _find_regions(graph, written)
    if _undo(copies, _regions_of(searches)):
        searches = _find_regions(graph, written)
    return searches


def _find_regions(graph: fx.Graph, written: set[Any]) -> list[Search]:
    return find_regions(graph, last_writes(graph, written), why_left)


def _regions_of(searches: list[Search]) -> list[Region]:
    return [search.region for search in searches if search.region is not None]


def _undo(copies: list[RowCopy], regions: Iterable[Region]) -> bool:
    """Takes out the copies that are no part of these regions, nor any value behind them. Whether there were any."""
    covered = {node for region in regions for node in (region.out, *region.cone)}
    idle = [copy for copy in copies if covered.isdisjoint([copy.node, *copy.followers])]
    for copy in idle:
        copy.undo()
        copies.remove(copy)
    return bool(idle)


def _left_searches(graph: fx.Graph) -> list[Search]:
    """The products of a graph in which nothing may be fused."""
    products = [find_product(node) for node in graph.nodes]
    return [Search(found, module_of(found.node), reason=_TRANSFORMED) for found in products if found is not None]


def _changed(found: ProductReport, failure: str, together: Together | None) -> ProductReport:
    """The report of a product, of which a failure left everything to the compiler, or which is joined with others."""
    if failure:
        return found._replace(is_fused=False, program="", ended_at="", reason=failure, times=None)
    if together is not None:
        return found._replace(is_joined=True, program="", ended_at="", reason=together.reason, times=together.times)
    return found


def _warn(what: str, error: Exception) -> None:
    _LOG.debug("cutfuse left %s to the compiler", what, exc_info=error)
    warnings.warn(
        f"cutfuse leaves {what} to the compiler, because of an error of its own: {_describe(error)}. Please report it "
        "with what `python -m cutfuse.report` prints",
        stacklevel=2,
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].rstrip(" .:")


class FusionPass(CustomGraphPass):
    """Fuses what follows linear layers, after the passes that were there before."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        module = graph.owning_module
        if module is not None and not _is_inside_of_another():
            inductor.register()
            fuse(module)

    def uuid(self) -> Any:
        """What compiled code depends on besides the graph: these passes. None keeps it out of caches."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.before]
        if any(other is None for other in others):
            return None
        own = f"{digest_of(Path(__file__).parents[1])} {torch.__version__} {others!r}"
        return hashlib.sha256(own.encode()).hexdigest()


@functools.cache
def digest_of(package: Path) -> str:
    """Of the package's code, with the native module: what the pass fuses is another thing in another version."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), Path(native.core.__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_inside_of_another() -> bool:
    """Whether Inductor runs its passes on the graph of a checkpoint's body or of a branch, before those around it.

    What is fused of it depends on the graphs around, which the pass on the outermost one sees. Inductor's function
    calls itself for each graph inside.
    """
    depth, frame = 0, inspect.currentframe()
    while frame is not None and depth < 2:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
        frame = frame.f_back
    return depth > 1


def installed_pass(found: Any) -> FusionPass:
    """Inductor's setting with the pass: `found`, or after what is there."""
    return found if isinstance(found, FusionPass) else FusionPass(_passes(found))


def without_pass(found: Any) -> Any:
    """Inductor's setting as it was before the pass was installed."""
    if not isinstance(found, FusionPass):
        return found
    return found.before[0] if len(found.before) == 1 else list(found.before) or None


def _passes(found: Any) -> tuple[Any, ...]:
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)
