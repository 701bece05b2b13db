"""What a kind of model of Hugging Face is: tables of its tensors and of the keys of config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gridformer.config import FINE_TUNING, TASKS, Family, ModelConfig, Task, any_of
from gridformer.utils.units import format_value

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
    "experts": lambda d: Form(
        lambda theirs: torch.stack([one.t() for one in theirs]),
        lambda ours: [one.t() for one in ours.unbind()],
    ),
}
_CONDITIONS: dict[str, Callable[[ModelConfig], Any]] = {
    "": lambda model: True,
    "labels": lambda model: model.n_labels and not model.token_head,
    "untied": lambda model: model.token_head and not model.tied_head,
}


_IN_MIXTURE = re.compile(r"\.mlp\.(router|experts|shared)\b")
_SEVERAL = re.compile(r"^([^[]*)\[?([^]]*)\]?(.*)$")


class TableEntry(NamedTuple):
    """The names of their tensors that hold one parameter of ours, and how one becomes the other."""

    ours: str
    theirs: tuple[str, ...]
    form: Form


class Row(NamedTuple):
    """A row of a family's table, which stands for the entries of all layers.

    `#` in both names stands for the number of a layer, `*` for weight and bias, and `[q|k|v]` for
    several tensors, as `@` for the numbers of experts. `.weight` is left out.
    """

    ours: str
    theirs: str
    form: Callable[[int], Form]
    when: Callable[[ModelConfig], Any]

    def named(
        self, name: str, layer: int = 0, leaf: str = "weight", n_experts: int = 0
    ) -> tuple[str, ...]:
        """Returns what a name of the row is for a layer, and for weight or bias."""
        name = name.replace("@", f"[{'|'.join(map(str, range(n_experts)))}]")
        if not name.endswith((".*", ".bias", "correction_bias", ".weight")):
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


# ------------------------------------------------------------------ config.json

# Keys that change what a model computes wherever they occur, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "cross_attention_hidden_size": (None,),
}
# The types of values that are no numbers.
_TYPES: dict[str, tuple[type, str]] = {
    "layer_types": (list, "a list"),
    "id2label": (dict, "a mapping"),
    "rope_parameters": (dict, "a mapping"),
    "rope_scaling": (dict, "a mapping"),
}
_CHOICE = "ForMultipleChoice"
# The key that says what an exported model with a head of tokens has learned.
_TASK = "gridformer_task"
NEEDED = object()  # the default of a key that every config.json has


class ConfigKeys:
    """The keys of a config.json, and as `problems` what gridformer cannot represent.

    A key that is absent has the default of its class in transformers, since that library writes
    only what differs from it.
    """

    def __init__(self, values: Mapping[str, Any], has_experts: bool = False) -> None:
        if has_experts:  # newer versions of transformers write the second name
            values = {"num_experts": values.get("num_local_experts"), **values}
        self.values = values
        self.problems: list[str] = []
        for key, neutral in _NEUTRAL.items():
            if not (has_experts and key.endswith("experts")):
                self.only(key, neutral)

    def get(self, key: str, default: Any) -> Any:
        """Returns a value, or the default if it is absent. Another type is a problem."""
        value = self.values.get(key, default)
        wanted, name = _TYPES.get(key, ((int, float), "a number"))
        if value is None or isinstance(value, wanted):
            return value
        self.problems.append(f"{key}={value} is not {name}")
        return default

    def size(self, key: str) -> Any:
        """Returns a value that every config.json has."""
        if self.values.get(key) is None:
            self.problems.append(f"{key} is missing")
            return 1
        return self.get(key, 1)

    def only(self, key: str, allowed: tuple[Any, ...], hint: str = "") -> Any:
        """Returns a value, which must be one of those allowed; the first is also the default."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            told, *known = (
                str(one).lower() if isinstance(one, bool) else one
                for one in (value, *(one for one in allowed if one is not None))
            )
            words = any_of(known or ["null"])
            self.problems.append(f"{key}={told}{hint}: gridformer has only {words}")
        return value


