"""One save: what happens if disks are full, ranks are lost and processes are killed meanwhile."""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from gridformer.checkpoint import find, store
from gridformer.checkpoint import save as saving
from gridformer.checkpoint import saver as saver_module
from gridformer.checkpoint.blocks import TensorBlock
from gridformer.checkpoint.checkpoint import manifest_of
from gridformer.checkpoint.manifest import KEPT, read_manifest, verify_checkpoint
from gridformer.checkpoint.save import Save, SaveOutcome, polling
from gridformer.checkpoint.saver import Saver
from gridformer.checkpoint.side_files import side_files
from gridformer.checkpoint.store import Kept, LocalStore
from gridformer.comm import progress
from gridformer.mesh import Axes
from gridformer.utils.errors import SaveError
from tests.support.checkpoints import filled, save_filled, small_run

N_RANKS = 3
TIMEOUT_S = 100.0


def blocks_of(rank: int, value: float = 0.0) -> Mapping[str, TensorBlock]:
    return {"a": TensorBlock(torch.full((2, 3), value), (2 * N_RANKS, 3), (2 * rank, 0))}


def saved(out: Path, step: int, kept: Kept, timeout_s: float = 60.0, ranks: int = N_RANKS) -> Any:
    """Save on several ranks, which are threads here, and return what became of it."""
    manifest = manifest_of(step, 0, small_run())
    saves = [Save(LocalStore(out), manifest, i, N_RANKS, kept, timeout_s) for i in range(N_RANKS)]
    if saves[0].begin():
        with ThreadPoolExecutor(ranks) as pool:
            for i in range(ranks):
                pool.submit(saves[i].run, blocks_of(i, float(step)))
    for one in saves:
        one.wait_for_the_end()
    return saves[0].outcome


def names(out: Path) -> list[str]:
    """Return everything beside the checkpoints, hidden or not, and check that they are whole."""
    for folder in find.complete(out):
        assert sorted(path.name for path in folder.iterdir()) == [
            "checkpoint.json",
            *(f"shard-{rank + 1:05d}.safetensors" for rank in range(N_RANKS)),
            *side_files(out),
        ]
        assert verify_checkpoint(folder).step == int(folder.name[-8:])
    there = sorted(path.name for path in (out / "checkpoints").iterdir())
    return [name.removeprefix("step-0000") for name in there]


def full_disk(
    monkeypatch: pytest.MonkeyPatch, is_full: Callable[[str], bool], error: int = errno.ENOSPC
) -> None:
    """Let writing a file of some names fail while a condition holds."""
    original = store.Draft.writing

    @contextmanager
    def writing(self: store.Draft, name: str) -> Iterator[BinaryIO]:
        with original(self, name) as file:
            yield file
            file.flush()
            if is_full(name):
                raise OSError(error, os.strerror(error))

    monkeypatch.setattr(store.Draft, "writing", writing)


