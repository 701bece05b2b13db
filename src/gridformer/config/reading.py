"""Reads run files and shipped models: from YAML and overrides to a checked RunConfig."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gridformer.config.base import closest, shortened_text
from gridformer.config.layout import LayoutConfig
from gridformer.config.run import RunConfig
from gridformer.config.synonyms import KEYS, NOTES, VALUES, plain
from gridformer.config.yaml_text import parse_yaml
from gridformer.utils.errors import ConfigError
from gridformer.utils.files import UnreadableError, exists, meant_beside, read_text
from gridformer.utils.units import MIB

# A run file has a few hundred bytes, a cluster file with everything that was measured some 100 KB.
_MOST_BYTES = 4 * MIB


def configs_dir() -> Path:
    """Returns the folder of shipped configs.

    It is inside the package if that is installed, and beside src/ in a checkout.

    Raises:
        FileNotFoundError: Neither folder exists.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parents[1] / "configs"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "the configs/ folder that ships with gridformer is missing: reinstall the package"
    )


_SUFFIXES = (".yaml", ".yml", ".json")  # of run files

# The shipped run files that train models of a family, where the file is not named after the family.
_RUN_OF_FAMILY = {"gpt2": "demo", "transformer": "translate"}


def model_names() -> list[str]:
    """Returns the names that `model:` accepts, for example `gpt2-124m`, in alphabetical order."""
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.yaml"))


def shipped_model(name: str) -> dict[str, Any]:
    """Returns the `model` section of a shipped model as a mapping, its name included.

    Raises:
        ConfigError: No shipped model has this name. The message suggests the closest one, or lists
            all names if none is similar.
    """
    if name not in model_names():
        raise ConfigError(
            f"model: no shipped model is called '{name}'{closest(name, model_names())}"
        )
    return {"name": name, **read_yaml(configs_dir() / "models" / f"{name}.yaml")}


