"""The page with all keys of a run file is made of their descriptions."""

from __future__ import annotations

from pathlib import Path

from gridformer.config.reference import reference
from gridformer.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"


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
