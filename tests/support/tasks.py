"""Small data sets in the formats of GLUE, SQuAD and RACE, with answers that can be learned."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.prepare.tasks import prepare_task

WORDS = ("red", "green", "blue", "stone", "river", "cloud", "fox", "owl", "runs", "sings", "over")
LABELS = ("contradiction", "entailment", "neutral")
SIZES = {"train": 60, "dev": 21}


def text(draw: np.random.Generator, n: int) -> str:
    return " ".join(draw.choice(WORDS, n))


def write_mnli(folder: Path) -> Path:
    """Write GLUE's files: the last word of the second sentence tells the label."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for name, n in (("train", SIZES["train"]), ("dev_matched", 21), ("dev_mismatched", 10)):
        rows = ["index\tsentence1\tsentence2\tlabel1\tgold_label"]
        for i in range(n):
            label = int(draw.integers(3))
            rows.append(f"{i}\t{text(draw, 5)}\t{text(draw, 2)} {WORDS[label]}\tx\t{LABELS[label]}")
        rows.append("77\ta pair\twithout agreement\tx\t-")
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def write_qqp(folder: Path) -> Path:
    """Write GLUE's files: the first words of two questions tell whether they are duplicates."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(4)
    for name, n in (("train", 240), ("dev", 60)):
        rows = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
        for i in range(n):
            label = int(draw.integers(2))
            pair = f"{WORDS[0]} {text(draw, 3)}\t{WORDS[1 - label]} {text(draw, 3)}"
            rows.append(f"{i}\t1\t2\t{pair}\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def write_sts_b(folder: Path) -> Path:
    """Write GLUE's files: the score is that of the last word of the second sentence."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(3)
    for name, n in SIZES.items():
        rows = ["index\tsentence1\tsentence2\tscore"]
        for i in range(n):
            word = int(draw.integers(len(WORDS)))
            rows.append(f"{i}\t{text(draw, 4)}\t{text(draw, 2)} {WORDS[word]}\t{word / 2:.3f}")
        rows.append("77\ta pair\twithout a score\t")
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def write_squad(folder: Path, version: str = "v2.0") -> Path:
    """Write SQuAD's files; in version 2.0 every other question has no answer."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(1)
    for name, n in (("train", 20), ("dev", 9)):
        paragraphs = []
        for i in range(n):
            context, begin = text(draw, 40), int(draw.integers(38))
            words = context.split()
            start = sum(len(word) + 1 for word in words[:begin])
            answer = {"text": " ".join(words[begin : begin + 2]), "answer_start": start}
            one: dict[str, Any] = {"id": f"{name}-{i}", "question": "which words?"}
            asked = [one | {"answers": [answer]}]
            if version == "v2.0":
                none = {"id": f"{name}-{i}-none", "question": "why?", "answers": []}
                asked = [asked[0] | {"is_impossible": False}, none | {"is_impossible": True}]
            paragraphs.append({"context": context, "qas": asked})
        data = {"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"{name}-{version}.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def write_race(folder: Path) -> Path:
    """Write RACE's folders: two questions for each text; a word tells which answer is right."""
    draw = np.random.default_rng(2)
    for split, n in (("train", 12), ("dev", 5)):
        for i in range(n):
            right = [int(draw.integers(4)) for _ in range(2)]
            raw = {
                "article": text(draw, 20),
                "questions": ["The _ is here.", "Which one?"],
                "options": [[f"{WORDS[k != j]} {text(draw, 1)}" for j in range(4)] for k in right],
                "answers": ["ABCD"[k] for k in right],
                "id": f"{i}.txt",
            }
            place = folder / split / ("high" if i % 2 else "middle")
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i}.txt").write_text(json.dumps(raw), encoding="utf-8")
    return folder


# What writes the data of a shipped run file, by the name of that file.
WRITE: dict[str, Callable[[Path], Path]] = {
    "mnli": write_mnli,
    "qqp": write_qqp,
    "sts-b": write_sts_b,
    "squad": partial(write_squad, version="v1.1"),
    "squad2": write_squad,
    "race": write_race,
}


def words_tokenizer() -> Tokenizer:
    """Return a tokenizer that has seen the words of these data sets."""
    return Tokenizer.train([" ".join(WORDS) + " which words? why? The is here. Which one?"], 340)


def examples(name: str, folder: Path, tokenizer: Tokenizer | None = None) -> TokenFolder:
    """Write the data of a shipped run file and prepare them; returns the token folder."""
    kind, out = name.removesuffix("2"), folder / f"{name}-tokens"
    return prepare_task(kind, WRITE[name](folder / name), out, tokenizer or words_tokenizer())
