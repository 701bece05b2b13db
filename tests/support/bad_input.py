"""Commands with mistakes in them: a valid command, and one to three things that are wrong with it.

A mistake is a value of a key in the run file or on the command line, an option, the text of the run
file, or what lies where a file should be. Values are either small or absurd: a size in between may
be valid, and then it takes the time that it takes.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from gridformer.config import Config, DataConfig, LayoutConfig, ModelConfig, RunConfig, TrainConfig
from gridformer.config.model import RopeScaling

RUN: dict[str, Any] = {
    "name": "tiny",
    "model": {"family": "gpt2", "n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 16},
    "data": {"path": "tokens"},
    "train": {"steps": 2, "global_batch": 4, "eval_batches": 1, "device": "cpu"},
}
CHECKPOINT = "trained/checkpoints/step-00000002"

COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "run.yaml"),
    "resume": ("train", "run.yaml", "train.steps=3", "--out", "trained"),
    "explain": ("train", "run.yaml", "--explain"),
    "memory": ("memory", "run.yaml"),
    "check": ("check", "run.yaml"),
    "predict": ("predict", "run.yaml", "--cluster", "cluster.yaml"),
    "layouts": ("layouts", "run.yaml", "--devices", "2"),
    "prepare": ("prepare", "corpus", "--out", "prepared", "--vocab-size", "300"),
    "generate": ("generate", "trained", "--prompts", "prompts.jsonl"),
    "evaluate": ("evaluate", "trained", "--tasks", "text:corpus/1.txt"),
    "export": ("export", "trained", "--out", "exported"),
    "average": ("average", "trained", "--last", "2", "--out", "averaged"),
    "report": ("report", "trained", "--html", "page.html", "--seconds", "0"),
    "import": ("import", "hf", "--out", "imported"),
    "plan": ("plan", "run.yaml", "--cluster", "cluster.yaml", "--devices", "2"),
    "verify": ("verify", "trained"),
    "health": ("health", "trained"),
    "slurm": ("launch", "slurm", "run.yaml", "--devices-per-node", "1"),
    "kubernetes": ("launch", "kubernetes", "run.yaml", "--devices-per-node", "1", "--image", "x"),
    "torchrun": ("launch", "torchrun", "run.yaml", "--cluster", "cluster.yaml"),
}
# Every second command trains: it checks the most, and it is what a mistake costs hours with.
NAMES = [*["train"] * 9, "resume", *COMMANDS]
LAUNCHES = ("slurm", "kubernetes", "torchrun")
OVERRIDDEN = (
    *("train", "resume", "explain", "memory", "check", "predict", "plan", "layouts", *LAUNCHES),
)
_TOKENS = (
    *("run.yaml", "tokens", "tokens/index.json", "tokens/tokenizer.json", "tokens/train.bin"),
    *("tokens/train.idx", "tokens/val.bin", "tokens/val.idx"),
)
_TRAINED = (
    *("trained", "trained/config.yaml", "trained/tokenizer.json", "trained/checkpoints"),
    *("trained/metrics.jsonl", "trained/events.jsonl"),
    *(CHECKPOINT, f"{CHECKPOINT}/checkpoint.json", f"{CHECKPOINT}/shard-00001.safetensors"),
)
# The files that a command reads; those that are not here read what `train` reads.
FILES = {
    "train": _TOKENS,
    "resume": (*_TOKENS, *_TRAINED),
    "predict": (*_TOKENS, "cluster.yaml"),
    "prepare": ("corpus", "corpus/1.txt"),
    "generate": (*_TRAINED, "prompts.jsonl"),
    "evaluate": (*_TRAINED, "corpus/1.txt"),
    "export": _TRAINED,
    "average": _TRAINED,
    "report": ("trained", "trained/config.yaml", "trained/metrics.jsonl", "trained/heartbeat.json"),
    "plan": ("run.yaml", "cluster.yaml"),
    "verify": _TRAINED,
    "health": ("trained", "trained/heartbeat.json"),
    "import": ("hf", "hf/config.json", "hf/model.safetensors", "hf/tokenizer.json"),
}
OPTIONS = (
    *("--nproc", "--out", "--ranks", "--budget", "--cluster", "--processes", "--scheme"),
    *("--vocab-size", "--val-fraction", "--tokenizer", "--pair-keys"),
    *("--tokenizer-sample-mb", "--seed", "--suffix", "--text-key", "--max-tokens", "--batch-size"),
    *("--temperature", "--top-k", "--top-p", "--beams", "--device", "--tasks", "--stride"),
    *("--length", "--limit", "--dtype", "--shard-gib", "--prompts", "--json", "--no-such-option"),
    *("--devices", "--batch", "--top", "--emit", "--html", "--seconds", "--max-age-s", "--last"),
    *("--devices-per-node", "--run-dir", "--hours", "--interface", "--sbatch", "--before"),
    *("--image", "--claim", "--memory-gib", "--rendezvous", "--master", "--max-restarts"),
    "--timeout",
)
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 5, 7, -1, 2**31, 2**40, 2**53 + 1, 2**63, 2**64, 10**30, -(10**30)),
    *(0.5, 1.5, -0.1, 1e-300, 1e300, 1e31, float("inf"), float("nan"), True, False, None),
    *("", " ", "a", "3", "auto", "none", "nan", "gpt2", "gpt2-124m", "tokens", "run.yaml", "\0"),
    *("..", "../..", "/", "a/b", "a\\b", "x" * 300, "a/" * 3000, "\x1b[31m", "\u202e", "\ud800"),
    *("é", "*", "~", "/dev/zero", "/dev/full", "/proc/self/mem", "no such file", "[1", "{"),
    *([], [1], [[[[1]]]], {}, {"a": 1}, {"name": "gpt2-124m"}, "9" * 5000, "2020-13-41"),
)
TEXTS = (
    *("", "null", "3", "[]", "- 1", "just words", "a: b: c", "\0", "\ufeff{}", "!!python/name:os"),
    *("[" * 5000, "{a: " * 3000, "x: " + "9" * 5000, "x: 2020-13-41", "&x [*x]", "a: *b"),
    "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(
        f"{b}: &{b} [{', '.join(f'*{a}' for _ in range(8))}]\n"
        for a, b in zip("abcdefgh", "bcdefghi")
    ),
    *("name: a\nname: b\n", "train: {steps: 1, steps: 2}", "? [1]\n: 2", "1: 2", "---\n---\n"),
)
INSTEAD = (
    *("missing", "folder", "pipe", "zero", "full", "empty", "bytes", "deep", "loop", "half"),
    *("null", "number", "list", "object", "flipped", "longer", "unreadable", "mistaken"),
)


@dataclass(frozen=True)
class Change:
    """What happens to a file of the folder: `kind` is `set`, `text` or an element of INSTEAD."""

    kind: str
    place: str
    value: Any = None

    def __call__(self, folder: Path) -> None:
        """Change the file, unless an earlier change has taken it away."""
        if self.kind == "set":
            _set(folder / "run.yaml", self.place, self.value)
        elif self.kind == "text":
            _text(folder / "run.yaml", self.place, self.value)
        else:
            _replace(folder / self.place, self.kind, self.value)


@dataclass
class Command:
    """A command of the command line in a folder of its own.

    Attributes:
        words: What is typed after `gridformer`.
        changes: What happens to the folder before.
    """

    words: list[str]
    changes: list[Change] = field(default_factory=list)


def keys() -> list[str]:
    """Returns the keys that a run file may have, and some that it may not."""
    sections: dict[str, type[Config]] = {"model": ModelConfig, "layout": LayoutConfig}
    sections |= {"data": DataConfig, "train": TrainConfig, "model.rope_scaling": RopeScaling}
    keys = [f"{name}.{key}" for name, config in sections.items() for key in config.model_fields]
    return [*RunConfig.model_fields, "no_such_key", "train.no_such_key", *keys]


def written(value: Any) -> str:
    """Returns a value as somebody would write it after `=`."""
    if isinstance(value, str):
        return value.replace("\0", "\\0")  # which no argument of a process can contain
    return json.dumps(value)


@st.composite
def commands(draw: st.DrawFn) -> Command:
    """Returns a strategy of commands with mistakes."""
    name = draw(st.sampled_from(NAMES))
    command = Command([*COMMANDS[name]])
    kinds = ["file", "file", "file", "file", "option", "argument"]
    if name in OVERRIDDEN:
        kinds += ["override", "override", "override", "in the file", "in the file", "text"]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)):
        value = draw(st.sampled_from(VALUES))
        if kind == "override":
            command.words.append(f"{draw(st.sampled_from(keys()))}={written(value)}")
        elif kind == "option":
            command.words += [draw(st.sampled_from(OPTIONS)), written(value)]
        elif kind == "argument":
            place = draw(st.integers(1, len(command.words) - 1))
            command.words[place] = written(value)
        elif kind == "in the file":
            command.changes.append(Change("set", draw(st.sampled_from(keys())), value))
        elif kind == "text":
            text, after = draw(st.sampled_from(TEXTS)), draw(st.booleans())
            command.changes.append(Change("text", text, after))
        else:
            path = draw(st.sampled_from(FILES.get(name, _TOKENS)))
            instead = draw(st.sampled_from(INSTEAD))
            command.changes.append(Change(instead, path, value))
    return command


def _set(file: Path, key: str, value: Any) -> None:
    if file.is_symlink() or (file.exists() and not file.is_file()):
        return  # an earlier change has put a pipe or a device there, which cannot be edited
    try:
        whole: Any = yaml.safe_load(file.read_text()) if file.is_file() else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # the work of an earlier change
        return
    *sections, last = key.split(".")
    here = whole
    for section in sections:
        here = here.setdefault(section, {}) if isinstance(here, dict) else None
    if isinstance(here, dict) and file.parent.is_dir():
        here[last] = value
        file.write_text(yaml.safe_dump(whole))


def _text(file: Path, text: str, after: bool) -> None:
    if file.is_file() and not file.is_symlink():
        file.write_bytes((file.read_bytes() if after else b"") + text.encode())


def _replace(file: Path, instead: str, value: Any) -> None:
    if instead == "mistaken":
        _mistake(file, value)
        return
    if not file.parent.is_dir():
        return
    before = file.read_bytes() if file.is_file() else b""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    if instead == "folder":
        file.mkdir()
    elif instead == "pipe":
        os.mkfifo(file)
    elif instead in ("zero", "full"):
        file.symlink_to(f"/dev/{instead}")
    elif instead == "loop":
        file.symlink_to(file.name)
    elif instead != "missing":
        file.write_bytes(_content(instead, before))
        if instead == "unreadable":
            file.chmod(0)


def _content(instead: str, before: bytes) -> bytes:
    middle = len(before) // 2
    return {
        "bytes": bytes(range(256)),
        "deep": b"[" * 100_000,
        "half": before[:middle],
        "null": b"null",
        "number": b"3",
        "list": b"[]",
        "object": b"{}",
        "flipped": before[:middle] + bytes(255 - byte for byte in before[middle:]),
        "longer": before + b"0" * 1000,
    }.get(instead, before if instead == "unreadable" else b"")


def _mistake(file: Path, value: Any) -> None:
    """Replaces a value in a file of JSON."""
    if file.suffix != ".json" or not file.is_file():
        return
    try:
        whole = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return
    if isinstance(whole, dict) and whole:
        whole[sorted(whole)[len(str(value)[:50]) % len(whole)]] = value
        file.write_text(json.dumps(whole))
