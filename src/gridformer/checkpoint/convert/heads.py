"""Heads of fine-tuning: their tensors in transformers, the classes that have them, and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.forms import SAME, TRANSPOSED
from gridformer.checkpoint.convert.table import TableEntry
from gridformer.config import FINE_TUNING, TASKS, ModelConfig, Task

_CHOICE = "ForMultipleChoice"
# The key of a config.json that says what an exported model with a head of tokens has learned.
_TASK = "gridformer_task"


def head_entries(
    config: ModelConfig, labels: Mapping[str, str], bias: bool = True
) -> list[TableEntry]:
    """Returns the entries of the heads of fine-tuning that a model has.

    Args:
        config: The model.
        labels: The products of the classification head, ours and theirs.
        bias: Whether these have biases.
    """
    products: list[tuple[str, str, bool]] = []
    if config.n_labels and not config.token_head:
        products += [(ours, theirs, bias) for ours, theirs in labels.items()]
    if config.span_head:
        products.append(("span.ends", "qa_outputs", True))
    found = []
    for ours, theirs, biased in products:
        found.append(TableEntry(f"{ours}.weight", (f"{theirs}.weight",), TRANSPOSED))
        if biased:
            found.append(TableEntry(f"{ours}.bias", (f"{theirs}.bias",), SAME))
    return found


def read_heads(keys: ConfigKeys, names: frozenset[str], label_weight: str) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for heads of fine-tuning, derived from their tensors.

    Args:
        keys: Their config.json.
        names: The names of their tensors.
        label_weight: The name of the weight that computes the logits of labels.
    """
    if "qa_outputs.weight" in names:
        return {"token_head": False, "span_head": True}
    if label_weight in names:
        kinds = (None, "single_label_classification", "regression")
        kind = keys.only("problem_type", kinds, None)
        # A class for choices has one logit for each of them, whatever its config says.
        n_labels = 1 if _of_choices(keys.values) else len(keys.get("id2label", None) or (0, 1))
        if kind == "regression" and n_labels != 1:
            keys.problems.append(
                f"problem_type=regression of {n_labels} numbers: gridformer has only 1"
            )
        return {"token_head": False, "n_labels": n_labels}
    return {}


def task_of(model: ModelConfig, values: Mapping[str, Any]) -> Task:
    """Returns the task that an imported model has learned; auto if nothing says it.

    It is the task of fine-tuning whose head it has. A head of tokens has the one that an export has
    written.

    Args:
        model: The model.
        values: The content of its config.json.
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


def head_problem(config: ModelConfig, task: Task) -> str:
    """Returns why no class of transformers has the heads of a model, or an empty text.

    Args:
        config: The model.
        task: The task that it has learned.
    """
    if config.n_labels and (config.token_head or config.span_head):
        return f"n_labels={config.n_labels}: no class of transformers has it beside another head"
    # GPT2DoubleHeadsModel also has a head of tokens, and no Auto class opens it.
    if task == "choice" and config.family != "bert":
        return (
            f"family={config.family}: transformers has no class of it for data.task=choice, only "
            f"Bert{_CHOICE} for bert; `gridformer evaluate` measures the run as it is"
        )
    return ""


def head_keys(config: ModelConfig, task: Task, name: str, of_tokens: str) -> dict[str, Any]:
    """Returns the keys of their config.json that tell the class of a model and its labels.

    Args:
        config: The model.
        task: The task that it has learned.
        name: What the names of their classes begin with, such as `Bert`.
        of_tokens: The name of the class with a head of tokens.
    """
    if config.token_head:
        usual = task in ("auto", token_tasks(config)[0]) or not config.two_stacks
        return {"architectures": [of_tokens]} | ({} if usual else {_TASK: task})
    if config.span_head:
        return {"architectures": [f"{name}ForQuestionAnswering"]}
    if task == "choice":
        return {"architectures": [f"{name}{_CHOICE}"]}
    kind = "regression" if task == "regression" else "single_label_classification"
    return {
        "architectures": [f"{name}ForSequenceClassification"],
        "problem_type": kind,
        **label_keys(config.n_labels),
    }


def label_keys(n_labels: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys of their config.json that name labels.

    Args:
        n_labels: The number of labels.
        names: What the first of them are called. The others have the names that they have there by
            default.
    """
    labels = [*names[:n_labels], *map(_default_label, range(len(names), n_labels))]
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def config_label_names(values: Mapping[str, Any]) -> list[str]:
    """Returns the names of labels in their config.json; none if they are those of transformers."""
    found = values.get("id2label")
    if not isinstance(found, Mapping):
        return []
    names = [found.get(str(i)) for i in range(len(found))]
    told = [name for name in names if isinstance(name, str)]
    default = [_default_label(i) for i in range(len(names))]
    return told if told == names and told != default else []


def _default_label(number: int) -> str:
    return f"LABEL_{number}"


def _of_choices(values: Mapping[str, Any]) -> bool:
    classes = values.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith(_CHOICE) for name in classes)