def test_a_checkpoint_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a machine that loses its power then has one that is named and has not all of its bytes."""
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def told(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, bool(find.complete(tmp_path))))

    monkeypatch.setattr(os, "fsync", told)
    assert not saved(tmp_path, 1, Kept(3)).failure
    (folder,) = find.complete(tmp_path)
    *files, of_folder, of_parent = synced
    assert {(path.stat().st_ino, False) for path in folder.iterdir()} <= {*files}
    assert of_folder == (folder.stat().st_ino, False)
    assert of_parent == (folder.parent.stat().st_ino, True)


FULL = ["shard-00002", "shard-00001", "tokenizer.json", "checkpoint.json"]


@pytest.mark.parametrize(
    ("file", "error"), [*((file, errno.ENOSPC) for file in FULL), ("shard-00002", errno.EIO)]
)
def test_a_full_disk_costs_this_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: int
) -> None:
    """So does another error, which no removal of old checkpoints would help."""
    kept = Kept(3, room=error == errno.EIO)
    (tmp_path / "tokenizer.json").write_text("{}")
    for step in (1, 2):
        assert not saved(tmp_path, step, kept).failure
    with monkeypatch.context() as patch:
        full_disk(patch, lambda name: name.startswith(file), error)
        outcome = saved(tmp_path, 3, kept)
    assert f"step-00000003: {os.strerror(error).lower()} (rank " in outcome.failure
    assert (" are free" in outcome.failure) == (error == errno.ENOSPC)
    assert names(tmp_path) == ["0001", "0002"]
    assert not saved(tmp_path, 4, kept).failure
    assert names(tmp_path) == ["0001", "0002", "0004"]


@pytest.mark.parametrize("file", ["shard-00003", "checkpoint.json", "done-1"])
def test_the_oldest_checkpoint_makes_room_if_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    kept = Kept(9, every=2, room=True)
    for step in (1, 2, 3, 4):
        saved(tmp_path, step, kept)

    def is_full(name: str) -> bool:
        return name.startswith(file) and len(find.complete(tmp_path)) > room

    def tell(self: store.Draft, note: str, content: bytes = b"") -> None:
        if is_full(note):
            raise OSError(errno.ENOSPC, "")
        leave(self, note, content)

    room, leave = 1, store.Draft.tell
    full_disk(monkeypatch, is_full)
    monkeypatch.setattr(store.Draft, "tell", tell)
    outcome = saved(tmp_path, 5, kept)
    assert outcome.failure, "steps 2 and 4 are kept for good, and 4 is the last one"
    assert outcome.removed == ["step-00000001", "step-00000003"]
    assert names(tmp_path) == ["0002", "0004"], "what was removed made no room"
    room = 2
    outcome = saved(tmp_path, 6, Kept(9, room=True))
    assert (outcome.removed, outcome.failure) == ([], "")
    room = 0
    assert saved(tmp_path, 7, Kept(9, room=True)).failure
    assert names(tmp_path) == ["0006"], "the last complete one is never removed"


@pytest.mark.parametrize("ends", ["space", "time", "stop", "error", "peer"])
def test_the_last_save_waits_for_space_as_long_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """There is no next save, so the work would be lost."""
    monkeypatch.setattr(saver_module, "_RETRY_S", 0.02)
    told: list[str] = []
    error = errno.EIO if ends == "error" else errno.ENOSPC
    full_disk(monkeypatch, lambda name: ends != "space" or len(told) < 3, error)
    how: dict[str, Any] = {
        "stop": {"seconds_left": lambda: 0.1 - len(told)},
        "peer": {"hopeless": lambda: len(told) == 1},
    }
    run = small_run(full_disk_wait_s=0.1) if ends == "time" else small_run()
    saver = Saver(tmp_path, run, Axes(), no_space=told.append, **how.get(ends, {}))
    if ends == "space":
        saver.save(manifest_of(1, 0, run), filled(0.0), last=True)
        assert not saver.news()[0].failure
        assert verify_checkpoint(tmp_path / "checkpoints" / "step-00000001").step == 1
    else:
        with pytest.raises(SaveError, match="step 1 could not be saved: "):
            saver.save(manifest_of(1, 0, run), filled(0.0), last=True)
        assert names(tmp_path) == []
    assert len(told) in {"space": [3], "time": range(1, 6), "error": [0]}.get(ends, [1])
    assert all("no space left on device" in why for why in told)


def test_a_rank_that_never_tells_is_named(tmp_path: Path) -> None:
    outcome = saved(tmp_path, 1, Kept(1), timeout_s=0.2, ranks=2)
    assert "1 of 3 ranks have not written their files (ranks 2)" in outcome.failure
    assert names(tmp_path) == []


def test_ranks_that_cannot_even_tell_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk has no inode left, after the first rank has taken the last one."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "_LOST_S", 0.2)
    monkeypatch.setattr(store.Draft, "tell", full)
    full_disk(monkeypatch, lambda name: not name.startswith("shard-00001"))
    outcome = saved(tmp_path, 1, Kept(1), timeout_s=60.0)
    assert "no space left on device" in outcome.failure
    assert outcome.full
    assert names(tmp_path) == []


def test_a_rank_that_was_killed_in_a_save_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others would be waited for, as they save, and the run could not go on."""
    monkeypatch.setattr(saving, "_LOST_S", 0.2)
    manifest, kept = manifest_of(1, 0, small_run()), Kept(1)
    first, other = (
        Save(LocalStore(tmp_path), manifest, i, 2, kept, 600.0, hopeless=lambda: True)
        for i in range(2)
    )
    began = time.monotonic()
    assert first.begin()
    first.run(blocks_of(0))  # waits for a note
    assert "1 of 2 ranks have not written their files (ranks 1)" in first.outcome.failure
    assert other.has_ended()
    assert first.begin()
    other.wait_for_the_end()  # of a save that the first rank never ends
    assert time.monotonic() - began < 300.0


def test_a_draft_that_was_given_up_is_not_made_again(tmp_path: Path) -> None:
    """As by a rank that is late, whose file would be left over in a hidden folder."""
    draft = LocalStore(tmp_path).draft("step-00000001")
    draft.begin()
    draft.close()
    for name in ("shard-00002.safetensors", f"{KEPT}/merges.txt"):
        with pytest.raises(FileNotFoundError), draft.writing(name):
            pass
    assert [*(tmp_path / "checkpoints").iterdir()] == []


