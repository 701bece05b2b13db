"""The pages of the site: navigation, what is public, symptoms, and the words of other libraries.

`make docs` runs these tests and those of links and commands before it builds the site.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from gridformer.config import RunConfig
from gridformer.config.synonyms import KEYS, plain
from tests.support.fenced import PAGES, ROOT, fences

DOCS = ROOT / "docs"
SITE = [page for page in PAGES if page.is_relative_to(DOCS)]
API = (DOCS / "reference/api.md").read_text(encoding="utf-8")
_CODE = re.compile(r"`([^`]+)`")


def rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of all tables of a page."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def leaves(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(one)


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(DOCS)) for page in SITE]
    assert sorted(leaves(site["nav"])) == sorted(pages)


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_stay_in_docs(page: Path) -> None:
    """The site has no other files; name those of the repository as code, without a link."""
    for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://")):
            assert (page.parent / link).resolve().is_relative_to(DOCS), link


PUBLIC = {name for name in _CODE.findall(API) if re.fullmatch(r"gridformer(\.\w+)+", name)}
SHOWN = re.findall(r"^::: (\S+)$", API, re.MULTILINE)


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_public_and_described(name: str) -> None:
    assert name in PUBLIC
    assert (resolve_name(name).__doc__ or "").strip()


def imported(source: str) -> set[str]:
    """Return the names that Python imports from gridformer."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gridformer"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names if one.name.startswith("gridformer.")}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {f"gridformer.{node.attr}"} if node.value.id == "gridformer" else set()
    return names


def test_examples_import_only_what_is_public() -> None:
    """`own_scheme.py` stands for what schemes may import."""
    blocks = {page: [f.text for f in fences(page) if f.language == "python"] for page in PAGES}
    scripts = [path for path in (ROOT / "examples").glob("*.py") if path.stem != "own_scheme"]
    blocks |= {path: [path.read_text(encoding="utf-8")] for path in scripts}
    for path, texts in blocks.items():
        for name in set().union(*map(imported, texts)):
            assert any(f"{name}.".startswith(f"{one}.") for one in PUBLIC), f"{path}: {name}"


def keys(section: type = RunConfig, before: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():  # type: ignore[attr-defined]
        yield before + name
        if not before and hasattr(field.annotation, "model_fields"):
            yield from keys(field.annotation, f"{name}.")


def test_keys_of_other_libraries_are_those_that_errors_suggest() -> None:
    known, compared = set(keys()), 0
    for theirs, ours, *_ in rows("how-to/coming-from.md"):
        named = _CODE.findall(ours)
        assert known.issuperset(named), ours
        for word in _CODE.findall(theirs):
            if suggested := KEYS.get(plain(word.lstrip("-"))):
                compared += 1
                assert suggested.partition("=")[0] in named, theirs
    assert compared > 20


def said() -> str:
    """Return all texts of gridformer's code, with ... for the values in them."""
    texts = []
    for path in (ROOT / "src/gridformer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_symptoms_are_words_of_gridformer() -> None:
    """Those of another program are listed here."""
    others = {"gridformer: command not found", "too many open files", "pytorch_model.bin"}
    texts, compared = said(), 0
    for symptom, *_ in rows("how-to/troubleshooting.md"):
        for words in set(_CODE.findall(symptom)) - others:
            compared += 1
            assert words in texts, words
    assert compared > 20


def test_every_shipped_model_is_named() -> None:
    named = set(_CODE.findall((DOCS / "models.md").read_text(encoding="utf-8")))
    assert named >= {path.stem for path in (ROOT / "configs/models").iterdir()}
