"""Frozen, validated descriptions of a run: model, layout, data, training.

A run file is YAML with four sections, `model`, `layout`, `data`, `train`. `load_run` reads one,
applies `dotted.key=value` overrides and checks what can be checked without the data; problems are
reported all at once (`ConfigError`), each with a value that works. `gridformer.layout.check` then
checks the layout against the model.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gridformer.errors import ConfigError

Scheme = Literal["single", "megatron", "optimus", "subgraph"]
SCHEMES: tuple[Scheme, ...] = ("single", "megatron", "optimus", "subgraph")
Family = Literal["gpt2", "bert", "t5", "transformer"]
ENCODER_DECODER: tuple[Family, ...] = ("t5", "transformer")
PipelineOrder = Literal["gpipe", "1f1b", "interleaved"]
Task = Literal["auto", "causal", "masked", "spans", "pairs"]
# Which families may learn from which kind of samples; the first is what `auto` means.
TASKS: dict[Family, tuple[Task, ...]] = {
    "gpt2": ("causal",),
    "bert": ("masked",),
    "t5": ("spans", "pairs"),
    "transformer": ("pairs",),
}
_ONLY_IN: dict[str, tuple[Family, ...]] = {
    "n_decoder_layers": ENCODER_DECODER,
    "sentence_pair": ("bert",),
    "n_labels": ("gpt2", "bert"),
    "relative_buckets": ("t5",),
    "relative_max_distance": ("t5",),
    "init_std": ("gpt2", "bert"),
}


class Config(BaseModel):
    """Base of every section: immutable, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