def read_heads(keys: ConfigKeys, names: frozenset[str], label_weight: str) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for heads of fine-tuning, given the tensors' names.

    `label_weight` is the name of the weight that computes the logits of labels.
    """
    if "qa_outputs.weight" in names:
        return {"token_head": False, "span_head": True}
    if label_weight not in names:
        return {}
    kind = keys.only("problem_type", (None, "single_label_classification", "regression"))
    # A class for choices has one logit for each of them, whatever its config says.
    n_labels = 1 if _of_choices(keys.values) else len(keys.get("id2label", None) or (0, 1))
    if kind == "regression" and n_labels != 1:
        keys.problems.append(
            f"problem_type=regression of {n_labels} numbers: gridformer has only 1"
        )
    return {"token_head": False, "n_labels": n_labels}


def task_of(model: ModelConfig, values: Mapping[str, Any]) -> Task:
    """Returns the task that a model with this config.json has learned; auto if nothing says it.

    A head of fine-tuning says it, and for a head of tokens the key that an export has written.
    """
    if model.token_head:
        return next((task for task in token_tasks(model) if task == values.get(_TASK)), "auto")
    if model.span_head:
        return "answer"
    if model.n_labels == 1:
        return "choice" if _of_choices(values) else "regression"
    return "classify"


def token_tasks(model: ModelConfig) -> list[Task]:
    """Returns the tasks of a model with a head of tokens, the usual one first."""
    return [task for task in TASKS[model.family] if task not in FINE_TUNING]


def head_problem(model: ModelConfig, task: Task) -> str:
    """Returns why no class of transformers has the heads of a model, or an empty text."""
    if model.n_labels and (model.token_head or model.span_head):
        return f"n_labels={model.n_labels}: no class of transformers has it beside another head"
    # GPT2DoubleHeadsModel also has a head of tokens, and no Auto class opens it.
    if task == "choice" and model.family != "bert":
        return (
            f"family={model.family}: transformers has no class of it for data.task=choice, only "
            f"Bert{_CHOICE} for bert; `gridformer evaluate` measures the run as it is"
        )
    return ""


def head_keys(model: ModelConfig, task: Task, classes: str, of_tokens: str) -> dict[str, Any]:
    """Returns the keys that tell the class of a model that has learned a task, and its labels.

    The names of classes begin with `classes`; `of_tokens` is the one with a head of tokens.
    """
    if model.token_head:
        usual = task in ("auto", token_tasks(model)[0]) or not model.two_stacks
        return {"architectures": [of_tokens]} | ({} if usual else {_TASK: task})
    if model.span_head:
        return {"architectures": [f"{classes}ForQuestionAnswering"]}
    if task == "choice":
        return {"architectures": [f"{classes}{_CHOICE}"]}
    return {
        "architectures": [f"{classes}ForSequenceClassification"],
        "problem_type": "regression" if task == "regression" else "single_label_classification",
        **label_keys(model.n_labels),
    }


def label_keys(n_labels: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys that name labels; those without a name have the default of transformers."""
    labels = [*names[:n_labels], *_default_labels(n_labels)[len(names) :]]
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def config_label_names(values: Mapping[str, Any]) -> list[str]:
    """Returns the names of labels in a config.json; none if they are those of transformers."""
    labels = values.get("id2label")
    if not isinstance(labels, Mapping):
        return []
    names = [labels.get(str(i)) for i in range(len(labels))]
    told = [name for name in names if isinstance(name, str)]
    return told if told == names and told != _default_labels(len(names)) else []


def _default_labels(n: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(n)]


