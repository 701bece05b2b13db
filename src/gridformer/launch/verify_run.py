"""`gridformer verify`: whether everything in a run directory is what a run wrote there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import MANIFEST, Manifest, verify_checkpoint
from gridformer.checkpoint.remote import Remote, reading
from gridformer.checkpoint.same_run import other_model
from gridformer.config import RunConfig
from gridformer.config.yaml_text import parse_yaml
from gridformer.data import RunData, Tokenizer
from gridformer.data.fingerprint import fingerprint
from gridformer.launch.run_lock import LOCK, holder_of, is_held
from gridformer.train.metrics import METRICS, MOST_BYTES
from gridformer.utils.errors import CheckpointError, DataError, UserError
from gridformer.utils.files import read_bytes, read_text
from gridformer.utils.folders import private_prefix
from gridformer.utils.units import format_bytes

CONFIG, TOKENIZER = "config.yaml", "tokenizer.json"
# What killed runs leave, which the next run removes or replaces.
_LEFTOVERS = (".writing-*", ".deleting-*", ".lock-*", "*.tmp")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class RunFinding:
    """What was found about one thing in a run directory.

    Attributes:
        what: The thing, such as `step-00000100`.
        ok: Whether it is as it should be.
        note: A phrase about it, or a sentence with a remedy.
    """

    what: str
    ok: bool
    note: str


def verify_run(
    run_dir: Path, finite: bool = False, tell: Tell = lambda doing: None
) -> list[RunFinding]:
    """Checks a run directory as a whole, or one checkpoint. Nothing in it is changed.

    Args:
        run_dir: A run directory, or one of its checkpoints.
        finite: Whether to check besides that all tensors are finite.
        tell: Receives progress messages.

    Raises:
        UserError: It is neither.
    """
    if (run_dir / MANIFEST).is_file():
        return [_checkpoint(run_dir, finite)[0]]
    parts = (CONFIG, METRICS, "checkpoints")
    if not any((run_dir / name).exists() for name in parts):
        raise UserError(
            f"{run_dir} is not a run directory, because it has no {', '.join(parts[:-1])} or "
            f"{parts[-1]}: name one that `gridformer train` wrote, such as runs/demo"
        )
    held = is_held(run_dir)
    findings = [*_lock(run_dir, held), (configured := _config(run_dir))[0]]
    manifests: list[Manifest] = []
    folders = find.complete(run_dir)
    for number, folder in enumerate(folders, start=1):
        tell(f"verifying checkpoint {number} of {len(folders)}, {_size(folder)}")
        found, manifest = _checkpoint(folder, finite)
        if held and not folder.exists():
            continue  # the run has removed it meanwhile, because it keeps only some
        if manifest is not None:
            manifests.append(manifest)
        findings.append(found)
    if not folders:
        findings.append(RunFinding("checkpoints", True, "there are none"))
    run, last = configured[1], manifests[-1] if manifests else None
    if run and run.train.checkpoint_to:
        url = run.train.checkpoint_to
        note = f"at {url}, not looked at: `gridformer verify {url}` verifies them"
        findings.append(RunFinding("copies", True, note))
    if run and last:
        findings += _agree(run, last)
    findings += [*_metrics(run_dir, last, held), *_tokenizer(run_dir, last)]
    findings += [*_data(run, last), *_others(run_dir, held)]
    return findings


def _lock(run_dir: Path, held: bool) -> Iterator[RunFinding]:
    path, holder = run_dir / LOCK, holder_of(run_dir)
    if held:
        yield RunFinding(LOCK, True, f"in use by {holder}")
    elif path.is_file():
        yield RunFinding(LOCK, True, f"left by {holder or 'a run'}; the next run replaces it")
    elif os.path.lexists(path):
        yield RunFinding(LOCK, False, f"{path} is no file, so no run can use it: remove it")


def _config(run_dir: Path) -> tuple[RunFinding, RunConfig | None]:
    path = run_dir / CONFIG
    if not path.exists():
        return RunFinding(CONFIG, False, f"{path} is missing: the next run writes it"), None
    try:
        run = RunConfig.model_validate(parse_yaml(read_text(path)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        why = " ".join(f"{where}: {first['msg']}".split())
    except (UserError, ValueError) as error:
        why = " ".join(str(error).split())
    else:
        return RunFinding(CONFIG, True, "readable"), run
    return RunFinding(
        CONFIG, False, f"{path} is damaged ({why}): the next run writes it anew"
    ), None


def _checkpoint(folder: Path, finite: bool) -> tuple[RunFinding, Manifest | None]:
    try:
        manifest = verify_checkpoint(folder)
        if finite:
            _check_finite(folder, manifest)
    except (CheckpointError, OSError) as error:
        return RunFinding(folder.name, False, str(error)), None
    numbers = ", all finite" * finite
    n_files = len(manifest.files)
    note = f"{n_files} file{'s' * (n_files > 1)}, {_size(folder)}{numbers}"
    return RunFinding(folder.name, True, note), manifest


def _check_finite(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError that names the first tensor with a NaN or an infinity."""
    import torch

    from gridformer.checkpoint.safetensors_file import opened_file

    for name in sorted(manifest.files):
        with opened_file(folder / name) as file:
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                tensor = file.get_tensor(key)
                if not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(
                        f"{folder / name}: '{key}' has values that are not finite: resume from a "
                        "checkpoint before it, with a lower train.lr"
                    )


