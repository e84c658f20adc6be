"""Regions: a matrix product, and what follows it up to one value that is used outside.

From each product the search walks forward and lifts every node that it can into an expression of the pre-activation z.
What broadcasts and does not depend on z is an operand; views that keep the rows are transparent. Of the nodes that were
lifted, the furthest whose inner values nothing else reads becomes the end of the region, or a reduction of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .ends import candidates, describe_end, region_at
from .growth import Growth
from .nodes import module_of
from .products import Product, find_parts, find_product
from .region import BARE, Region, Search
from .schedule import Schedule

Judge = Callable[[Region], str]  # why a region is better left to the compiler; empty where it is not


def find_regions(graph: fx.Graph, writes: dict[Any, float], judge: Judge) -> list[Search]:
    """The products of a graph, each with its region. Regions do not overlap. writes: see `last_writes`."""
    schedule = Schedule(graph, writes)
    searches = []
    for node in graph.nodes:
        product = find_product(node)
        if product is None or node in schedule.taken:
            continue
        search = _search(product, schedule, judge)
        searches.append(search)
        if search.region is not None:
            schedule.taken.update(search.region.cone, [search.region.out])
    return searches


def _search(product: Product, schedule: Schedule, judge: Judge) -> Search:
    """What becomes of a product: of one whose columns are split, the region of the first part that has one."""
    search = Search(product, module_of(product.node))
    try:
        search = _search_from(product, schedule, judge)
        for part in [] if search.region is not None else _find_parts(product, schedule):
            found = _search_from(part, schedule, lambda region: _why_not_split(region) or judge(region))
            if found.region is not None:
                return found
            search.refusals += found.refusals
            if found.refusals:
                search.reason, search.refused = found.refusals[0], found.refused
    except Exception as error:  # an error of ours ends a region, and no compilation
        search.error = error
    return search


def _find_parts(product: Product, schedule: Schedule) -> list[Product]:
    """The parts of a product's columns, if nothing is written and no mode changes before the last of them is taken."""
    parts = find_parts(product)
    epoch = schedule.epochs[product.node]
    return parts if all(schedule.epochs[part.node] == epoch for part in parts) else []


def _why_not_split(region: Region) -> str:
    """Why a part of a product is no product of its own; empty where it is one: where it meets all the others.

    Nothing else may read those, because what takes their place lies in memory otherwise.
    """
    part = region.product.part
    assert part is not None
    covered = {*region.cone, region.out}
    operands = {operand.source for operand in region.operands}
    meets = all(node in operands and covered.issuperset(node.users) for node, _, _ in part.siblings)
    return "" if meets else BARE


def _search_from(product: Product, schedule: Schedule, judge: Judge) -> Search:
    growth = Growth(product, schedule)
    search = Search(growth.product, module_of(growth.product.part.whole if growth.product.part else growth.start))
    for end, reduced in candidates(growth):
        region = region_at(growth, end, reduced)
        if isinstance(region, str):
            growth.stops.setdefault(end if reduced is None else reduced, region)
            continue
        refusal = judge(region)
        if not refusal:
            search.region = region
            break
        search.refusals.append(refusal)
        if refusal != BARE:
            search.refused = search.refused or region
    last = growth.product.node if search.region is None else search.region.out
    search.ended_at, search.reason = describe_end(growth, last, search)
    return search
