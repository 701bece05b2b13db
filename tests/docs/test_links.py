"""Links in README and docs lead somewhere, and the paths and tests they name exist."""

import re
from pathlib import Path

import pytest

from tests.support.fenced import PAGES, ROOT
from tests.support.reading_order import reading_order

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_CODE = re.compile(r"`([\w./-]+)`")
# The first part of a path from the repository's root.
_FOLDERS = ("benchmarks/", "configs/", "docs/", "examples/", "src/", "tests/")


def anchor(heading: str) -> str:
    """Return a heading's anchor as on GitHub: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if fragment:
            headings = _HEADING.findall(target.read_text(encoding="utf-8"))
            assert fragment in map(anchor, headings), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    for name in _CODE.findall(page.read_text(encoding="utf-8")):
        if name.startswith(_FOLDERS):
            assert (ROOT / name).exists(), name
        elif re.fullmatch(r"test_\w+\.py", name):
            assert list((ROOT / "tests").rglob(name)), name


def test_every_shipped_run_file_is_named() -> None:
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    said = text[text.index("These run files are also shipped") :].partition("\n\n")[0]
    assert {*_CODE.findall(said)} == {path.stem for path in (ROOT / "configs/runs").iterdir()} | {
        "configs/runs/"
    }


def test_every_module_of_the_map_exists() -> None:
    """Check docs/architecture.md: packages, contents of `parallel`, and the reading order."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src/gridformer"
    packages, parallel = (
        text[text.index(a) : text.index(b)]
        for a, b in (("| package |", "Inside `parallel`"), ("| module |", "## Reading one step"))
    )
    named = set(re.findall(r"^\| `(\w+)` \|", packages, re.MULTILINE))
    there = {path.stem for path in source.glob("[a-z]*") if path.suffix in ("", ".py")}
    assert named == there
    cells = re.findall(r"^\| (`[^|]*) \|", parallel, re.MULTILINE)
    mapped = {name.rstrip("/") for cell in cells for name in _CODE.findall(cell)}
    inside = source / "parallel"
    for name in mapped:
        assert (inside / name).exists(), name
    for path in inside.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            assert path.name in mapped, f"docs/architecture.md does not name parallel/{path.name}"
    order = reading_order()
    assert len(order.numbered) == 10
    steps = (name for names in order.numbered.values() for name in names)
    for name in [*order.helpers, *steps]:
        assert (source / name).exists(), name


def test_every_listed_seam_is_in_the_models() -> None:
    """Check the list of places where a scheme takes hold of a model."""
    text = (ROOT / "docs/reference/internals.md").read_text(encoding="utf-8")
    seams = text[text.index("## Seams") : text.index("## Tests")]
    files = (ROOT / "src/gridformer/models").rglob("*.py")
    models = "".join(path.read_text(encoding="utf-8") for path in files)
    names = [name for name in _CODE.findall(seams) if name.isidentifier()]
    assert len(names) > 8
    for name in names:
        assert re.search(rf"\b{name}\b", models), f"no {name} in gridformer.models"
