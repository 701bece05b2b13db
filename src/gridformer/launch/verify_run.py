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
from gridformer.checkpoint.checkpoint import other_model
from gridformer.checkpoint.copies import reading
from gridformer.checkpoint.manifest import MANIFEST, Manifest, verify_checkpoint
from gridformer.checkpoint.store import RemoteStore
from gridformer.config import RunConfig
from gridformer.config.yaml_text import parse_yaml
from gridformer.data import RunData, Tokenizer
from gridformer.data.run_data import fingerprint
from gridformer.launch.run_lock import LOCK, holder_of, is_held
from gridformer.train.metrics import METRICS, MOST_BYTES
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.files import private_prefix, read_bytes, read_text
from gridformer.utils.units import format_bytes

CONFIG, TOKENIZER = "config.yaml", "tokenizer.json"
# What killed runs leave, which the next run removes or replaces.
_LEFTOVERS = (".writing-*", ".deleting-*", ".lock-*", "*.tmp")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class RunFinding:
    """The result of the check of one thing in a run directory, such as `step-00000100`."""

    what: str
    ok: bool
    note: str  # a phrase, or a sentence with a remedy


def verify_run(
    run_dir: Path, finite: bool = False, tell: Tell = lambda doing: None
) -> list[RunFinding]:
    """Checks a run directory as a whole, or one checkpoint. Nothing in it is changed.

    With `finite` all tensors are read, too, and must be finite.

    Raises:
        UserError: It is neither.
    """
    if (run_dir / MANIFEST).is_file():
        return [_checkpoint(run_dir, finite)[0]]
    if not any((run_dir / name).exists() for name in (CONFIG, METRICS, "checkpoints")):
        raise UserError(
            f"{run_dir} is not a run directory, because it has no {CONFIG}, {METRICS} or "
            "checkpoints: name one that `gridformer train` wrote, such as runs/demo"
        )
    held = is_held(run_dir)
    findings, run = _checked(LOCK, lambda: _lock(run_dir / LOCK, held)), None
    try:
        run = _config(run_dir / CONFIG)
        findings.append(RunFinding(CONFIG, True, "readable"))
    except UserError as error:
        findings.append(RunFinding(CONFIG, False, str(error)))
    last: Manifest | None = None
    folders = find.complete(run_dir)
    for number, folder in enumerate(folders, start=1):
        tell(f"verifying checkpoint {number} of {len(folders)}, {_size(folder)}")
        finding, manifest = _checkpoint(folder, finite)
        if held and not folder.exists():
            continue  # the run has removed it meanwhile, because it keeps only some
        last = manifest or last
        findings.append(finding)
    if not folders:
        findings.append(RunFinding("checkpoints", True, "there are none"))
    if run and run.train.checkpoint_to:
        url = run.train.checkpoint_to
        note = f"at {url}, not looked at: `gridformer verify {url}` verifies them"
        findings.append(RunFinding("copies", True, note))
    if run and last and (different := "; ".join(other_model(last, run))):
        note = f"it belongs to another run than step {last.step} does ({different})"
        findings.append(RunFinding(CONFIG, False, note))
    findings += _checked(METRICS, lambda: _metrics(run_dir / METRICS, last, held))
    findings += _checked(TOKENIZER, lambda: _tokenizer(run_dir / TOKENIZER, last))
    findings += _checked("data", lambda: _data(run, last))
    return [*findings, *_others(run_dir, held)]


def _checked(what: str, check: Callable[[], str]) -> list[RunFinding]:
    """Returns what a check says: its note, nothing if that is empty, or the error it raises."""
    try:
        note = check()
    except (UserError, OSError) as error:
        return [RunFinding(what, False, str(error))]
    return [RunFinding(what, True, note)] if note else []


def _lock(path: Path, held: bool) -> str:
    holder = holder_of(path.parent)
    if held:
        return f"in use by {holder}"
    if path.is_file():
        return f"left by {holder or 'a run'}; the next run replaces it"
    if os.path.lexists(path):
        raise UserError(f"{path} is no file, so no run can use it: remove it")
    return ""


def _config(path: Path) -> RunConfig:
    if not path.exists():
        raise UserError(f"{path} is missing: the next run writes it")
    try:
        return RunConfig.model_validate(parse_yaml(read_text(path)))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (UserError, ValueError) as error:
        why = str(error)
    raise UserError(f"{path} is damaged ({' '.join(why.split())}): the next run writes it anew")


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


def _metrics(path: Path, last: Manifest | None, held: bool) -> str:
    if last is not None and last.weights_only:
        return ""
    if not path.is_file():
        if last is None:
            return ""
        raise UserError(f"{path} is missing: losses so far are lost")
    steps: list[int] = []
    lines = read_bytes(path, MOST_BYTES).split(b"\n")
    torn = lines.pop() != b""
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"line {number} cannot be read: remove that line") from None
    for before, after in pairwise(steps):
        if after != before + 1:
            raise UserError(f"after step {before} comes step {after}")
    end = steps[-1] if steps else 0
    if last is not None and end < last.step:
        raise UserError(f"it ends at step {end}, but a checkpoint is of step {last.step}")
    if last is not None and steps and steps[0] > 1:
        raise UserError(f"it begins at step {steps[0]}")
    half = "; a killed run left half a line, which the next run removes" * (torn and not held)
    return f"{len(lines)} lines, up to step {end}{half}"


def _tokenizer(path: Path, last: Manifest | None) -> str:
    ours = last if last is not None and not last.weights_only else None
    if not path.is_file():
        if ours is None:
            return ""
        raise UserError(f"{path} is missing: copy that of the data there")
    tokenizer = Tokenizer.load(path)
    if ours and tokenizer.vocab_size > ours.model.vocab_size:
        raise UserError(
            f"it has {tokenizer.vocab_size} words, but the model only {ours.model.vocab_size}: it "
            "is another tokenizer, so copy that of the data there"
        )
    return f"{tokenizer.vocab_size} words"


def _data(run: RunConfig | None, last: Manifest | None) -> str:
    """Compares the data with the fingerprint in the last checkpoint, if both are there."""
    if run is None or last is None or last.data is None or run.data.missing:
        return ""
    names = " and ".join(source.name for source in run.data.sources)
    subject = f"the data of {names}" if names else str(run.data.path)
    if changed := fingerprint(RunData.open(run.data)).differences(last.data):
        raise UserError(f"{subject} has changed since the checkpoint ({', '.join(changed)})")
    return f"{subject} is that of the checkpoint"


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

    Raises:
        UserError: The URL cannot be read, or has no checkpoint.
    """
    findings: list[RunFinding] = []
    with reading(url):
        remote = RemoteStore(url)
        names = remote.complete()
        if not names:
            raise UserError(
                f"there is no checkpoint at {url}: name the train.checkpoint_to of the run"
            )
        for number, name in enumerate(names, start=1):
            tell(f"copying and verifying checkpoint {number} of {len(names)}")
            with tempfile.TemporaryDirectory(prefix=private_prefix()) as folder:
                copy = Path(folder) / name
                try:
                    remote.download(name, copy)
                    findings += verify_run(copy, finite)
                except CheckpointError as error:
                    findings.append(RunFinding(name, False, str(error)))
    return findings