def load_run(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a run file, applies overrides, and validates the result.

    Args:
        path: Path of a run file. If it does not exist, a shipped run file of that name is used, so
            `demo` and `configs/runs/demo.yaml` both work from any folder.
        overrides: `dotted.key=value` texts such as `train.steps=100`; the last one of a key wins.

    Raises:
        ConfigError: The file cannot be read or is not valid YAML, an override is malformed, or
            values are invalid; it lists every invalid value.
    """
    path = find_run_file(path)
    raw = read_yaml(path)
    raw.setdefault("name", path.stem)
    return parse_run(raw, overrides, where=str(path))


def find_run_file(path: Path | str, or_model: bool = False) -> Path:
    """Returns the path of a run file, or of a shipped one of that name.

    Args:
        path: The path or the name.
        or_model: Whether the name of a shipped model would do as well, for the message.

    Raises:
        ConfigError: There is neither. The message says what is similar.
    """
    path = Path(path)
    shipped = configs_dir() / "runs" / f"{path.stem}.yaml"
    named = str(path) == path.stem or os.path.realpath(path) == os.path.realpath(shipped)
    named = named or path == Path("configs", "runs", shipped.name)
    is_folder = path.is_dir()  # such as an imported model's, named after the model
    if exists(path) and not is_folder:
        return path
    if exists(shipped) and named:
        return shipped
    if is_folder and str(path) not in model_names():
        return path
    if str(path) in model_names():
        raise ConfigError(f"{path} is a shipped model and not a run file: {_with_model(str(path))}")
    said = f"{path}: no such run file" + (" or model" if or_model else "")
    key, sign, _ = str(path).partition("=")
    if sign and key.partition(".")[0] in RunConfig.model_fields:
        raise ConfigError(f"{said}: one comes before what changes it, such as `demo {path}`")
    names = sorted(p.stem for p in (configs_dir() / "runs").glob("*.yaml"))
    typed = path.stem if path.suffix in _SUFFIXES else path.name
    known = difflib.get_close_matches(typed, [*names, *model_names()], n=1, cutoff=0.5)
    beside = meant_beside(path, lambda other: other.suffix in _SUFFIXES)
    if meant := beside or next(iter(known), ""):
        is_model = not or_model and meant in model_names() and meant not in names
        use = f" It is a shipped model: {_with_model(meant)}" if is_model else ""
        raise ConfigError(f"{said}: did you mean '{meant}'?{use}")
    said += f"; shipped run files are {', '.join(names)}"
    raise ConfigError(
        said + (f", and shipped models {', '.join(model_names())}" if or_model else "")
    )


def _with_model(name: str) -> str:
    """Returns how a run file is told to train a shipped model."""
    family = shipped_model(name).get("family", "gpt2")
    like = _RUN_OF_FAMILY.get(family, family)
    return f"add model={name} to a run file, such as `{like} model={name}`"


def parse_run(
    raw: Mapping[str, Any], overrides: Iterable[str] = (), where: str = "run"
) -> RunConfig:
    """Validates a mapping of the sections model, layout, data and train.

    Args:
        raw: The mapping; it is not modified.
        overrides: `dotted.key=value` texts, as in `load_run`.
        where: Name of the mapping's source. Each problem is reported with the override that caused
            it, or else with this name.

    Raises:
        ConfigError: An override is malformed or values are invalid; it lists every invalid value.
    """
    values: dict[str, Any] = {**raw}
    overrides = [*overrides]
    for override in overrides:
        _apply(values, override)
    for section in ("model", "layout", "data", "train"):
        if section in values and values[section] is None:  # a heading with nothing below it
            values[section] = {}
    train = values.get("train")
    if "model" not in values and isinstance(train, dict) and train.get("init_from"):
        values["model"] = str(train["init_from"])
    if "model" in values:
        try:
            values["model"] = _expand_model(values["model"])
        except ConfigError as error:
            named = [o for o in overrides if o.startswith(("model=", "model.name="))]
            if not named:
                raise
            text = str(error).removeprefix("model: ")
            raise ConfigError(f"argument {named[-1]}: {text}") from None
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = [_with_origin(e, raw, overrides, where) for e in error.errors()]
        raise ConfigError(*problems) from None


def parse_layout(overrides: Iterable[str]) -> LayoutConfig:
    """Validates a layout that `layout.key=value` texts alone describe.

    Raises:
        ConfigError: A text is malformed or a value invalid; it lists every invalid value.
    """
    values: dict[str, Any] = {}
    overrides = [*overrides]
    for override in overrides:
        if not override.startswith("layout."):
            raise ConfigError(f"'{override}' is no part of a layout: write layout.key=value")
        _apply(values, override)
    try:
        return LayoutConfig.model_validate(values.get("layout", {}))
    except ValidationError as error:
        problems = error.errors()
        for problem in problems:
            problem["loc"] = ("layout", *problem["loc"])
        raise ConfigError(*(_with_origin(p, {}, overrides, "layout") for p in problems)) from None


def _with_origin(
    error: ErrorDetails, raw: Mapping[str, Any], overrides: Sequence[str], file: str
) -> str:
    """Describes a problem and names its origin: a command-line argument, or the file."""
    sentence = _describe(error)
    place = ".".join(str(part) for part in error["loc"])
    for override in reversed(overrides):  # the last one of a key wins
        key = override.partition("=")[0]
        inside = key.removeprefix(f"{place}.") if place else key
        if place and (place == key or place.startswith(f"{key}.")):
            from_here = True
        elif error["type"] == "extra_forbidden":  # an unknown section that is not in the file
            from_here = inside != key and place not in raw
        else:  # a combination of values that is invalid
            from_here = error["type"] == "value_error" and f"{inside}=" in error["msg"]
        if from_here:
            return f"argument {shortened_text(override)}: {sentence.removeprefix(f'{override}: ')}"
    return f"{file}: {sentence}"


def _expand_model(model: Any) -> Any:
    """Expands `gpt2-124m` and `{name: gpt2-124m, dropout: 0.1}`; keeps other values as they are.

    A path is that of a run directory, whose model is taken, or of a Hugging Face folder. A name
    with a colon is that of a function which returns a network.
    """
    if isinstance(model, str) and model not in model_names():
        if (kept := Path(model) / "config.yaml").is_file():
            return _model_of_run(read_yaml(kept))
        if (Path(model) / "config.json").is_file():
            return {"folder": model}
        if ":" in model:
            return {"factory": model}
    if isinstance(model, str):
        return shipped_model(model)
    if isinstance(model, dict) and model.get("name") in model_names():
        return {**shipped_model(model["name"]), **model}
    # A name beside sizes is a word of one's own; without them it must be that of a shipped model.
    sizes = {"n_layers", "hidden_size", "n_heads", "factory", "folder"}
    if isinstance(model, dict) and "name" in model and not sizes & {*model}:
        return shipped_model(str(model["name"]))
    return model


def _model_of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model of a run directory without its heads, which a run's task chooses."""
    heads = ("token_head", "n_labels", "span_head", "sentence_pair")
    model = run.get("model")
    return {k: v for k, v in model.items() if k not in heads} if isinstance(model, dict) else {}


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(
            f"'{override}' is not an override: write section.key=value, such as train.steps=100"
        )
    try:
        value = parse_yaml(text) if text else ""
    except ValueError:
        value = text
    *sections, last = key.split(".")
    here = values
    for section in sections:
        below = here.get(section)
        if section == "model" and isinstance(below, str):
            below = {"name": below} if below in model_names() else _expand_model(below)
        if section == "data" and isinstance(below, list):
            below = {"sources": below}
        if below is None:
            below = {}
        if not isinstance(below, dict):
            raise ConfigError(f"'{override}': {section} is a value, not a section")
        here[section] = below = dict(below)
        here = below
    here[last] = value


def read_yaml(path: Path, keys: str = "model, data, layout, train") -> dict[str, Any]:
    """Reads a YAML file that is a mapping.

    Args:
        path: The file.
        keys: The keys that it may have, for the message if it is no mapping.

    Raises:
        ConfigError: It cannot be read, or is no mapping.
    """
    try:
        raw = parse_yaml(read_text(path, _MOST_BYTES))
    except UnreadableError as error:
        raise ConfigError(str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid YAML ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {keys}")
    return raw


# --------------------------------------------------------------------------- messages

_SECTIONS = ("model", "data", "layout", "train")
_VERY_CLOSE = 0.75  # from this similarity on, a key counts as mistyped

# What pydantic calls a valid dictionary, a valid tuple and so on.
_SHAPES = {
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "path_type": "a path",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "a text",
}
# A setting for each key that is a section, a list or a mapping.
EXAMPLES = {
    "model": "model.name=gpt2-124m",
    "model.plan": "model.plan={layers.*.up: opening, layers.*.down: closing}",
    "model.rope_scaling": "model.rope_scaling={kind: linear, factor: 2}",
    "data": "data.path=data/mine",
    "data.sources": "data.sources=[{path: data/mine}]",
    "data.stages": "data.stages=[{from_step: 100, weights: {mine: 1}}]",
    "data.stages.weights": "data.stages=[{from_step: 100, weights: {mine: 1}}]",
    "data.validation": "data.validation=[{path: data/mine}]",
    "data.test": "data.test=[{path: data/mine}]",
    "layout": "layout.scheme=optimus",
    "layout.experts_over": "layout.experts_over=[dp]",
    "train": "train.steps=1000",
    "train.loggers": "train.loggers=[wandb]",
    "train.stop_signals": "train.stop_signals=[SIGTERM]",
}


def said_of(error: ErrorDetails) -> str:
    """Returns what one of pydantic's errors says of a value, in words for users."""
    if shape := _SHAPES.get(error["type"]):
        return f"must be {shape}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}".replace("input should be", "must be", 1)


def _describe(error: ErrorDetails) -> str:
    """Turns one of pydantic's errors into a sentence, which ends in a remedy if one is known."""
    keys = [str(part) for part in error["loc"]]
    where = ".".join(keys) or "run"
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}{_key_instead(keys)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    message = said_of(error)
    if error["type"] == "value_error":
        # A message about several keys names them itself.
        return message if message.startswith(f"{where}.") else f"{where}: {message}"
    got = error.get("input")
    if isinstance(got, str) and error["type"] == "literal_error":
        message += _value_instead(got, message)
    elif example := EXAMPLES.get(".".join(key for key in keys if not key.isdecimal())):
        message += f", such as {shlex.quote(example)}"
    if isinstance(got, str | int | float | bool):
        return f"{where}={shortened_text(got)}: {message}"
    return f"{where}: {message}"


def _key_instead(keys: list[str]) -> str:
    """Returns what to write instead of an unknown key, as `closest` does.

    It may be what another library's word stands for, or a key of another section.
    """
    *path, word = keys
    section = _section(path)
    known = list(section.model_fields) if section else []
    meant = KEYS.get(plain(word), "")
    if not meant and not difflib.get_close_matches(word, known, n=1, cutoff=_VERY_CLOSE):
        meant = key_of(word)
    if not meant:
        return closest(word, known)
    here = ".".join([*path, ""])
    shown = meant if "=" in meant else meant.removeprefix(here)
    return f": did you mean '{shown}'{NOTES.get(meant, '')}?"


def key_of(word: str) -> str:
    """Returns the key of a run file that ends in a word, or that it stands for; "" if none does."""
    if meant := KEYS.get(plain(word)):
        return meant
    *path, last = plain(word).split(".")
    for names in [path] if path else [[name] for name in _SECTIONS]:
        if (section := _section(names)) and last in section.model_fields:
            return ".".join([*names, last])
    return ""


def _value_instead(got: str, message: str) -> str:
    """Returns what to write instead of a value, given a message that lists what is known."""
    known = message.removeprefix("must be ").replace(" or ", ", ").split(", ")
    known = [word.strip("'") for word in known]
    meant = VALUES.get(plain(got), "")
    setting = KEYS.get(plain(got), "")
    if meant not in known:
        meant = setting if "=" in setting else ""  # a value of another key
    meant = meant or next(iter(difflib.get_close_matches(got, known, n=1, cutoff=0.5)), "")
    return f": did you mean '{meant}'?" if meant else ""


def _section(keys: list[str]) -> type[BaseModel] | None:
    """Returns the config class at this path of keys, or None if there is none."""
    section: type[BaseModel] = RunConfig
    for key in keys:
        if key.isdecimal():  # the number of an entry in a list
            continue
        if key not in section.model_fields:
            return None
        annotation = section.model_fields[key].annotation
        # A section that may be left out is a union with None.
        kinds = [x for x in (annotation, *get_args(annotation)) if isinstance(x, type)]
        below = next((x for x in kinds if issubclass(x, BaseModel)), None)
        if below is None:
            return None
        section = below
    return section
