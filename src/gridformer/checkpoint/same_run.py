"""What may differ between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gridformer.checkpoint.manifest import Manifest
from gridformer.config import RunConfig
from gridformer.data.fingerprint import Fingerprint
from gridformer.utils.errors import CheckpointError

# Keys of `model` that may differ between a checkpoint and the run that resumes from it.
_MAY_CHANGE = ("name", "dropout", "attention_dropout", "label_smoothing")
# Keys on which the order of samples depends.
_OF_DATA = (
    ("train", "global_batch"),
    ("data", "task"),
    ("data", "seq_len"),
    ("data", "source_len"),
)


def check_same_run(
    manifest: Manifest, run: RunConfig, folder: Path, data: Fingerprint | None = None
) -> None:
    """Checks that `run` continues the run that wrote a checkpoint.

    The layout, the schedule and what is reported may differ; settings on which the model depends
    may not, and the data and what its order depends on may if `data.restart` says so.

    Args:
        manifest: The checkpoint's manifest.
        run: The run.
        folder: The folder of the checkpoint.
        data: The fingerprint of the run's data; None compares only its path.

    Raises:
        CheckpointError: Such settings differ, and the message lists all of them; or no run can
            resume from the checkpoint.
    """
    if manifest.weights_only:
        raise CheckpointError(
            f"{folder} holds imported weights without the state of an optimizer, so no run "
            f"resumes from it: use another --out, with train.init_from={folder.parents[1]} to "
            "begin with these weights"
        )
    there, here = manifest.run, run.model_dump(mode="json")
    differences = other_model(manifest, run)
    # Older checkpoints do not have the key, because their runs began with random weights.
    begun, wanted_from = there["train"].get("init_from"), here["train"]["init_from"]
    if begun != wanted_from:
        differences.append(f"train.init_from is {wanted_from}, there {begun}")
    of_data = [] if run.data.restart else _of_data(manifest, run, data)
    if not differences and of_data:
        raise CheckpointError(
            f"{folder} belongs to a run with other data ({'; '.join(of_data)}): use another --out "
            f"for this run, or data.restart=true to begin the order of samples anew after step "
            f"{manifest.step}"
        )
    if differences:
        raise CheckpointError(
            f"{folder} belongs to another run ({'; '.join(differences + of_data)}): use another "
            "--out for this run"
        )


def other_model(manifest: Manifest, run: RunConfig) -> list[str]:
    """Returns the settings by which a run has another model than a checkpoint."""
    here = run.model_dump(mode="json")
    keys = [("model", key) for key in here["model"] if key not in _MAY_CHANGE]
    return _differences(manifest.run, here, [*keys, ("train", "seed")])


def data_start_of(manifest: Manifest, run: RunConfig, data: Fingerprint | None = None) -> int:
    """Returns the step at which the order of samples began for a run that resumes.

    That is the step of the checkpoint if `data.restart` is set and the data or settings of it
    differ from those there. A run that resumes once more, with the same data and settings, goes on
    in the same order.
    """
    if run.data.restart and _of_data(manifest, run, data):
        return manifest.step
    return manifest.data_start


def _of_data(manifest: Manifest, run: RunConfig, data: Fingerprint | None) -> list[str]:
    """Returns what differs in the data and in the settings on which its order depends.

    The same data may have moved to another path.
    """
    found = _differences(manifest.run, run.model_dump(mode="json"), _OF_DATA)
    path, there = str(run.data.path), manifest.run["data"]["path"]
    if data is not None and manifest.data is not None:
        changed = data.differences(manifest.data)
        if changed:
            found.append(f"data.path={path} has other data: {', '.join(changed)}")
    elif os.path.abspath(path) != os.path.abspath(there):
        found.append(f"data.path is {path}, there {there}")
    return found


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any], keys: Sequence[tuple[str, str]]
) -> list[str]:
    """Returns the keys whose values differ, of those that the checkpoint has."""
    return [
        f"{section}.{key} is {here[section][key]}, there {there[section][key]}"
        for section, key in keys
        if key in there.get(section, {}) and there[section][key] != here[section][key]
    ]
