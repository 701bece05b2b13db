"""Ranks wait for the first one while it copies a checkpoint, and no longer."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gridformer.checkpoint import save as saving
from gridformer.checkpoint.blocks import TensorBlock
from gridformer.checkpoint.checkpoint import manifest_of
from gridformer.checkpoint.save import Save, until
from gridformer.checkpoint.store import Draft, Kept, LocalStore, RemoteStore
from gridformer.comm import progress
from gridformer.config import parse_run

MODEL = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}
PATIENCE_S = 100.0


class Clock:
    """The clock of a rank that waits, on which a look takes more than half of its patience.

    Args:
        draft: Each look waits until this is renewed.
        ends: Called at the tenth look.
    """

    def __init__(self, draft: Draft, ends: threading.Event) -> None:
        self.draft, self.ends = draft, ends
        self.now, self.looks = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.looks = self.now + 0.6 * PATIENCE_S, self.looks + 1
        if self.looks == 10:
            self.ends.set()
        sign, until = self.draft.renewed_ns(), time.monotonic() + 60.0
        while sign is not None and self.draft.renewed_ns() == sign and time.monotonic() < until:
            time.sleep(0.001)


def test_ranks_wait_for_a_copy_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would else begin a message in which the first rank does not take part."""
    begun, may_end = threading.Event(), threading.Event()

    def upload(self: RemoteStore, folder: Path) -> None:
        begun.set()
        assert may_end.wait(60.0)

    monkeypatch.setattr(RemoteStore, "upload", upload)
    monkeypatch.setattr(saving, "_RENEW_S", 0.01)
    manifest = manifest_of(1, 0, parse_run({"model": MODEL, "data": {"path": "unused"}}))
    blocks = {"a": TensorBlock(torch.zeros(2, 3), (2, 3), (0, 0))}
    first, other = (
        Save(LocalStore(tmp_path), manifest, rank, 2, Kept(1), PATIENCE_S, "memory://far")
        for rank in range(2)
    )
    assert first.begin()
    other.run({})
    thread = threading.Thread(target=first.run, args=(blocks,))
    thread.start()
    assert begun.wait(60.0)
    assert isinstance(other.draft, Draft)
    clock = Clock(other.draft, may_end)
    monkeypatch.setattr(saving, "time", clock)
    other.wait_for_the_end()
    assert clock.looks >= 10
    assert other.has_ended()
    thread.join(60.0)
    assert first.outcome.not_copied == ""
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_rank_that_gives_no_more_signs_is_waited_for_as_long_as_patience_lasts(
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
    until(lambda: False, PATIENCE_S, draft, 3 * PATIENCE_S)
    assert now == 390.0


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