def _of_choices(values: Mapping[str, Any]) -> bool:
    classes = values.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith(_CHOICE) for name in classes)


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
    """One `model_type` of Hugging Face's config.json."""

    model_type: str
    family: Family
    classes: str  # what the names of its classes in transformers begin with
    of_tokens: Callable[[ModelConfig], str]  # the end of the name of the class with that head
    rows: Sequence[Row]
    keys: Sequence[Key]  # in the order in which they are written
    fixed: Mapping[str, tuple[Any, ...]]  # keys with the values that we have, the usual one first
    # What tensors' names begin with in a model with a head. Files of a bare model leave it out.
    prefix: str
    # Returns further keys of our ModelConfig, given theirs, ours, and the tensors' names.
    read: Callable[[ConfigKeys, Mapping[str, Any], frozenset[str]], dict[str, Any]] = (
        lambda keys, read, names: {}
    )
    always: Mapping[str, Any] = field(default_factory=dict)  # keys of all its ModelConfigs
    has_experts: bool = False
    # How wide heads may be: they fill hidden_size, or it is a multiple of their number at least.
    heads: Literal["any", "divide", "fill"] = "any"
    skipped: tuple[str, ...] = ()  # regular expressions of tensors that are not parameters
    # Tensors that repeat one of the table where the table does not have them, and which; and what
    # to do about one that differs from it.
    repeats: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    # Replacements in names of older versions, or of classes with other heads.
    old_names: Mapping[str, str] = field(default_factory=dict)
    # Returns the name that the class of a model has for a tensor of the table.
    renamed: Callable[[ModelConfig, str], str] = lambda model, name: name
    hints: Mapping[str, str] = field(default_factory=dict)  # about other values of fixed keys

    def entries(self, model: ModelConfig) -> list[TableEntry]:
        """Returns how a model's parameters are stored: layer by layer where rows have layers."""
        entries = []
        present = [row for row in self.rows if row.when(model)]
        for stack, group in groupby(present, lambda row: row.ours.rpartition("#")[0]):
            of_layer, in_decoder = [*group], stack.startswith("decoder.")
            n_layers = (model.n_decoder_layers if in_decoder else model.n_layers) if stack else 1
            for i in range(n_layers):
                for row in of_layer:
                    mixture = bool(model.n_experts) and i >= model.dense_layers
                    if ".mlp." in row.ours and mixture != bool(_IN_MIXTURE.search(row.ours)):
                        continue
                    form = row.form(model.head_width)
                    for leaf in ("weight", "bias") if row.ours.endswith("*") else ("weight",):
                        (ours,), theirs = (
                            row.named(name, i, leaf, model.n_experts) for name in row[:2]
                        )
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

    def unlike(self, model: ModelConfig) -> list[str]:
        """Returns what a model of ours has that this kind has not, one phrase each."""
        problems = [
            f"{key}={format_value(getattr(model, key))}: a {self.model_type} has "
            f"{key}={format_value(value)}"
            for key, value in self.always.items()
            if getattr(model, key) != value
        ]
        if bool(model.n_experts) != self.has_experts:
            has = "experts" if self.has_experts else "none"
            problems.append(f"n_experts={model.n_experts}: a {self.model_type} has {has}")
        sized = any(key.ours == "expert_size" for key in self.keys)
        if self.has_experts and not sized and model.expert_size != model.ffn_size:
            wanted = f"in a {self.model_type} it is ffn_size={model.ffn_size}"
            problems.append(f"expert_size={model.expert_size}: {wanted}")
        h, n = model.hidden_size, model.n_heads
        if self.heads == "fill" and model.head_width * n != h:
            wanted = f"in transformers it is hidden_size / n_heads, {h // n}"
            problems.append(f"head_dim={model.head_dim}: {wanted}")
        if self.heads == "divide" and h % n:
            problems.append(f"hidden_size={h}: transformers wants a multiple of n_heads={n}")
        return problems

    def write_config(self, model: ModelConfig, task: Task = "auto") -> dict[str, Any] | list[str]:
        """Returns their config.json of a model that has learned a task, without `model_type`.

        A model that this kind cannot represent is a list of problems instead.
        """
        of_tokens = f"{self.classes}{self.of_tokens(model)}"
        return self.unlike(model) or {
            **head_keys(model, task, self.classes, of_tokens),
            **{key.theirs: key.write(model) for key in self.keys},
        }
