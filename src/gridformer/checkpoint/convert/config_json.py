"""Hugging Face's config.json: its keys, and what they say of heads, labels and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gridformer.config import FINE_TUNING, TASKS, ModelConfig, Task
from gridformer.config.base import any_of

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


class ConfigKeys:
    """The keys of a config.json, and as `problems` what gridformer cannot represent.

    A key that is absent has the default of its class in transformers, since that library writes
    only what differs from it.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        for key, neutral in _NEUTRAL.items():
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
        """Returns a value, which must be one of those allowed; the first is also that of no value.

        `hint` is added to the problem if it is another.
        """
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            known = [one for one in allowed if one is not None] or ["null"]
            words = any_of(str(one).lower() if isinstance(one, bool) else one for one in known)
            told = str(value).lower() if isinstance(value, bool) else value
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
