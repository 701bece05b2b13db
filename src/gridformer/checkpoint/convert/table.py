"""What a kind of model of Hugging Face is: tables of its tensors and of the keys of config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer.checkpoint.convert.config_json import ConfigKeys, head_keys, read_heads
from gridformer.config import Family, ModelConfig, Task

Shape = tuple[int, ...]


class Form(NamedTuple):
    """How one parameter of ours becomes one or more tensors of theirs, and back.

    Results are views where that is possible, so that a tensor of a mapped file is only read when
    it is written. Every form takes matrices and their biases.
    """

    ours: Callable[[Sequence[Tensor]], Tensor]
    theirs: Callable[[Tensor], Sequence[Tensor]]

    def shape_of_theirs(self, ours: Shape) -> Shape:
        """Returns the shape of each of their tensors, given that of ours."""
        return tuple(self.theirs(torch.empty(ours, device="meta"))[0].shape)


def _interleaved(n: int, d: int) -> Form:
    """Ours are the columns [head, product, d] of n products; theirs a torch.nn.Linear for each."""

    def ours(theirs: Sequence[Tensor]) -> Tensor:
        return torch.stack([one.t().unflatten(-1, (-1, d)) for one in theirs], -2).flatten(-3)

    def theirs(ours: Tensor) -> list[Tensor]:
        products = ours.unflatten(-1, (-1, n, d)).unbind(-2)
        return [product.flatten(-2).t() for product in products]

    return Form(ours, theirs)


def _side_by_side(n: int, d: int) -> Form:
    """As `_interleaved`, but theirs is one tensor with the columns [product, head, d]."""

    def swapped(x: Tensor, columns: tuple[int, int, int]) -> Tensor:
        return x.unflatten(-1, columns).transpose(-3, -2).flatten(-3)

    return Form(
        lambda theirs: swapped(theirs[0], (n, -1, d)), lambda ours: [swapped(ours, (-1, n, d))]
    )


# By the name in a table, given the width of a head. Our matrices are [in, out] and theirs are those
# of torch.nn.Linear, [out, in]; `reversed` has the outputs in the opposite order.
_FORMS: dict[str, Callable[[int], Form]] = {
    "same": lambda d: Form(lambda theirs: theirs[0], lambda ours: [ours]),
    "linear": lambda d: Form(lambda theirs: theirs[0].t(), lambda ours: [ours.t()]),
    "reversed": lambda d: Form(lambda x: x[0].flip(0).t(), lambda ours: [ours.t().flip(0)]),
    "qkv": partial(_interleaved, 3),
    "kv": partial(_interleaved, 2),
    "side_by_side": partial(_side_by_side, 3),
}
_CONDITIONS: dict[str, Callable[[ModelConfig], Any]] = {
    "": lambda model: True,
    "labels": lambda model: model.n_labels and not model.token_head,
    "untied": lambda model: model.token_head and not model.tied_head,
}


_SEVERAL = re.compile(r"^([^[]*)\[?([^]]*)\]?(.*)$")


class TableEntry(NamedTuple):
    """The names of their tensors that hold one parameter of ours, and how one becomes the other."""

    ours: str
    theirs: tuple[str, ...]
    form: Form


class Row(NamedTuple):
    """A row of a family's table, which stands for the entries of all layers.

    `#` in both names stands for the number of a layer, `*` for weight and bias, and `[q|k|v]` for
    several tensors. `.weight` is left out.
    """

    ours: str
    theirs: str
    form: Callable[[int], Form]
    when: Callable[[ModelConfig], Any]

    def named(self, name: str, layer: int = 0, leaf: str = "weight") -> tuple[str, ...]:
        """Returns what a name of the row is for a layer, and for weight or bias."""
        if not name.endswith((".*", ".bias", ".weight")):
            name = f"{name}.*"
        before, parts, after = _SEVERAL.findall(name.replace("#", str(layer)))[0]
        return tuple(f"{before}{part}{after}".replace("*", leaf) for part in parts.split("|"))


def rows(text: str) -> list[Row]:
    """Reads a table. Each line has our name, theirs, and the form, maybe with `if` and a condition.

    A condition is a key of ModelConfig, or `labels` or `untied`, which are what heads depend on.
    """
    table = []
    for line in text.strip().splitlines():
        ours, theirs, form, *when = line.replace(" if ", " ").split()
        (condition,) = when or [""]
        known = _CONDITIONS.get(condition) or attrgetter(condition)
        table.append(Row(ours, theirs, _FORMS[form], known))
    return table


NEEDED = object()  # the default of a key that every config.json has


class Key(NamedTuple):
    """A key of config.json."""

    theirs: str
    ours: str = ""  # the key of ModelConfig that it sets; none is set if it is empty
    default: Any = NEEDED  # of a file without it; a function of our keys so far also replaces 0
    written: Any = None  # by an export: a value, or a function of the model; None means our key

    def read(self, keys: ConfigKeys, read: Mapping[str, Any]) -> Any:
        """Returns the value in a config.json, given our keys that were read before."""
        if self.default is NEEDED:
            return keys.size(self.theirs)
        if callable(self.default):
            return keys.get(self.theirs, None) or self.default(read)
        return keys.get(self.theirs, self.default)

    def write(self, model: ModelConfig) -> Any:
        """Returns the value for a model."""
        if callable(self.written):
            return self.written(model)
        return getattr(model, self.ours) if self.written is None and self.ours else self.written


@dataclass(frozen=True)
class Kind:
    """One `model_type` of Hugging Face's config.json.

    Attributes:
        classes: What the names of its classes in transformers begin with.
        of_tokens: Returns the end of the name of the class with a head of tokens.
        rows: The table of its tensors.
        keys: The keys of its config.json, in the order in which they are written.
        fixed: Keys with the values that gridformer can represent, the usual one first.
        prefix: What the names of the bare model's tensors begin with when it has a head. Files of a
            bare model have the names without it.
        read: Returns further keys of our ModelConfig, given theirs, ours, and the tensors' names.
        unlike: Returns what a model of ours has that this kind has not, one phrase each.
        skipped: Patterns (regular expressions of whole names) of tensors that are not parameters.
        repeats: Tensors that repeat one of the table where the table does not have them, and which.
        otherwise: What to do about a tensor that differs from the one that it repeats.
        old_names: Replacements in names of older versions, or of classes with other heads.
        renamed: Returns the name that the class of a model has for a tensor of the table.
        hints: Additions to the message about another value of a fixed key.
    """

    model_type: str
    family: Family
    classes: str
    of_tokens: Callable[[ModelConfig], str]
    rows: Sequence[Row]
    keys: Sequence[Key]
    fixed: Mapping[str, tuple[Any, ...]]
    prefix: str
    read: Callable[[ConfigKeys, Mapping[str, Any], frozenset[str]], dict[str, Any]] = (
        lambda keys, read, names: {}
    )
    unlike: Callable[[ModelConfig], list[str]] = lambda model: []
    skipped: tuple[str, ...] = ()
    repeats: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    old_names: Mapping[str, str] = field(default_factory=dict)
    renamed: Callable[[ModelConfig, str], str] = lambda model, name: name
    hints: Mapping[str, str] = field(default_factory=dict)

    def entries(self, model: ModelConfig) -> list[TableEntry]:
        """Returns how each of a model's parameters is stored there.

        They come layer by layer where successive rows have layers.
        """
        entries = []
        present = [row for row in self.rows if row.when(model)]
        for stack, group in groupby(present, lambda row: row.ours.rpartition("#")[0]):
            of_layer, in_decoder = [*group], stack.startswith("decoder.")
            n_layers = (model.n_decoder_layers if in_decoder else model.n_layers) if stack else 1
            for i in range(n_layers):
                for row in of_layer:
                    form = row.form(model.head_width)
                    for leaf in ("weight", "bias") if row.ours.endswith("*") else ("weight",):
                        (ours,), theirs = (row.named(name, i, leaf) for name in row[:2])
                        entries.append(TableEntry(ours, theirs, form))
        return entries

    def read_config(self, keys: ConfigKeys, names: frozenset[str]) -> dict[str, Any]:
        """Returns the keys of our ModelConfig; what we do not have becomes `keys.problems`.

        The names of the stored tensors tell what heads there are.
        """
        for key, allowed in self.fixed.items():
            keys.only(key, allowed, self.hints.get(key, ""))
        read: dict[str, Any] = {}
        for one in self.keys:
            if one.ours:
                read[one.ours] = one.read(keys, read)
        (labels,) = (row for row in self.rows if row.ours.startswith("classifier.labels"))
        heads = read_heads(keys, names, labels.named(labels.theirs)[0])
        return read | self.read(keys, read, names) | heads

    def write_config(self, model: ModelConfig, task: Task = "auto") -> dict[str, Any] | list[str]:
        """Returns their config.json of a model that has learned a task, without `model_type`.

        A model that this kind cannot represent is a list of problems instead.
        """
        of_tokens = f"{self.classes}{self.of_tokens(model)}"
        return self.unlike(model) or {
            **head_keys(model, task, self.classes, of_tokens),
            **{key.theirs: key.write(model) for key in self.keys},
        }
