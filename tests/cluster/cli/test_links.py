"""Every relative link and anchor in the documentation resolves, also as a page of the site."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")),
    *sorted(ROOT.glob("bench/**/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(<?([^()\s>]+)>?\)")
FENCED, INDENTED, SPAN = (
    re.compile(r"^```.*?^```", re.M | re.S),
    re.compile(r"^(?: {4}|\t).*$", re.M),
    re.compile(r"`[^`]*`"),
)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links and images, without those on other hosts."""
    text = SPAN.sub("", INDENTED.sub("", FENCED.sub("", page.read_text())))
    yield from (target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST give the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.M)
    result: list[str] = []
    for title in titles:
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        repeated = sum(1 for other in result if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        result.append(f"{slug}-{repeated}" if repeated else slug)
    return set(result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_resolve(page: Path) -> None:
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.is_relative_to(ROOT) or not linked.exists():
            broken.append(f"{target}: there is no such file")
        elif anchor and (linked.suffix != ".md" or anchor not in anchors(linked)):
            broken.append(f"{target}: {linked.name} has no such heading")
    assert not broken


def test_the_first_page_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in links(index)}
    missing = [page for page in PAGES if page not in linked | {index} and "results" not in page.parts]
    assert not missing, "the site's contents are the links of docs/index.md; add these"


def test_links_are_found_and_a_broken_one_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = [
        "# One: `two` & three",
        "[a](b.md#c) `[no](x.md)`",
        "",
        "    [no](y.md)",
        "",
        "![p](p.png) [w](https://a/b)",
    ]
    page.write_text("\n".join([*lines, "# One", "# One", ""]))
    assert list(links(page)) == ["b.md#c", "p.png"]
    assert anchors(page) == {"one-two--three", "one", "one-1"}
    assert sum(len(list(links(each))) for each in PAGES) > 100
