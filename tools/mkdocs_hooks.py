"""Hooks of mkdocs.yml: README.md is the first page, links that leave docs become words, and every
decision is in the navigation."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    decisions = sorted(Path(config.docs_dir).glob("adr/*.md"))
    config.nav.append({"Decisions": [f"adr/{path.name}" for path in decisions]})


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    root, source = docs.parent, Path(page.file.abs_src_path)
    folder = source.parent
    if page.file.src_uri == "index.md":
        markdown, folder = (root / "README.md").read_text(encoding="utf-8"), root

    def rewrite(link: re.Match[str]) -> str:
        label, target, anchor = link.groups()
        path = (folder / target).resolve()
        if docs in path.parents and path.is_file():
            start = "!" if link.group().startswith("!") else ""
            return f"{start}[{label}]({os.path.relpath(path, source.parent)}{anchor or ''})"
        if not path.exists():
            return link.group()  # for mkdocs to complain of
        name = os.path.relpath(path, root)
        return label if name in label else f"{label} (`{name}`)"

    return _LINK.sub(rewrite, markdown)
