"""The descriptions of config keys, their page, and the words of other libraries for them."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from docs.reference.keys import reference
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gridformer.config import RunConfig, parse_run, schemes
from gridformer.config.reading import EXAMPLES
from gridformer.config.synonyms import KEYS, NOTES, VALUES
from gridformer.utils.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"


def kinds_of(annotation: Any) -> Iterator[Any]:
    """Yield a type and all types that it is made of."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from kinds_of(part)


def keys_of(
    section: type[BaseModel], before: str = ""
) -> Iterator[tuple[str, FieldInfo, list[Any]]]:
    """Yield each dotted key of a section and of those in it, its field, and all its types."""
    for name, field in section.model_fields.items():
        kinds = [*kinds_of(field.annotation)]
        yield f"{before}{name}", field, kinds
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, f"{before}{name}.")


FIELDS = {key: field for key, field, _ in keys_of(RunConfig)}
ALL = {key: kinds for key, _, kinds in keys_of(RunConfig)}


def test_every_key_is_described_in_whole_sentences() -> None:
    assert len(FIELDS) > 120
    for key in FIELDS.keys() - {"model", "layout", "data", "train"}:
        text = FIELDS[key].description or ""
        assert text.endswith("."), key
        for sentence in re.split(r"(?<=\.)\s+", re.sub(r"\s*\([^)]*\)", "", text)):
            assert len(sentence.split()) > 2, f"{key}: {sentence}"


def test_the_page_is_what_is_described() -> None:
    """Made again by: python docs/reference/keys.py > docs/reference/config.md."""
    page = reference()
    assert PAGE.read_text(encoding="utf-8") == page
    for key in FIELDS:
        assert key.count(".") != 1 or f"| `{key}` | " in page
    assert "| `model.hidden_size` | whole number | required |" in page
    assert "| `train.dtype` | `float32`, " in page
    assert "| `train.lr` | number | `" in page
    assert "| | | |" not in page, "a key has a type that the page cannot name"


def test_every_word_stands_for_a_key_that_exists() -> None:
    for word, setting in KEYS.items():
        key, _, value = setting.partition("=")
        assert key in ALL, word
        assert word not in RunConfig.model_fields, word
        if value:
            parse_run({"model": "demo-4m", "data": {"path": "x"}}, [setting])
    assert NOTES.keys() <= {*KEYS.values()}


def test_no_word_is_a_key_itself() -> None:
    """Such a word may be a mistake in the section, not in the key."""
    assert not KEYS.keys() & {key.rpartition(".")[2] for key in ALL if key.count(".") == 1}


def test_every_value_can_be_chosen_somewhere() -> None:
    chosen = {
        word
        for kind in itertools.chain(*ALL.values())
        if get_origin(kind) is Literal
        for word in get_args(kind)
    }
    assert {*VALUES.values()} <= chosen | {*schemes()}


def test_every_section_list_and_mapping_has_an_example() -> None:
    def holds_more(kind: Any) -> bool:
        if get_origin(kind) in (tuple, list, dict):
            return True
        return isinstance(kind, type) and issubclass(kind, BaseModel)

    assert {key for key, kinds in ALL.items() if any(map(holds_more, kinds))} == {*EXAMPLES}


@pytest.mark.parametrize("key", EXAMPLES)
def test_examples_work(key: str) -> None:
    beside = ["data.sources=[{path: a, name: mine}]"] if "stages" in key else []
    network = {"family": "network", "factory": "a:b", "vocab_size": 9, "plan": {}}
    family = network if key == "model.plan" else {"family": "llama"}
    model = {"n_layers": 2, "hidden_size": 16, "n_heads": 2, **family}
    raw = {"model": model, "data": {} if "sources" in key or beside else {"path": "x"}}
    parse_run(raw, [*beside, EXAMPLES[key]])
    if key.rpartition(".")[2] in RunConfig.model_fields:
        with pytest.raises(ConfigError, match="such as"):
            parse_run(raw, [f"{key}=5"])
