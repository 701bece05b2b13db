"""Runs that may not fit, and what the sentences that refuse them offer."""

from __future__ import annotations

import re
from typing import Any

from gridformer.config import RunConfig
from gridformer.errors import ConfigError
from gridformer.layout import check

Offer = dict[str, str]  # keys to set together, with their values


def run_of(**changes: Any) -> RunConfig:
    """`run_of(**{"layout.cols": 2})`: a run that fits one device, changed."""
    raw: dict[str, dict[str, Any]] = {
        "model": {"n_layers": 1, "hidden_size": 48, "n_heads": 12, "max_seq_len": 24},
        "data": {"path": "somewhere"},
        "layout": {},
        "train": {"global_batch": 24},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        raw[section][name] = value
    return RunConfig.model_validate(raw)


def changed(run: RunConfig, offer: Offer) -> RunConfig:
    """The run with an offer taken. Raises if that is no valid run."""
    raw = run.model_dump()
    for key, value in offer.items():
        section, name = key.split(".")
        assert name in raw[section], key
        raw[section][name] = value
    return RunConfig.model_validate(raw)


def problems(run: RunConfig) -> list[str]:
    try:
        check(run)
    except ConfigError as error:
        return error.problems
    return []


def offers(problem: str) -> list[Offer]:
    """Every alternative of a sentence that ends in `use a=1 and b=2, or c=3, 4 or 5`."""
    remedy = re.split(r"[:;] use ", problem)[1]
    remedy = re.sub(r" \(.*?\)", "", remedy)
    found: list[Offer] = []
    for alternative in re.split(r",? or (?=[a-z_.]+=)", remedy):
        pairs = [part.split("=") for part in alternative.split(" and ")]
        assert all(len(pair) == 2 for pair in pairs), alternative
        keys = [key if "." in key else f"layout.{key}" for key, _ in pairs]
        if len(pairs) == 1:
            values = [v for v in re.split(r", | or ", pairs[0][1]) if v != "..."]
            found += [{keys[0]: value} for value in values]
        else:
            found.append(dict(zip(keys, (value for _, value in pairs))))
    assert found, problem
    return found


def subject(problem: str) -> str:
    """What a sentence complains of, without its numbers: `model.n_heads ... layout.cols`."""
    if problem.startswith("train.global_batch"):
        return "train.global_batch"
    if problem.startswith("layout.devices_per_node"):  # whatever it names of the layout
        return "layout.devices_per_node"
    return re.sub(r"=[^ :;]*", "", re.split(r"[:;] use ", problem)[0])


def subjects(run: RunConfig) -> set[str]:
    return {subject(problem) for problem in problems(run)}
