"""How Sphinx makes the site of these pages: `make docs`. It needs no network and no server."""

from __future__ import annotations

import logging
import re
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings

import django_redislock

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
# Pages whose text is beside docs/, where those who host the repository look for it.
ABOVE = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "code-of-conduct": "CODE_OF_CONDUCT.md",
    "contributing": "CONTRIBUTING.md",
    "security-policy": "SECURITY.md",
}
config = ConfigParser(interpolation=None)
config.read(HERE.parent / "setup.cfg", encoding="utf-8")
REPOSITORY = config.get("metadata", "url", fallback="")
sys.path.append(str(HERE))

# Some of the documented modules have models.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django_redislock",
    ],
    REDISLOCK={"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}},
)
django.setup()

project = "django-redislock"
release = version = django_redislock.__version__
language = "en"
smartquotes = False  # Quotes are often those of code.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "diagrams", "site_texts"]
exclude_patterns = ["benchmarks", "monitoring", "screenshots"]

# The pages read the same on GitHub: links to headings are those that it makes.
myst_heading_anchors = 4
myst_enable_extensions = ["tasklist"]

# A section may have no page yet; the name toc.empty_glob does not suppress that in Sphinx 9.0.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda one: "glob" not in one.msg)

autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_use_ivar = True
napoleon_custom_sections = [("Its keys", "params_style")]
maximum_signature_line_length = 80
default_role = "literal"
# Names of other libraries are not looked up, since that needs a network.
nitpicky = True
# What is another project's, or private, has no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(?!django_redislock).*"),
    ("py:class", r".*\._\w+"),
    ("py:class", r".*\.(Decorator|Deferral|Fact|JobArguments)"),  # Signatures show what they are.
]

html_theme = "furo"
html_static_path = ["_static"]
html_js_files = ["search.js"]
html_css_files = ["site.css"]
html_title = f"django-redislock {release}"
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    app.connect("source-read", _keep_within)
    app.connect("autodoc-process-docstring", _keep_together, priority=400)  # Before napoleon.


def _keep_within(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links that lead out of docs/ lead to a page, else into the repository, else nowhere."""
    if page in ABOVE:
        file = HERE.parent / ABOVE[page]
        app.env.note_dependency(str(file), docname=page)
        text = re.sub(r"\]\((?![a-z]+:|#)", "](../", file.read_text(encoding="utf-8"))
        trees = re.findall(r"^```\{toctree\}\n.*?^```\n", source[0], re.MULTILINE | re.DOTALL)
        source[0] = "\n".join([text.replace("](../docs/", "]("), *trees])
    up = "../" * (page.count("/") + 1)
    pages = {file: f"{up[3:]}{name}.md" for name, file in ABOVE.items()}

    def within(link: re.Match[str]) -> str:
        text, path = link.groups()
        file, hash_, anchor = path.partition("#")
        if file in pages:
            return f"[{text}]({pages[file]}{hash_}{anchor})"
        return f"[{text}]({REPOSITORY}/blob/HEAD/{path})" if REPOSITORY else text

    source[0] = re.sub(rf"\[([^]]*)\]\({re.escape(up)}([^)]+)\)", within, source[0])


def _keep_together(*event: Any) -> None:
    """Keep napoleon from taking what is before a colon in a property's docstring for its type."""
    _app, what, _name, _object, _options, lines = event
    if what in {"attribute", "data", "property"}:
        lines.insert(0, r"\ ")
