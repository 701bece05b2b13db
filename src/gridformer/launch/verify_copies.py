"""`gridformer verify URL`: whether the checkpoints that were copied to a URL are intact."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gridformer.checkpoint.remote import Remote, reading
from gridformer.launch.verify_run import RunFinding, Tell, verify_run
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.folders import private_prefix


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