class ModelConfig(Config):
    """A transformer of one of four families, and its size.

    gpt2: decoder; bert: encoder; t5, transformer: encoder and decoder. Symbols of the
    specification: N = n_layers (of the encoder, where there are two stacks), h = hidden_size,
    n = n_heads, f = ffn_size, v = vocab_size, and max_seq_len is the largest s. Fields that a
    family does not have keep their defaults.
    """

    name: str = "custom"
    family: Family = "gpt2"
    n_layers: int = Field(ge=1)
    n_decoder_layers: int = Field(
        default=0, ge=0, description="of t5 and transformer; 0 means n_layers"
    )
    hidden_size: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    head_dim: int = Field(default=0, ge=0, description="0 means hidden_size / n_heads")
    ffn_size: int = Field(default=0, ge=0, description="0 means 4 times hidden_size")
    vocab_size: int = Field(default=0, ge=0, description="0 means the data's vocabulary")
    max_seq_len: int = Field(default=1024, ge=1)
    norm_position: Literal["auto", "pre", "post"] = Field(
        default="auto",
        description="LayerNorm at the input of each sub-layer, or after its residual; auto: post "
        "for bert and transformer, as published. gpt2 and t5 have pre only",
    )
    sentence_pair: bool = Field(
        default=True, description="bert: a branch that tells whether sentence B follows A"
    )
    n_labels: int = Field(
        default=0, ge=0, description="gpt2, bert: of a classification branch; 0 leaves it out"
    )
    relative_buckets: int = Field(default=32, ge=4, description="t5: of distances of two tokens")
    relative_max_distance: int = Field(default=128, ge=2, description="t5: the last bucket's")
    label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="of the training loss (Vaswani et al. 2017: 0.1)"
    )
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    attention_dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="dropout of attention probabilities; takes the unfused attention path",
    )
    norm_eps: float = Field(default=1e-5, gt=0.0)
    init_std: float = Field(
        default=0.02,
        gt=0.0,
        description="gpt2, bert: of matrices; t5 and transformer go by each matrix's size",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        """What 0 and auto mean, so that a resolved config says it."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        family, hidden = values.get("family", "gpt2"), values.get("hidden_size")
        if not values.get("ffn_size") and isinstance(hidden, int):
            filled["ffn_size"] = 4 * hidden
        if values.get("norm_position", "auto") == "auto":
            filled["norm_position"] = "post" if family in ("bert", "transformer") else "pre"
        if not values.get("n_decoder_layers") and family in ENCODER_DECODER:
            filled["n_decoder_layers"] = values.get("n_layers", 0)
        return filled

    @model_validator(mode="after")
    def _fits_the_family(self) -> Self:
        problems = [
            f"{key}={getattr(self, key)} belongs to family {any_of(families)}, not {self.family}: "
            f"leave it out"
            for key, families in _ONLY_IN.items()
            if self.family not in families
            and getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.norm_position == "post" and self.family in ("gpt2", "t5"):
            problems.append(f"norm_position=post: {self.family} normalises inputs; use pre")
        if self.family == "t5" and self.relative_max_distance <= self.relative_buckets // 2:
            problems.append(
                f"relative_max_distance={self.relative_max_distance}: the first half of "
                f"relative_buckets={self.relative_buckets} holds one distance each; use "
                f"relative_max_distance={self.relative_buckets // 2 + 1} or more"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if not self.head_dim and self.hidden_size % self.n_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of n_heads={self.n_heads}: use "
                f"n_heads {any_of(divisors(self.hidden_size))}, or set head_dim"
            )
        return self

    @property
    def head_width(self) -> int:
        """d: head_dim, or what it is by default."""
        return self.head_dim or self.hidden_size // self.n_heads

    @property
    def two_stacks(self) -> bool:
        """An encoder and a decoder."""
        return self.family in ENCODER_DECODER

    @property
    def n_links(self) -> int:
        """Steps that a pipeline can be cut between: layers, embeddings and the head."""
        if self.two_stacks:
            return self.n_layers + self.n_decoder_layers + 3
        return self.n_layers + 2


class LayoutConfig(Config):
    """How a model is spread over processes: a scheme on a rows x cols grid, times dp, times pp.

    `scheme=subgraph` has `branches` sub-grids of dp processes each in the place of the grid.

    `schedule`, `stationary` and `keep_gathered` say how products communicate; `auto` decides for
    each product from message sizes and memory, and `gridformer train --explain` prints what and
    why (gridformer.parallel.choices).
    """

    scheme: Scheme = "single"
    rows: int = Field(default=1, ge=1)
    cols: int = Field(default=1, ge=1)
    branches: int = Field(
        default=1, ge=1, description="subgraph: g, sub-grids that share heads and feed-forward"
    )
    dp: int = Field(default=1, ge=1)
    dp_mode: Literal["replicate", "zero1", "fsdp"] = Field(
        default="replicate",
        description="what replicas hold alike: everything; all but the optimizer's state; nothing, "
        "parameters being gathered layer by layer",
    )
    pp: int = Field(default=1, ge=1, description="ranks that hold successive stages of layers")
    stages_per_rank: int = Field(default=1, ge=1, description="more than 1 interleaves them")
    pipeline: Literal["auto", "gpipe", "1f1b", "interleaved"] = Field(
        default="auto",
        description="in which order stages go through micro-batches; auto: interleaved where ranks "
        "have several, else 1f1b, or gpipe where there are fewer micro-batches than stages",
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        description="m: parts of a step's batch that go through the model one after the other",
    )
    sequence_parallel: bool = False
    schedule: Literal["auto", "broadcast", "pipelined", "gather"] = Field(
        default="auto",
        description="optimus: a panel at a time, the same with the next on its way, or all at once",
    )
    stationary: Literal["auto", "output", "input"] = Field(
        default="auto", description="optimus: which activation of a product does not travel"
    )
    keep_gathered: Literal["auto", "none", "inputs", "weights", "all"] = Field(
        default="auto",
        description="what is kept instead of gathered again: a product's input until its backward "
        "pass, its weight until the step ends",
    )
    common: Literal["all", "first"] = Field(
        default="all",
        description="subgraph: layers outside branches on all processes (D&SP), or on the first "
        "sub-grid alone (D&SP-cSub)",
    )
    attention: Literal["inside", "outside"] = Field(
        default="inside",
        description="subgraph: projections of q, k, v and of the result in the branches, or common",
    )
    feed_forward: Literal["branched", "common"] = "branched"
    order: Literal["topology", "contiguous"] = Field(
        default="topology",
        description="subgraph: neighbouring ranks are of one segmented collective, or of one "
        "sub-grid",
    )
    devices_per_node: int = Field(
        default=0, ge=0, description="places blocks of the grid on nodes; 0 places rows in order"
    )

    @property
    def n_processes(self) -> int:
        return self.rows * self.cols * self.branches * self.dp * self.pp

    @property
    def n_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def pipeline_order(self) -> PipelineOrder:
        """`pipeline`, with `auto` resolved."""
        if self.pipeline != "auto":
            return self.pipeline
        if self.stages_per_rank > 1:
            return "interleaved"
        return "1f1b" if self.micro_batches >= self.pp else "gpipe"

    def describe(self) -> str:
        """One phrase for people: `optimus 2x2, dp=2`."""
        grid = {
            "single": "single device",
            "megatron": f"megatron 1x{self.cols}",
            "optimus": f"optimus {self.rows}x{self.cols}",
            "subgraph": f"subgraph, {self.branches} branches"
            + (", common layers on the first" if self.common == "first" else ""),
        }[self.scheme]
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        mode = f" ({self.dp_mode})" if self.dp_mode != "replicate" else ""
        stages = f", pp={self.pp}" if self.pp > 1 else ""
        if self.stages_per_rank > 1:
            stages += f" x {self.stages_per_rank} stages, interleaved"
        return f"{grid}{sequence}" + (f", dp={self.dp}" if self.dp > 1 else "") + mode + stages


class DataConfig(Config):
    """A folder written by `gridformer prepare`, and how samples are made of it."""

    path: Path
    task: Task = Field(
        default="auto",
        description="next words (gpt2), masked words (bert), masked spans (t5), or the second text "
        "of a pair from the first (transformer, t5)",
    )
    seq_len: int = Field(
        default=0,
        ge=0,
        description="tokens a sample, of its target where it has a source; 0 means "
        "model.max_seq_len, and for spans as many as they take",
    )
    source_len: int = Field(
        default=0, ge=0, description="t5, transformer: of the source; 0 means model.max_seq_len"
    )


class TrainConfig(Config):
    """Optimizer, schedule, precision and what is written when."""

    steps: int = Field(default=1000, ge=1)
    seed: int = Field(default=1234, ge=0, lt=2**63)
    global_batch: int = Field(
        default=8, ge=1, description="sequences an optimizer step, all devices"
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        default="float32",
        description="of the computation; bfloat16 keeps float32 parameters and statistics",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = Field(
        default=False,
        description="torch.compile of each block; for layouts whose blocks do not communicate",
    )
    lr: float = Field(default=3e-4, gt=0.0)
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0.0, description="of matrices; never of vectors")
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    adam_eps: float = Field(default=1e-8, gt=0.0)
    clip_norm: float = Field(
        default=1.0, ge=0.0, description="global gradient norm; 0 turns it off"
    )
    eval_every: int = Field(default=100, ge=0, description="steps; 0 evaluates at the end only")
    eval_batches: int = Field(default=8, ge=1, description="global batches an evaluation")
    save_every: int = Field(default=500, ge=0, description="steps; 0 saves at the end only")
    keep_checkpoints: int = Field(default=3, ge=1)
    trace_step: int = Field(
        default=0,
        ge=0,
        description="this step's timeline is written to trace-step-N.json; 0: none. It is slower",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0.0,
        description="a collective that waits longer ends the run with an error",
    )
    sanity_checks: bool = Field(
        default=False, description="compare replicated parameters over ranks at every evaluation"
    )


class RunConfig(Config):
    """Everything a run needs; written to the run directory as it was resolved."""

    name: str = "run"
    model: ModelConfig
    data: DataConfig
    layout: LayoutConfig = LayoutConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _micro_batches_moved(cls, values: Any) -> Any:
        """They were in the section train, once: runs of then stay readable."""
        train = values.get("train") if isinstance(values, dict) else None
        if not isinstance(train, dict) or "micro_batches" not in train:
            return values
        rest = {key: value for key, value in train.items() if key != "micro_batches"}
        layout = {"micro_batches": train["micro_batches"], **(values.get("layout") or {})}
        return {**values, "train": rest, "layout": layout}

    @model_validator(mode="after")
    def _data_suits_the_model(self) -> Self:
        family, tasks = self.model.family, TASKS[self.model.family]
        problems = []
        if self.data.task not in ("auto", *tasks):
            problems.append(
                f"data.task={self.data.task}: {family} learns from {any_of(tasks)}; use data.task="
                f"{any_of(('auto', *tasks))}"
            )
        if self.data.source_len and not self.model.two_stacks:
            problems.append(
                f"data.source_len={self.data.source_len}: {family} reads no source; use "
                "data.source_len=0"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def seq_len(self) -> int:
        """s: of samples, of their targets where they have a source."""
        return self.data.seq_len or self.model.max_seq_len

    @property
    def source_len(self) -> int:
        """Tokens of a source; 0 for families of one stack."""
        return (self.data.source_len or self.model.max_seq_len) if self.model.two_stacks else 0

    @property
    def task(self) -> Task:
        """What is learned, with `auto` resolved."""
        return TASKS[self.model.family][0] if self.data.task == "auto" else self.data.task

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


# --------------------------------------------------------------------------- reading


def configs_dir() -> Path:
    """The folder of shipped configs: inside an installed package, beside src/ in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "configs", package.parents[1] / "configs"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "gridformer's shipped configs/ folder is missing: reinstall the package"
    )


