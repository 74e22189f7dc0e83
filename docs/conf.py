"""Builds the site from the Markdown of the repository: `make docs`. Pages read the same on a code host."""

import re
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ROOT = Path(__file__).parents[1]
PAGES = {"docs", "bench", "recipes", "README.md", "CONTRIBUTING.md"}

project = "multihop"
copyright = "the authors of multihop, Apache-2.0"
version = release = version_of("multihop")

extensions = ["myst_parser"]
# The source directory is the repository, so that links between its folders are links between pages.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "bench/**README.md", "recipes/README.md", "README.md", "CONTRIBUTING.md"]
exclude_patterns = [entry.name for entry in ROOT.iterdir() if entry.name not in PAGES]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # the anchors that a code host gives headings
highlight_language = "text"

html_theme = "furo"
html_title = "multihop"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_extra_path = ["site/root"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1c5d99", "color-brand-content": "#1c5d99"},
    "dark_css_variables": {"color-brand-primary": "#7db8ec", "color-brand-content": "#7db8ec"},
}

_LONGEST_LINE = 140

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//|@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//""",
    re.IGNORECASE,
)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """The lists of links on the first page are the site's contents; reports are reached from the results alone."""
    if page == root_doc:
        for title, links in re.findall(r"^## (.*)\n\n((?:- \[.*\n)+)", source[0], re.MULTILINE):
            entries = re.findall(r"\[(?:… )?(.)(.*)\]\((.*?)\.md\)", links)
            pages = [f"{first.upper()}{rest.removesuffix('?')} <{path}>" for first, rest, path in entries]
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
    elif page.startswith("docs/results/"):
        source[0] = "---\norphan: true\n---\n" + source[0]


def _wrap_long_lines(app: Sphinx, page: nodes.document) -> None:
    """Blocks of code keep their columns and scroll, but a message of a whole sentence would scroll for screens."""
    for block in page.findall(nodes.literal_block):
        if max(map(len, block.astext().splitlines()), default=0) > _LONGEST_LINE:
            block["classes"].append("wrapped")


def _refuse_foreign_resources(app: Sphinx, exception: Exception | None) -> None:
    """A reader's browser loads nothing from other hosts: no fonts, no scripts, no pictures."""
    if exception is not None:
        return
    for path in (*Path(app.outdir).rglob("*.html"), *Path(app.outdir).rglob("*.css")):
        if found := _LOADED.search(path.read_text()):
            raise SphinxError(f"{path} loads from another host: {found[0]}")


def setup(app: Sphinx) -> None:
    """Make the contents, and check the pages after they are written."""
    app.connect("source-read", _add_contents)
    app.connect("doctree-read", _wrap_long_lines)
    app.connect("build-finished", _refuse_foreign_resources)