def test_ranks_wait_for_a_copy_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would else begin a message in which the first rank does not take part."""

    def upload(self: store.RemoteStore, folder: Path) -> None:
        sign, until = other.draft.renewed_ns(), time.monotonic() + 60.0
        while other.draft.renewed_ns() == sign and time.monotonic() < until:
            time.sleep(0.001)
        assert other.draft.renewed_ns() != sign, "it is renewed while the copy is made"
        assert not other.has_ended()

    monkeypatch.setattr(store.RemoteStore, "upload", upload)
    monkeypatch.setattr(saving, "_RENEW_S", 0.01)
    manifest = manifest_of(1, 0, small_run())
    first, other = (
        Save(LocalStore(tmp_path), manifest, rank, 2, Kept(1), TIMEOUT_S, "memory://far")
        for rank in range(2)
    )
    assert first.begin()
    other.run({})
    first.run(blocks_of(0))
    assert first.outcome.not_copied == ""
    assert other.has_ended()
    other.wait_for_the_end()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_rank_that_gives_no_more_signs_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = LocalStore(tmp_path).draft("step-00000001")
    draft.begin()
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 5.0
        if now == 290.0:
            draft.renew()

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    for _ in polling(3 * TIMEOUT_S, draft):
        pass
    assert now == 590.0


def test_a_process_that_copies_itself_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    """The last checkpoint is copied in the main thread, in the middle of a step as it seems."""
    draft = LocalStore(tmp_path).draft("step-00000001")
    draft.begin()
    noted, until = progress.start(None), time.monotonic() + 60.0
    try:
        with saving.renewing(draft, 0.01):
            while noted.waits < 3 and time.monotonic() < until:
                time.sleep(0.001)
        assert noted.waits >= 3
    finally:
        progress.stop()


def save_with(out: Path, value: float, beside: bool) -> SaveOutcome:
    """Save step 2 of a run in this process, with a saver of its own."""
    saver = Saver(out, small_run(), Axes())
    saver.store.sweep()
    return save_filled(saver, 2, small_run(), value, wait=not beside)


def save_and_die(out: Path, at_event: int, at_byte: int, beside: bool) -> None:
    """Save, and be killed at one event in the folder, or once that number of bytes is written."""
    left = at_byte

    class Dying:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def write(self, data: bytes) -> None:
            nonlocal left
            data = bytes(data)
            self.file.write(data[: max(0, left)])
            left -= len(data)
            if left <= 0:
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    original = store.Draft.writing

    @contextmanager
    def writing(self: store.Draft, name: str) -> Iterator[Any]:
        with original(self, name) as file:
            yield Dying(file)

    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.")) and str(out) in str(args):
            seen += 1
            if seen == at_event:
                os.kill(os.getpid(), signal.SIGKILL)

    if at_byte:
        store.Draft.writing = writing  # type: ignore[method-assign]
    sys.addaudithook(hook)
    save_with(out, 2.0, beside)


def value_of(out: Path) -> float:
    """Return the value in the newest checkpoint, which must be whole."""
    from safetensors.torch import load_file

    folder = find.latest(out)
    assert folder is not None
    verify_checkpoint(folder)
    (tensor,) = load_file(folder / "shard-00001.safetensors").values()
    assert tensor.min() == tensor.max()
    return float(tensor.min())


def survives(out: Path, at_event: int, at_byte: int, beside: bool) -> bool:
    """Kill a save, check what is left, save again. Return whether the save was faster."""
    save_with(out, 1.0, beside=False)
    process = get_context("forkserver").Process(
        target=save_and_die, args=(out, at_event, at_byte, beside)
    )
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    LocalStore(out).sweep()  # as the next start does before it looks for a checkpoint
    assert value_of(out) in ((2.0,) if process.exitcode == 0 else (1.0, 2.0))
    assert not save_with(out, 3.0, beside).failure
    assert value_of(out) == 3.0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    return process.exitcode == 0


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path, beside: bool) -> None:
    (tmp_path / KEPT).mkdir()
    (tmp_path / KEPT / "merges.txt").write_text("a b\n")  # each checkpoint has a copy
    event = 1
    while not survives(tmp_path, event, 0, beside):
        event += 1
    assert event > 15, "there are more operations than that"
    assert [*read_manifest(find.newest(tmp_path)).side_files] == [f"{KEPT}/merges.txt"]


def test_a_kill_at_any_byte_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    total = 2500  # bytes of the shard and, at the end, of the manifest
    chooser = random.Random(18)
    killed = [not survives(tmp_path, 0, chooser.randrange(1, total), True) for _ in range(6)]
    assert all(killed)
