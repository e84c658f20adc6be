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
CITATION = (ROOT / "CITATION.cff").read_text()
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_what_follows_a_release_has_a_version_of_its_own() -> None:
    """A later one's development release where the changelog has changes since the newest release."""
    newest = RELEASE.findall(CHANGELOG)[0][0]
    unreleased = re.search(r"^## Unreleased\n(.*?)^## ", CHANGELOG, re.MULTILINE | re.DOTALL)
    assert unreleased is not None
    if not unreleased[1].strip():
        assert cutfuse.__version__ == newest
        return
    version = re.fullmatch(r"(\d+\.\d+\.\d+)\.dev\d+", cutfuse.__version__)
    assert version is not None, cutfuse.__version__
    assert numbers(version[1]) > numbers(newest)


def test_every_address_of_the_metadata_is_of_the_repository() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    addresses = re.findall(r"https://[\w./-]+", pyproject)
    repository = re.search(r'^Repository = "(.*)"$', pyproject, re.MULTILINE)
    assert repository is not None
    assert len(addresses) == 6
    assert all(address.startswith(repository[1]) for address in addresses)


def test_the_keywords_are_the_citations() -> None:
    keywords = re.search(r"^keywords = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert keywords is not None
    cited = re.findall(r"^  - (.*)$", CITATION.split("keywords:")[1], re.MULTILINE)
    assert re.findall(r'"(.*?)"', keywords[1]) == cited


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(RELEASE.match(f"## {heading}") for heading in headings[1:])
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for part in re.split(r"^## .*$", CHANGELOG, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert sections == [kind for kind in kinds if kind in sections]


def test_the_citation_is_of_the_newest_release() -> None:
    version, date = RELEASE.findall(CHANGELOG)[0]
    assert f"\nversion: {version}\n" in CITATION
    assert f'\ndate-released: "{date}"\n' in CITATION


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


def test_the_workflow_installs_a_wheel_on_every_python_that_is_supported() -> None:
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    _, _, wheel = (ROOT / ".github" / "workflows" / "tests.yml").read_text().partition("\n  wheel:\n")
    versions = re.search(r"python: \[(.*?)\]", wheel)
    assert versions is not None
    assert re.findall(r'"(.*?)"', versions[1]) == supported


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
