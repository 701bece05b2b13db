"""Random valid runs, drawn from the schema of a run's own settings.

Every setting is drawn by its type: one of its words, on or off, or a number. So an option that is
added to the schema is drawn from then on without a change here. If the schema or
`gridformer.parallel.validation` refuses a run, it is repaired: by a change that the broken rule
proposes, or by drawing one of the settings that the message names again. Each setting has its own
random numbers, so that a new setting does not change what is drawn for the others.
"""

import itertools
import random
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gridformer import config
from gridformer.config.model import _OF_EXPERTS, Family
from gridformer.parallel.validation import violations, with_rows_over
from tests.support.multirank import own_networks

Sections = dict[str, dict[str, Any]]
SECTIONS: dict[str, type[config.Config]] = {
    "model": config.ModelConfig,
    "layout": config.LayoutConfig,
    "data": config.DataConfig,
    "train": config.TrainConfig,
}
SETTINGS = {f"{name}.{key}" for name, schema in SECTIONS.items() for key in schema.model_fields}

# Settings that do not change a step or belong to other tests: where data lies, when what is
# written, and the machine. Those that are not in SET keep their defaults.
SET: dict[str, Any] = {
    "model.name": "fuzz",
    "data.path": ".",
    "train.steps": 4,  # for the learning rate's schedule
    "train.device": "cpu",
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.save_every": 0,
    "train.keep_checkpoints": 1,
    "train.async_save": False,
}
_DATA = "sources stages validation test tokenizer val_fraction restart"
_TRAIN = (
    "init_from init_embeddings memory_gib keep_every checkpoint_to full_disk full_disk_wait_s "
    "fallback on_divergence divergences rollback_checkpoints rollback_lr stop_signals stop_grace_s "
    "max_hours max_restarts elastic bleu_every bleu_pairs bleu_beams bleu_length_penalty "
    "trace_step loggers peak_tflops timeout_s moments_dtype"
)
# Networks are drawn as a whole.
_OF_NETWORKS = ("model.folder", "model.factory", "model.plan")
FIXED = {*SET, "layout.cluster", *_OF_NETWORKS, *(f"data.{key}" for key in _DATA.split())}
FIXED |= {f"train.{key}" for key in _TRAIN.split()}
# Numbers that suit tiny models on few processes; usual ones appear several times. For numbers that
# are not named here, the default and the next larger one are drawn.
NUMBERS: dict[str, tuple[float, ...]] = {
    "model.n_layers": (1, 1, 2, 2, 3),
    "model.n_decoder_layers": (0, 1, 2, 3),
    "model.hidden_size": (2, 4, 6, 8, 12, 16, 24, 36),
    "model.n_heads": (1, 2, 2, 3, 4, 4, 6, 8, 12),
    "model.head_dim": (0, 0, 1, 2, 3, 4),
    "model.ffn_size": (0, 0, 1, 2, 2, 3, 4, 6, 8, 12, 24),
    "model.vocab_size": (2, 3, 5, 7, 13, 16, 29, 37),
    "model.max_seq_len": (1, 2, 3, 4, 5, 6, 8, 12),
    "model.n_labels": (0, 0, 1, 2, 3, 5),
    "model.n_kv_heads": (0, 1, 1, 2, 3, 4, 6),
    "model.rope_theta": (10000.0, 10000.0, 10.0),
    "model.window": (0, 0, 1, 2, 3, 5),
    "model.n_experts": (0, 2, 5, 5, 9),
    "model.experts_per_token": (1, 1, 2, 2, 3, 5, 8),
    "model.expert_size": (0, 1, 2, 3, 4, 6),
    "model.shared_size": (0, 0, 2, 4, 6),
    "model.dense_layers": (0, 0, 1),
    "model.routed_scale": (1.0, 2.5),
    "model.balance_loss": (0.0, 0.1),
    "model.z_loss": (0.0, 0.01),
    "model.balance_rate": (1e-3, 0.1),
    "model.relative_buckets": (4, 5, 6, 8, 32),
    "model.relative_max_distance": (3, 4, 5, 7, 20, 128),
    "model.label_smoothing": (0.0, 0.0, 0.1, 0.5),
    "model.dropout": (0.0, 0.0, 0.1, 0.5),
    "model.attention_dropout": (0.0, 0.0, 0.1, 0.5),
    "model.norm_eps": (1e-5, 1e-2),
    "model.init_std": (0.02, 0.1, 0.3),
    "layout.rows": (1, 2, 2, 3, 4),
    "layout.cols": (1, 2, 2, 2, 3, 4),
    "layout.branches": (1, 2, 2, 3, 4),
    "layout.dp": (1, 1, 1, 2, 2, 3),
    "layout.shard_over": (0, 0, 0, 2, 2),
    "layout.experts_dp": (0, 0, 0, 2),
    "layout.pp": (1, 1, 1, 2, 2, 3, 4),
    "layout.stages_per_rank": (1, 1, 2, 2, 3),
    "layout.micro_batches": (1, 1, 2, 2, 3, 4),
    "layout.devices_per_node": (0, 0, 0, 1, 2, 3, 4),
    "layout.nodes_per_rack": (0, 0, 0, 1, 2, 3),
    "data.n_choices": (2, 2, 3, 4),
    "data.seq_len": (0, 0, 1, 2, 3, 4, 6, 8),
    "data.source_len": (0, 0, 1, 2, 3, 4, 6, 8),
    "train.seed": (0, 1, 1234, 2**63 - 1),
    "train.global_batch": (1, 2, 3, 4, 6, 8, 12, 24),
    "train.loss_chunk_tokens": (0, 1, 2, 3, 5, 1024),
    "train.lr": (1e-3, 3e-3, 1e-2),
    "train.min_lr_ratio": (0.0, 0.1, 1.0),
    "train.decay_fraction": (0.1, 0.5, 1.0),
    "train.warmup_steps": (0, 0, 1, 3),
    "train.weight_decay": (0.0, 0.1, 1.0),
    "train.beta1": (0.0, 0.9, 0.9),
    "train.beta2": (0.0, 0.95, 0.95, 0.999),
    "train.muon_momentum": (0.0, 0.5, 0.95),
    # Larger than the rounding noise in zero gradients, which AdamW would scale up to full steps.
    "train.adam_eps": (1e-4, 1e-5),
    "train.clip_norm": (0.0, 1e-4, 1e-2, 0.1, 1.0),  # the smaller ones clip
}
# Words that are drawn less often than the others, and settings that are neither words nor numbers.
# Compiling takes longer than the steps of a case.
WORDS: dict[str, tuple[Any, ...]] = {
    "layout.scheme": (
        *("single", *("megatron",) * 2, *("optimus",) * 2),
        *("megatron_2d", *("subgraph",) * 3),
    ),
    "layout.experts_over": (
        *([], ["dp"], ["dp"], ["rows"], ["cols"], ["branches"]),
        *(["rows", "cols"], ["cols", "dp"], ["branches", "dp"]),
    ),
    # Of the other tasks only the data differ.
    "data.task": ("auto",) * 10 + tuple(config.FINE_TUNING),
    "train.dtype": ("float64",) * 15 + ("float32", "bfloat16", "float16"),
    "train.compile": (False,) * 15 + (True,),
    "train.attention": ("auto",) * 3 + ("math",),
    "train.optimizer": ("adamw",) * 3 + ("muon",),
    "train.muon_by_head": (False,) * 3 + (True,),
    "model.family": tuple(family for family in get_args(Family) if family != "network"),
    "model.rope_scaling": (
        *(None,) * 4,
        {"kind": "linear", "factor": 2.0},
        {"kind": "llama3", "factor": 4.0, "original_max_position_embeddings": 4},
        {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
    ),
}


# Drawn once for each seed. If refusals could change these too, most runs would end up on a grid.
LEADING = ("model.family", "layout.scheme")


class Chooser:
    """Draws settings.

    One in sixteen of the drawn settings is fixed, so that a refusal must be repaired elsewhere.

    Args:
        changeable: Whether a `section.key` may be drawn; all by default.
    """

    def __init__(
        self, seed: str, attempt: int = 0, changeable: Callable[[str], bool] = lambda key: True
    ) -> None:
        self.seed, self.attempt = seed, attempt
        self.keys = {
            f"{section}.{key}": field
            for section, schema in SECTIONS.items()
            for key, field in schema.model_fields.items()
            if f"{section}.{key}" not in FIXED and changeable(f"{section}.{key}")
        }
        self._streams: dict[str, random.Random] = {}
        self.held = {
            key
            for key in self.keys
            if key in LEADING or self.stream(f"{key} held").random() < 1 / 16
        }

    def stream(self, key: str) -> random.Random:
        """Return the random numbers of this key."""
        if key not in self._streams:
            attempt = 0 if key in LEADING else self.attempt
            self._streams[key] = random.Random(f"{self.seed} {attempt} {key}")
        return self._streams[key]

    def draw(self, key: str) -> Any:
        return self.stream(key).choice(values_of(key, self.keys[key]))

    def mend(self, sections: Sections) -> bool | None:
        """Change settings so that one reason fewer stands against a run.

        Returns None if there is no such reason, and False if nothing can be changed.
        """
        against = refusals(sections)
        if not against:
            return None
        chooser = self.stream("mending")
        refusal = chooser.choice(against)
        changes = [*itertools.islice(refusal.changes, 8)]
        changes = [each for each in changes if all(self._may_change(key) for key in each)]
        if changes and chooser.random() < 0.5:
            _set(sections, chooser.choice(changes))
            return True
        named = [key for key in refusal.keys if self._may_change(key)]
        if named:
            key = chooser.choice(named)
            _set(sections, {key: self.draw(key)})
        return bool(named)

    def _may_change(self, key: str) -> bool:
        return key in self.keys and key not in self.held


def values_of(key: str, field: FieldInfo) -> tuple[Any, ...]:
    """Return the values that may be drawn for a setting."""
    if key in WORDS:
        return WORDS[key]
    if key in NUMBERS:
        return NUMBERS[key]
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return get_args(kind)
    if kind is bool:
        return (False, True)
    first = 1 if field.default in (None, PydanticUndefined) else field.default
    if kind is int:
        return (first, first, first + 1, first + 2)
    if kind is float:
        return (first, first / 2)
    raise TypeError(f"{key} is of a type that is not drawn ({kind}): add it to FIXED, or draw it")


def draw_run(
    seed: str,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    changeable: Callable[[str], bool] = lambda key: True,
    suits: Callable[[config.RunConfig], bool] = lambda run: True,
) -> Sections:
    """Draw a valid run: changeable settings at random, and the others from `given`.

    The same seed gives the same run.

    Args:
        suits: Whether a valid run is acceptable.
    """
    for attempt in range(1000):
        chooser = Chooser(seed, attempt, changeable)
        sections = {name: dict((given or {}).get(name, {})) for name in SECTIONS}
        for key in chooser.keys:
            section, name = key.split(".")
            sections[section][name] = chooser.draw(key)
        if "model.family" in chooser.keys and (network := _network(seed)):
            sections["model"] = network
            chooser.held |= {key for key in chooser.keys if key.startswith("model.")}
        _leave_out_heads(sections)
        _leave_out_experts(sections)
        run = _mended(sections, chooser)
        if run is not None and _is_small(sections) and suits(run):
            return sections
    raise RuntimeError(f"seed {seed}: no valid run in 1000 attempts")


def _network(seed: str) -> dict[str, Any] | None:
    """Return one of the networks of others for one seed in eight."""
    choose = random.Random(f"{seed} network")
    name = choose.choice(own_networks.NETWORKS)
    if choose.random() >= 1 / 8:
        return None
    model = own_networks.of(name, max_seq_len=12)
    return {**model, "n_layers": choose.randint(1, model["n_layers"])}


def _leave_out_heads(sections: Sections) -> None:
    """Leave out the settings that a task of fine-tuning sets, as users do."""
    task = sections["data"].get("task")
    if task in config.FINE_TUNING:
        for key in ("token_head", "span_head", "sentence_pair"):
            sections["model"].pop(key, None)
        if task != "classify":
            sections["model"].pop("n_labels", None)


def _leave_out_experts(sections: Sections) -> None:
    """Leave out the settings of experts if there are none, so that they refuse nothing."""
    model, layout = sections["model"], sections["layout"]
    if model.get("family") != "llama":
        for key in ("n_experts", "qk_norm_over"):
            model.pop(key, None)
    if not model.get("n_experts"):
        for key in _OF_EXPERTS:
            model.pop(key, None)
        for key in ("experts_over", "experts_dp"):
            layout.pop(key, None)


def _is_small(sections: Sections) -> bool:
    """Return whether no repair raised a number far above what may be drawn."""
    return all(
        sections[section].get(name, 0) <= 2 * max(numbers)
        or (section == "model" and sections["model"].get("factory"))
        for (section, name), numbers in ((key.split("."), n) for key, n in NUMBERS.items())
    )


def _mended(sections: Sections, chooser: Chooser) -> config.RunConfig | None:
    """Repair sections until they form a valid run; return None if that fails."""
    for _ in range(40):
        changed = chooser.mend(sections)
        if changed is None:
            return run_of(sections)
        if not changed:
            return None
    return None


def run_of(sections: Mapping[str, Mapping[str, Any]]) -> config.RunConfig:
    """Return the run as it is checked; raises ValidationError if the sections form no valid run."""
    filled: Sections = {name: dict(sections.get(name, {})) for name in SECTIONS}
    for key, value in SET.items():
        section, name = key.split(".")
        filled[section].setdefault(name, value)
    return with_rows_over(config.RunConfig.model_validate({"name": "fuzz", **filled}))


@dataclass(frozen=True)
class Refusal:
    """Why a run is refused: the settings that the message names, and changes that may repair it."""

    keys: list[str]
    changes: Iterable[Mapping[str, Any]] = ()


def refusals(sections: Mapping[str, Mapping[str, Any]]) -> list[Refusal]:
    """Return all reasons against a run; none if it is valid."""
    try:
        run = run_of(sections)
    except ValidationError as error:
        return [_of_schema([*map(str, each["loc"])], each["msg"]) for each in error.errors()]
    return [
        Refusal(
            _settings_in(violation.text),
            (each for fix in violation.fixes for each in fix.changes()),
        )
        for violation in violations(run)
    ]


def _of_schema(where: list[str], message: str) -> Refusal:
    """Convert a schema error, of one section or of the whole run, into a refusal."""
    section = where[0] if where else ""
    keys = [key for key in [".".join(where)] if key in SETTINGS] + _settings_in(message, section)
    alone = re.findall(r"([a-z_]+)=[^;]*: leave it out", message)
    return Refusal(
        [key for key in keys if key in SETTINGS], [{f"{section}.{key}": None} for key in alone]
    )


def _settings_in(sentence: str, section: str = "") -> list[str]:
    """Return the settings that a sentence names, with their section or as `section`'s."""
    words = re.findall(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)?", sentence)
    keys = [word if "." in word else f"{section}.{word}" for word in words]
    return [key for key in keys if key in SETTINGS]


def _set(sections: Sections, changes: Mapping[str, Any]) -> None:
    """Change settings; None removes one."""
    for key, value in changes.items():
        section, name = key.split(".")
        if value is None:
            sections[section].pop(name, None)
        else:
            sections[section][name] = value


def shortened(sections: Mapping[str, Mapping[str, Any]]) -> Sections:
    """Leave out what is a default or fixed anyway."""
    found: Sections = {}
    for section, schema in SECTIONS.items():
        for key, value in sections.get(section, {}).items():
            field = schema.model_fields[key]
            same = field.default == value and type(field.default) is type(value)
            if not same and not isinstance(value, Path):
                found.setdefault(section, {})[key] = value
    return found
