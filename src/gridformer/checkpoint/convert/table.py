"""The table of a family: our parameters, their tensors, and how one becomes the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.forms import SAME, Form
from gridformer.config import Family, ModelConfig, Task


@dataclass(frozen=True)
class TableEntry:
    """One line of a table.

    Attributes:
        ours: The name of our parameter.
        theirs: The names of their tensors that hold it.
        form: How one becomes the other.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


class WriteConfig(Protocol):
    """Returns a config.json; see Kind."""

    def __call__(
        self, config: ModelConfig, task: Task = "auto", /
    ) -> dict[str, Any] | list[str]: ...


@dataclass(frozen=True)
class Kind:
    """One `model_type` of Hugging Face's config.json.

    Attributes:
        model_type: The value of that key.
        family: Our family.
        entries: The table of a model of ours.
        read_config: Returns the keys of our ModelConfig, given theirs and the names of the tensors.
        write_config: Returns their config.json of a model of ours that has learned a task, without
            what every kind has. A model that this kind cannot represent is a list of problems
            instead.
        prefix: What the names of the bare model's tensors begin with when it has a head. Files of a
            bare model have the names without it.
        skipped: Patterns (regular expressions of whole names) of tensors that are not parameters.
        repeats: Tensors that repeat one of the table where the table does not have them, and which.
            One that differs from it would be lost.
        otherwise: What to do about a tensor that differs from the one that it repeats.
        old_names: Replacements in names that older versions, or classes with other heads, have
            written.
        written: Returns the name that the class of a model has for a tensor of the table.
    """

    model_type: str
    family: Family
    entries: Callable[[ModelConfig], list[TableEntry]]
    read_config: Callable[[ConfigKeys, frozenset[str]], dict[str, Any]]
    write_config: WriteConfig
    prefix: str
    skipped: tuple[str, ...] = ()
    repeats: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    old_names: Mapping[str, str] = field(default_factory=dict)
    written: Callable[[ModelConfig, str], str] = lambda model, name: name


def to_ours(entries: list[TableEntry], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns our parameters, given all tensors of a model of Hugging Face by name."""
    return {
        entry.ours: entry.form.ours([theirs[name] for name in entry.theirs], slice(None))
        for entry in entries
    }


def to_theirs(entries: list[TableEntry], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a model of Hugging Face, given all of our parameters by name."""
    found = {}
    for entry in entries:
        whole = ours[entry.ours]
        n_rows = entry.form.shape_of_theirs(tuple(whole.shape))[0]
        for part, name in enumerate(entry.theirs):
            found[name] = entry.form.theirs(whole, part, slice(0, n_rows))
    return found
