"""What may differ between a checkpoint and the run that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gridformer.checkpoint.manifest import Manifest
from gridformer.config import RunConfig
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


def check_same_run(manifest: Manifest, run: RunConfig, folder: Path) -> None:
    """Checks that `run` continues the run that wrote a checkpoint.

    The layout, the schedule and what is reported may differ; settings on which the model depends
    may not, and those on which the order of its data depends may if `data.restart` says so.

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
    keys = [("model", key) for key in here["model"] if key not in _MAY_CHANGE]
    differences = _differences(there, here, [*keys, ("train", "seed")])
    # Older checkpoints do not have the key, because their runs began with random weights.
    begun, wanted_from = there["train"].get("init_from"), here["train"]["init_from"]
    if begun != wanted_from:
        differences.append(f"train.init_from is {wanted_from}, there {begun}")
    of_data = [] if run.data.restart else _differences(there, here, _OF_DATA)
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


def data_start_of(manifest: Manifest, run: RunConfig) -> int:
    """Returns the step at which the order of samples began for a run that resumes.

    That is the step of the checkpoint if `data.restart` is set and settings of the data differ from
    those there. A run that resumes once more, with the same settings, goes on in the same order.
    """
    keys = [*_OF_DATA, ("data", "path")]
    if run.data.restart and _differences(manifest.run, run.model_dump(mode="json"), keys):
        return manifest.step
    return manifest.data_start


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any], keys: Sequence[tuple[str, str]]
) -> list[str]:
    """Returns the keys whose values differ, of those that the checkpoint has."""
    return [
        f"{section}.{key} is {here[section][key]}, there {there[section][key]}"
        for section, key in keys
        if key in there.get(section, {}) and there[section][key] != here[section][key]
    ]
