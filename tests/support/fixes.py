"""Runs that may be invalid, the problems found in them, and the suggested changes."""

from collections.abc import Mapping
from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.validation import violations

Changes = Mapping[str, Any]  # keys to set together, with their values


def run_of(**changes: Any) -> RunConfig:
    """Return a changed copy of a run that fits one device, as in `run_of(**{"layout.cols": 2})`."""
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


def changed(run: RunConfig, changes: Changes) -> RunConfig:
    """Apply changes to a run as a run file would; raises if the result is no valid run."""
    raw = run.model_dump()
    for key, value in changes.items():
        section, name = key.split(".")
        assert name in raw[section], key
        raw[section][name] = value if isinstance(value, bool | tuple) else str(value)
    return RunConfig.model_validate(raw)


def rules(run: RunConfig) -> set[str]:
    """Return the names of the rules that a run breaks."""
    return {violation.rule for violation in violations(run)}
