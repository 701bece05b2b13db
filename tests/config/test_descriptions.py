"""The descriptions of config keys, which are all the help that a run file has."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import gridformer.config
from gridformer.config import SCHEMES, LayoutConfig, RunConfig
from gridformer.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
# What a sentence may begin with in lower case: a value, a kind of model, or a key beside this one.
_VALUE = re.compile(
    r"^(true|false|auto|none|windows|documents|optimizer|bfloat16|in_backward|t5|"
    r"transformer|wandb)\b"
)
# Auxiliary verbs, and those of sentences that have none of these.
_VERB = re.compile(
    r"\b(is|are|has|have|can|may|must|means|does|do|needs|adds|keeps|kept|takes|uses|lets|gets|"
    r"goes|go|ends|end|shards|smooths|zeroes|leaves|rounds|determines|depend|decays?|rises|falls|"
    r"begins?|reads?|learns|process|state|copies|compiles|divides|grow|normalizes|holds|consists|"
    r"multiplies|attends|turns|call|name|translates|looks|share|sends|belong|runs?|cast|"
    r"predicts|refuses|says|searches|interleaves|communicates|had|derive|keep|updates|mean|sets|lower|decide)\b"
)


def fields() -> dict[str, FieldInfo]:
    """Return all keys by `Section.key`, without the sections themselves."""
    found: dict[str, FieldInfo] = {}
    for module in pkgutil.iter_modules(gridformer.config.__path__):
        for value in vars(importlib.import_module(f"gridformer.config.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, BaseModel):
                found |= {f"{value.__name__}.{key}": one for key, one in value.model_fields.items()}
    sections = ("RunConfig.model", "RunConfig.data", "RunConfig.layout", "RunConfig.train")
    return {key: one for key, one in found.items() if key not in sections}


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, without what is in brackets."""
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9a-z])", re.sub(r"\s*\([^)]*\)", "", text))


def problem(text: str | None) -> str:
    """Return what keeps a description from being whole sentences; empty if nothing does."""
    if not text or not text.endswith("."):
        return "it does not end with a period"
    for sentence in sentences(text):
        if not (sentence[0].isupper() or sentence[0].isdigit() or _VALUE.match(sentence)):
            return f"{sentence!r} begins with neither a capital nor a value"
        if len(sentence.split()) < 3 or not _VERB.search(sentence):
            return f"{sentence!r} has no verb, or the verb is new: see _VERB"
    return "it says 'so many'" if "so many" in text else ""


def test_every_key_is_described_in_whole_sentences() -> None:
    found = fields()
    assert len(found) > 120
    assert {key: said for key, one in found.items() if (said := problem(one.description))} == {}


@pytest.mark.parametrize(
    "text",
    [
        None,
        "Number of layers.",
        "the model has this number of layers.",
        "The model has this number of layers",
        "The model has this number of layers. Default: 4.",
        "A pass takes so many tokens.",
    ],
)
def test_fragments_are_found(text: str | None) -> None:
    assert problem(text)


def test_the_description_of_schemes_names_them_all() -> None:
    text = LayoutConfig.model_fields["scheme"].description or ""
    assert [name for name in SCHEMES if not re.search(rf"\b{name}\b", text)] == []


def test_the_page_is_what_is_described() -> None:
    """Made again by: python -m gridformer.config.reference > docs/reference/config.md."""
    page = reference()
    assert PAGE.read_text(encoding="utf-8") == page
    for section in ("model", "data", "layout", "train"):
        kind = RunConfig.model_fields[section].annotation
        assert kind is not None
        for key in kind.model_fields:
            assert f"| `{section}.{key}` | " in page
    assert "| `model.hidden_size` | whole number | required |" in page
    assert "| `train.dtype` | `float32`, " in page
    assert "| `train.lr` | number | `" in page
    assert "| | | |" not in page, "a key has a type that the page cannot name"
