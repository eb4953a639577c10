"""What mkdocs gets in addition to ``docs/``: pages of the repository's top level, and the files that pages link to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FROM_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_config(config: Any) -> Any:
    """List the decisions in the navigation."""
    background = next(entry["Background"] for entry in config.nav if "Background" in entry)
    decisions = next(entry for entry in background if isinstance(entry, dict) and "Decisions" in entry)
    decisions["Decisions"] = [f"decisions/{page.name}" for page in sorted((ROOT / "docs/decisions").glob("*.md"))]
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, page in FROM_TOP.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    pages = [*(ROOT / name for name in FROM_TOP), *(ROOT / "docs").glob("**/*.md")]
    for page in pages:
        for _, _, target, _ in LINK.findall(page.read_text()):
            linked = (page.parent / target).resolve()
            name = _in_site(linked)
            if linked.is_file() and name.startswith("source/") and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(linked)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at where the site has what they name; a link to a folder becomes its text."""
    top = {site: name for name, site in FROM_TOP.items()}
    source = ROOT / top.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def changed(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        linked = (source.parent / target).resolve()
        if linked.is_dir():
            return text
        if not linked.is_file():
            return link[0]
        up = "../" * page.file.src_uri.count("/")
        return f"{image}[{text}]({up}{_in_site(linked)}{anchor})"

    return LINK.sub(changed, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings' roles become the names that they mean."""
    return ROLE.sub(r"<code>\1</code>", html)


def _in_site(file: Path) -> str:
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
    return name.removeprefix("docs/") if name.startswith("docs/") else FROM_TOP.get(name, f"source/{name}")
