"""What MkDocs does to the pages: on GitHub they are read as they are, and the site differs in links and plots.

The README, the changelog and CONTRIBUTING.md are pages of the site too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
UPWARDS = re.compile(r"\]\(((?:\.\./)*)\.\./(README|CONTRIBUTING|CHANGELOG)\.md")
IMAGE = re.compile(r"^!\[([^\]]*)\]\((\S+)\)$", re.MULTILINE)
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>', re.DOTALL
)


def own_link(link: re.Match[str]) -> str:
    """A link of a document in the repository's root, as it is for a page."""
    bang, text, target = link.groups()
    path, hash_sign, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    if path.startswith("docs/") or path in PAGES:
        return f"{bang}[{text}]({PAGES.get(path, path.removeprefix('docs/'))}{hash_sign}{anchor})"
    return text if "`" in text else f"`{text}`"


def own_picture(picture: re.Match[str]) -> str:
    """A plot for light and dark pages, as the site's theme chooses it, that leads to the one for light pages.

    A browser shows that one alone on white.
    """
    dark, alt, light = picture.groups()
    return f"[![{alt}]({light}#only-light)![{alt}]({dark}#only-dark)]({light})"


def root_document(name: str) -> str:
    """A document of the repository's root as a page, with links to other files of it as text."""
    parts = FENCE.split((ROOT / name).read_text(encoding="utf-8"))
    return "".join(
        part if part.startswith("```") else LINK.sub(own_link, PICTURE.sub(own_picture, part)) for part in parts
    )


def own_page(markdown: str) -> str:
    """A page of `docs` as it is for the site."""
    markdown = UPWARDS.sub(lambda link: f"]({link[1]}{PAGES[link[2] + '.md']}", markdown)
    markdown = IMAGE.sub(r"[\g<0>](\2)", markdown)
    return PICTURE.sub(own_picture, markdown)


def on_files(files: Files, config: Any) -> Files:
    """MkDocs' event: the pages are known. Those of the repository's root are added."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=root_document(name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: a page's Markdown before it is rendered."""
    return own_page(markdown)
