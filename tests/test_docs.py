"""The README and the documentation: their Python runs and prints what they say, and their links and commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from documents import NEEDS_GPU, OF_H200, OF_PACKAGE, ROOT, blocks_of, name_of, pages, run_page
from generated_text import REGION, code, fill

import cutfuse
from bench.goals import lines_table
from bench.results import committed, committed_suites
from cutfuse.epilogue import __main__ as epilogue_listing
from cutfuse.epilogue.table import op_table

MOST_UNRUN = 2  # blocks that need a GPU, in all pages
MOST_LINES = 160  # of the README
MOST_COLUMNS = 110  # of a table of the benchmarks
WITH_CODE = [path for path in pages() if blocks_of(path)]
in_the_source_tree = pytest.mark.skipif(not pages(), reason="the documentation is only in the source tree")


@in_the_source_tree
def test_pages_are_found() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/models/sigmoid.md"} <= {name_of(path) for path in WITH_CODE}


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_the_blocks_of_a_page_run(path: Path) -> None:
    for block, printed in run_page(path):
        if block.printed is not None:
            assert printed == block.printed, f"{block.page}:{block.line}; python tests/documents.py writes it"


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_every_block_is_seen(path: Path) -> None:
    """A fence that the tests would take for something else would not be run."""
    text = path.read_text(encoding="utf-8")
    assert len(blocks_of(path)) == len(re.findall(r"^\s*(?:```|~~~)\W*(?:python|py)\b", text, re.MULTILINE))
    assert {block.mark for block in blocks_of(path)} <= {"", NEEDS_GPU, OF_H200, OF_PACKAGE}


@in_the_source_tree
def test_few_blocks_are_left_out() -> None:
    assert sum(block.mark == NEEDS_GPU for path in WITH_CODE for block in blocks_of(path)) <= MOST_UNRUN


def anchors_of(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@in_the_source_tree
@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md", *map(name_of, pages())])
def test_links_lead_somewhere(name: str) -> None:
    """On GitHub, that is; `mkdocs build --strict` checks those of the site."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    images = re.findall(r' (?:src|srcset)="([^"]+)"', text)
    for target in [*re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text), *images]:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        document = ROOT / name
        document = document.parent / path if path else document
        assert document.exists(), target
        assert not anchor or anchor in anchors_of(document), target


@in_the_source_tree
def test_the_readme_is_short_and_its_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= MOST_LINES
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= used <= targets
    for module in re.findall(r"python -m ([\w.]+)", readme):
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("path", pages(), ids=name_of)
def test_generated_text_is_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- generate: ") == len(REGION.findall(text))
    assert fill(text) == text, f"{name_of(path)}; python tests/documents.py writes it"


@in_the_source_tree
def test_pages_have_what_is_generated() -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in pages()}
    for op in op_table().ops:
        assert code(op.formula) in written["functions"]
    for suite in committed_suites():
        table = lines_table(committed(suite), is_short=True)
        assert table.markdown() in written["performance"] + written["precision"]
        assert max(map(len, table.markdown().splitlines())) <= MOST_COLUMNS


@in_the_source_tree
def test_the_api_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for module in (cutfuse, cutfuse.compile, cutfuse.epilogue, cutfuse.nn):
        for name in module.__all__:
            assert re.search(rf"\b{name}\b", text), f"{module.__name__}.{name}"


def test_every_op_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert epilogue_listing.main([]) == 0
    listing = capsys.readouterr().out
    assert all(f"{op.path}(" in listing and op.formula in listing for op in op_table().ops)
