"""The files around a release say the same: version, date, versions of PyTorch, what a bug report asks for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import cutfuse

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / ".github").is_dir():
    pytest.skip("these files are only in the source tree", allow_module_level=True)

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    assert RELEASE.findall(CHANGELOG)[0][0] == cutfuse.__version__


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(RELEASE.match(f"## {heading}") for heading in headings[1:])
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for part in re.split(r"^## .*$", CHANGELOG, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert sections == [kind for kind in kinds if kind in sections]


def test_the_citation_is_of_the_newest_release() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    version, date = RELEASE.findall(CHANGELOG)[0]
    assert f"\nversion: {version}\n" in citation
    assert f'\ndate-released: "{date}"\n' in citation


@pytest.mark.parametrize("name", ["bug.yml", "speed.yml"])
def test_issues_are_asked_for_the_report_and_the_explanation(name: str) -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text()
    assert "python -m cutfuse.report" in form
    assert "cutfuse.explain(" in form


def test_the_workflow_tests_the_versions_of_pytorch_that_ci_does_and_later_ones() -> None:
    ci = re.search(r"TORCH_VERSIONS=\((.*?)\)", (ROOT / ".ci" / "run").read_text())
    make = re.search(r"^TORCH \?= torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    workflow = re.search(r"torch: \[(.*?)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert ci is not None
    assert make is not None
    assert workflow is not None
    tested, in_workflow = {*ci[1].split(), make[1]}, set(re.findall(r'"(.*?)"', workflow[1]))
    assert tested <= in_workflow
    latest = max(map(numbers, tested))
    assert all(numbers(version) > latest for version in in_workflow - tested)


def test_the_workflow_runs_targets_that_make_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"run: make (\w+)", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert set(targets) == {"test", "lint"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_a_second_make_installs_nothing(tmp_path: Path) -> None:
    """What Python leaves beside the build files is no prerequisite."""
    for name in ("cmake/a.cmake", "cmake/__pycache__/b.pyc", "csrc/epilogue/c.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text() + "\nnative:\n\t@echo $(NATIVE)\n")
    found = subprocess.run(["make", "-s", "native"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["pyproject.toml", "CMakeLists.txt", "cmake/a.cmake", "csrc/epilogue/c.h"]