def model_names() -> list[str]:
    """Names that `model:` accepts, for instance `gpt2-124m`."""
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.yaml"))


def shipped_model(name: str) -> dict[str, Any]:
    """The mapping behind a shipped model name. Raises ConfigError with the closest names."""
    if name not in model_names():
        raise ConfigError(
            [f"model: no shipped model is called '{name}'{closest(name, model_names())}"]
        )
    return {"name": name, **_read_yaml(configs_dir() / "models" / f"{name}.yaml")}


def load_run(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file, apply overrides such as `train.steps=100`, validate.

    A path that does not exist is looked up among the shipped run files, so `demo` and
    `configs/runs/demo.yaml` both work from anywhere. Raises ConfigError with every problem found.
    """
    path = Path(path)
    if not path.exists():
        shipped = configs_dir() / "runs" / f"{path.stem}.yaml"
        if not shipped.exists():
            names = sorted(p.stem for p in (configs_dir() / "runs").glob("*.yaml"))
            raise ConfigError(
                [f"{path}: no such run file; shipped run files are {', '.join(names)}"]
            )
        path = shipped
    raw = _read_yaml(path)
    raw.setdefault("name", path.stem)
    return parse_run(raw, overrides, where=str(path))


def parse_run(
    raw: Mapping[str, Any], overrides: Iterable[str] = (), where: str = "run"
) -> RunConfig:
    """Validate a mapping of the four sections; see load_run."""
    values: dict[str, Any] = {**raw}
    for override in overrides:
        _apply(values, override)
    for section in ("model", "layout", "data", "train"):
        if section in values and values[section] is None:  # a heading with nothing below it
            values[section] = {}
    if "model" in values:
        values["model"] = _expand_model(values["model"])
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError([f"{where}: {_sentence(e)}" for e in error.errors()]) from None


def _expand_model(model: Any) -> Any:
    """`gpt2-124m`, `{name: gpt2-124m, dropout: 0.1}` and a full inline mapping are all accepted."""
    if isinstance(model, str):
        return shipped_model(model)
    if isinstance(model, dict) and model.get("name") in model_names():
        return {**shipped_model(model["name"]), **model}
    if isinstance(model, dict) and set(model) == {"name"}:
        return shipped_model(str(model["name"]))
    return model


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(
            [f"'{override}' is no override: write section.key=value, for instance train.steps=100"]
        )
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        value = text
    *sections, last = key.split(".")
    here = values
    for section in sections:
        below = here.get(section)
        if section == "model" and isinstance(below, str):
            shipped_model(below)  # says so if there is none of that name
            below = {"name": below}
        if below is None:
            below = {}
        if not isinstance(below, dict):
            raise ConfigError([f"'{override}': {section} is a value, not a section"])
        here[section] = below = dict(below)
        here = below
    here[last] = value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: is not valid YAML ({' '.join(str(error).split())})"]) from None
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: must be a mapping with the keys model, data, layout, train"])
    return raw


# --------------------------------------------------------------------------- sentences


def _sentence(error: ErrorDetails) -> str:
    """One of pydantic's findings as a sentence that ends in a remedy where one is known."""
    keys = [str(part) for part in error["loc"]]
    where = ".".join(keys) or "run"
    if error["type"] == "extra_forbidden":
        section = _section(keys[:-1])
        known = list(section.model_fields) if section else []
        return f"unknown key {where}{closest(keys[-1], known)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if error["type"] == "value_error":
        return f"{where}: {message}"
    got = error.get("input")
    if isinstance(got, str) and error["type"] == "literal_error":
        message += closest(got, [w.strip("'") for w in message.replace(" or ", ", ").split(", ")])
    if isinstance(got, str | int | float | bool):
        return f"{where}={got}: {message}"
    return f"{where}: {message}"


def _section(keys: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = RunConfig
    for key in keys:
        if key not in section.model_fields:
            return None
        annotation = section.model_fields[key].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        section = annotation
    return section


def closest(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'steps'?`, or the list of what is known, as the end of a sentence."""
    known = [k.removeprefix("input should be ").strip("'") for k in known]
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if match:
        return f": did you mean '{match[0]}'?"
    return f"; known are {', '.join(known)}" if known else ""


def divisors(value: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def any_of(values: Iterable[object]) -> str:
    """`1, 2, 4 or 8`: the end of a sentence that offers a choice; long lists keep both ends."""
    words = [str(v) for v in values]
    if len(words) > 10:
        words = [*words[:6], "...", *words[-3:]]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
