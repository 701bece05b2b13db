"""The descriptions of config keys, which are all the help that a run file has, and their page."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

from pydantic import BaseModel

import gridformer.config
from gridformer.config import SCHEMES, LayoutConfig, RunConfig
from gridformer.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
SECTIONS = ("model", "layout", "data", "train")


def descriptions() -> dict[str, str]:
    """Return the texts of all keys by `Section.key`, without those of sections themselves."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(gridformer.config.__path__):
        for value in vars(importlib.import_module(f"gridformer.config.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, BaseModel):
                for key, field in value.model_fields.items():
                    found[f"{value.__name__}.{key}"] = field.description or ""
    return {key: text for key, text in found.items() if key[10:] not in SECTIONS}


def test_every_key_is_described_in_whole_sentences() -> None:
    found = descriptions()
    assert len(found) > 120
    for key, text in found.items():
        assert text.endswith("."), key
        for sentence in re.split(r"(?<=\.)\s+", re.sub(r"\s*\([^)]*\)", "", text)):
            assert len(sentence.split()) > 2, f"{key}: {sentence}"


def test_the_description_of_schemes_names_them_all() -> None:
    text = LayoutConfig.model_fields["scheme"].description or ""
    assert [name for name in SCHEMES if not re.search(rf"\b{name}\b", text)] == []


def test_the_page_is_what_is_described() -> None:
    """Made again by: python -m gridformer.config.reference > docs/reference/config.md."""
    page = reference()
    assert PAGE.read_text(encoding="utf-8") == page
    for section in SECTIONS:
        kind = RunConfig.model_fields[section].annotation
        assert kind is not None
        for key in kind.model_fields:
            assert f"| `{section}.{key}` | " in page
    assert "| `model.hidden_size` | whole number | required |" in page
    assert "| `train.dtype` | `float32`, " in page
    assert "| `train.lr` | number | `" in page
    assert "| | | |" not in page, "a key has a type that the page cannot name"
