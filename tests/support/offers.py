"""Runs that may not fit, what is wrong with them, and what is offered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.validation import broken_rules

Offer = Mapping[str, Any]  # keys to set together, with their values


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
    """The run with an offer taken, as a run file would have it. Raises if that is no valid run."""
    raw = run.model_dump()
    for key, value in offer.items():
        section, name = key.split(".")
        assert name in raw[section], key
        raw[section][name] = str(value)
    return RunConfig.model_validate(raw)


def rules(run: RunConfig) -> set[str]:
    """Names of the rules that a run breaks."""
    return {broken.rule for broken in broken_rules(run)}
