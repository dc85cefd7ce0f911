"""What the site has beside its pages: the texts that its search looks through, and llms.txt.

*sections.js* has the text of each section, for docs/_static/search.js: the index of Sphinx knows
pages only. *llms.txt* lists the pages, each with its first sentence and its source, for programs
that read: https://llmstxt.org/. *llms-full.txt* has all sources in one.
"""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import clean_astext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

PARTS = (nodes.section, addnodes.desc)  # Each has an address of its own.
APART = (nodes.title, addnodes.toctree, nodes.comment, nodes.raw)


def setup(app: Sphinx) -> dict[str, int]:
    app.connect("source-read", _keep_source, priority=900)  # As conf.py leaves it.
    app.connect("html-page-context", _load_sections)
    app.connect("build-finished", _write)
    return {"env_version": 1}  # What was read without this extension is read anew.


def _keep_source(app: Sphinx, page: str, source: list[str]) -> None:
    vars(app.env).setdefault("page_sources", {})[page] = source[0]


def _load_sections(app: Sphinx, page: str, *_context: Any) -> None:
    if page == "search":  # The only page that needs them.
        app.add_js_file("sections.js")


def _write(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.name != "html":
        return
    site = Path(app.outdir)
    found = [part for page in sorted(app.env.found_docs) for part in _parts_of(app, page)]
    texts = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (site / "_static" / "sections.js").write_text(f"const SECTIONS = {texts};\n")
    sources = {page: _source_of(app, page) for page in _in_order(app)}
    for page, source in sources.items():
        (site / f"{page}.md").write_text(source)
    (site / "llms.txt").write_text(_overview(app))
    (site / "llms-full.txt").write_text("\n\n".join(sources.values()))


# --- the search ---------------------------------------------------------------------------------


def _parts_of(app: Sphinx, page: str) -> Iterator[list[Any]]:
    """Of each section and each documented name: address, title, text and what it explains.

    All are without those of the sections within.
    """
    title = app.env.titles[page].astext()
    for part in app.env.get_doctree(page).findall(lambda node: isinstance(node, PARTS)):
        if isinstance(part, nodes.section):
            anchor, name = part["ids"][0], clean_astext(part.next_node(nodes.title))
        else:
            signature = part.next_node(addnodes.desc_signature)
            if not signature["ids"]:
                continue
            anchor = name = signature["ids"][0]
        words = " ".join(" ".join(_texts_of(part)).split())
        explained = [name, name.split(": ")[0], *_explained_in(part)]
        if part.parent and isinstance(part.parent, nodes.document):
            yield [f"{page}.html", title, words, explained]
        else:
            yield [f"{page}.html#{anchor}", f"{title} > {name}", words, explained]


def _texts_of(node: nodes.Element) -> Iterator[str]:
    for child in node.children:
        if isinstance(child, (*PARTS, *APART)):
            continue
        if isinstance(child, nodes.TextElement):
            yield child.astext()
        elif isinstance(child, nodes.Element):
            yield from _texts_of(child)


def _explained_in(node: nodes.Element) -> Iterator[str]:
    """What items and first cells of rows begin with, and cells of code: an option, a message."""
    for child in node.children:
        if isinstance(child, (*PARTS, *APART, nodes.thead, nodes.Text)):
            continue
        if isinstance(child, nodes.list_item | nodes.row):
            texts = [child] if isinstance(child, nodes.list_item) else child.children
            first, *others = [text.next_node(nodes.paragraph) for text in texts]
            yield from _beginning_of(first) if first else ()
            yield from (one.astext() for one in others if one and _is_code(one))
        else:
            yield from _explained_in(child)


def _is_code(paragraph: nodes.Element) -> bool:
    return all(isinstance(child, nodes.literal) for child in paragraph.children)


def _beginning_of(paragraph: nodes.Element) -> Iterator[str]:
    """Code, as in "`ttl`, `wait`: ..."; else the words before a colon, apart by semicolons."""
    rest = list(paragraph.children)
    codes = [*takewhile(lambda one: isinstance(one, nodes.literal) or one.astext() == ", ", rest)]
    if codes:
        yield from (" ".join(one.astext().split()) for one in codes[::2])
    else:
        yield from re.split(r":(?=\s|$)", paragraph.astext())[0].split("; ")


# --- llms.txt -----------------------------------------------------------------------------------


def _overview(app: Sphinx) -> str:
    lines = [f"# {app.config.project}", "", f"> {_first_sentence(app, 'index')}"]
    lines += ["", "All pages in one file: [llms-full.txt](llms-full.txt)"]
    for tree in app.env.get_doctree("index").findall(addnodes.toctree):
        lines += ["", f"## {tree['caption']}", ""]
        for page in _below(app, [page for _, page in tree["entries"]]):
            link = f"[{app.env.titles[page].astext()}]({page}.md)"
            lines.append(f"- {link}: {_first_sentence(app, page)}")
    return "\n".join(lines) + "\n"


def _in_order(app: Sphinx) -> list[str]:
    return ["index", *_below(app, app.env.toctree_includes["index"])]


def _below(app: Sphinx, pages: list[str]) -> Iterator[str]:
    for page in pages:
        yield page
        yield from _below(app, app.env.toctree_includes.get(page, []))


def _first_sentence(app: Sphinx, page: str) -> str:
    """The first sentence of a paragraph; what has one or two words is a label."""
    for paragraph in app.env.get_doctree(page).findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        for sentence in re.split(r"(?<=[.!?])\s", text):
            if isinstance(paragraph.parent, nodes.section) and len(sentence.split()) > 2:
                return sentence.rstrip(":")
    return app.env.titles[page].astext()


def _source_of(app: Sphinx, page: str) -> str:
    """The Markdown of a page. Of one that is made of docstrings, its text."""
    source = app.env.page_sources[page]
    if "auto" in source and "{eval-rst}" in source:
        parts = [f"## {title}\n\n{text}\n" for _, title, text, _ in _parts_of(app, page)]
        return "\n".join(parts).removeprefix("#")
    return re.sub(r"^```\{toctree\}\n.*?^```\n+", "", source, flags=re.MULTILINE | re.DOTALL)