def _agree(run: RunConfig, last: Manifest) -> Iterator[RunFinding]:
    different = other_model(last, run)
    if different:
        told = "; ".join(different)
        yield RunFinding(
            CONFIG, False, f"it belongs to another run than step {last.step} does ({told})"
        )


def _metrics(run_dir: Path, last: Manifest | None, held: bool) -> Iterator[RunFinding]:
    path = run_dir / METRICS
    if last is not None and last.weights_only:
        return
    if not path.is_file():
        if last is not None:
            yield RunFinding(METRICS, False, f"{path} is missing: losses so far are lost")
        return
    steps: list[int] = []
    try:
        lines = read_bytes(path, MOST_BYTES).split(b"\n")
    except UserError as error:
        yield RunFinding(METRICS, False, str(error))
        return
    torn = lines.pop() != b""
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            yield RunFinding(METRICS, False, f"line {number} cannot be read: remove that line")
            return
    for before, after in pairwise(steps):
        if after != before + 1:
            yield RunFinding(METRICS, False, f"after step {before} comes step {after}")
            return
    end = steps[-1] if steps else 0
    if last is not None and end < last.step:
        yield RunFinding(
            METRICS, False, f"it ends at step {end}, but a checkpoint is of step {last.step}"
        )
        return
    if last is not None and steps and steps[0] > 1:
        yield RunFinding(METRICS, False, f"it begins at step {steps[0]}")
        return
    note = f"{len(lines)} lines, up to step {end}"
    if torn and not held:
        note += "; a killed run left half a line, which the next run removes"
    yield RunFinding(METRICS, True, note)


def _tokenizer(run_dir: Path, last: Manifest | None) -> Iterator[RunFinding]:
    path = run_dir / TOKENIZER
    if not path.is_file():
        if last is not None and not last.weights_only:
            yield RunFinding(TOKENIZER, False, f"{path} is missing: copy that of the data there")
        return
    try:
        found = Tokenizer.load(path)
    except DataError as error:
        yield RunFinding(TOKENIZER, False, str(error))
        return
    ours = last if last is not None and not last.weights_only else None
    if ours and found.vocab_size > ours.model.vocab_size:
        yield RunFinding(
            TOKENIZER,
            False,
            f"it has {found.vocab_size} words, but the model only {ours.model.vocab_size}: it is "
            "another tokenizer, so copy that of the data there",
        )
    else:
        yield RunFinding(TOKENIZER, True, f"{found.vocab_size} words")


def _data(run: RunConfig | None, last: Manifest | None) -> Iterator[RunFinding]:
    """Compares the data with that of the last checkpoint, if both are there."""
    if run is None or last is None or last.data is None or not run.data.exists:
        return
    try:
        changed = fingerprint(RunData.open(run.data)).differences(last.data)
    except (DataError, OSError) as error:
        yield RunFinding("data", False, str(error))
        return
    if changed:
        told = ", ".join(changed)
        yield RunFinding("data", False, f"{_named(run)} has changed since the checkpoint ({told})")
    else:
        yield RunFinding("data", True, f"{_named(run)} is that of the checkpoint")


def _named(run: RunConfig) -> str:
    """Returns the folder of a run, or the names of its sources, as a subject."""
    names = " and ".join(one.name for one in run.data.sources)
    return f"the data of {names}" if names else str(run.data.path)


def _others(run_dir: Path, held: bool) -> Iterator[RunFinding]:
    """Names what is left of killed runs, and what no run has written."""
    checkpoints = run_dir / "checkpoints"
    known = {folder.name for folder in find.complete(run_dir)}
    left = {path for at in (run_dir, checkpoints) for name in _LEFTOVERS for path in at.glob(name)}
    if left and not held:
        names = ", ".join(sorted(path.name for path in left))
        yield RunFinding("leftovers", True, f"{names}: the next run removes them")
    for path in sorted(checkpoints.glob("*")):
        if path in left or path.name in known:
            continue
        if path.name.startswith(("damaged-", "rolled-back-")):
            by = "train.fallback" if path.name.startswith("damaged") else "train.on_divergence"
            note = f"left aside by {by}; remove it when you do not need it"
            yield RunFinding(path.name, True, note)
        else:
            yield RunFinding(path.name, False, f"{path} is no checkpoint's folder: move it away")


def _size(folder: Path) -> str:
    return format_bytes(sum(path.stat().st_size for path in folder.glob("*") if path.is_file()))


def verify_copies(
    url: str, finite: bool = False, tell: Tell = lambda doing: None
) -> list[RunFinding]:
    """Checks the checkpoints at a URL. Each is copied into a temporary folder, one at a time.

    Args:
        url: What `train.checkpoint_to` of a run is.
        finite: Whether to check besides that all tensors are finite.
        tell: Receives progress messages.

    Raises:
        UserError: The URL cannot be read, or has no checkpoint.
    """
    found: list[RunFinding] = []
    with reading(url):
        remote = Remote(url)
        names = remote.complete()
        if not names:
            raise UserError(
                f"there is no checkpoint at {url}: name the train.checkpoint_to of the run"
            )
        for number, name in enumerate(names, start=1):
            tell(f"copying and verifying checkpoint {number} of {len(names)}")
            with tempfile.TemporaryDirectory(prefix=private_prefix()) as folder:
                found += _verify(remote, name, Path(folder) / name, finite)
    return found


def _verify(remote: Remote, name: str, copy: Path, finite: bool) -> list[RunFinding]:
    try:
        remote.download(name, copy)
    except CheckpointError as error:
        return [RunFinding(name, False, str(error))]
    return verify_run(copy, finite)
