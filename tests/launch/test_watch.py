"""The watch of a process: over NCCL, for a peer that failed, and where it finds a thread."""

import itertools
import os
import sys
import textwrap
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer.checkpoint.save import SaveOutcome
from gridformer.checkpoint.saver import Saver
from gridformer.comm import progress
from gridformer.config import parse_run
from gridformer.launch import watch
from gridformer.launch.failures import answered
from gridformer.launch.hang_report import module_of, stack_of
from gridformer.launch.watch import HangBoard, HangWatch, asks_s
from gridformer.mesh import Axes, Axis
from tests.support.commands import python_alone

TIMEOUT_S = 0.2
RUN: dict[str, Any] = {
    "model": {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 11},
    "data": {"path": "unused"},
}


@pytest.fixture
def watched() -> Any:
    """A watch over NCCL without its thread, in the middle of a step."""
    found: Any = object.__new__(HangWatch)
    found.timeout_s, found.nccl, found._trains = TIMEOUT_S, True, True
    found._progress = progress.start(None)
    found._still_since, found._still = time.monotonic(), (0,)
    progress.at_step(1)
    yield found
    progress.stop()


def looks(watched: Any, frame: FrameType) -> bool:
    """Look for longer than the timeout, and return whether the process was found to hang."""
    until, found = time.monotonic() + 2 * TIMEOUT_S, False
    while time.monotonic() < until:
        found = found or watched._hangs(frame)
        time.sleep(TIMEOUT_S / 10)
    return found


def test_a_process_in_one_place_hangs(watched: Any) -> None:
    assert looks(watched, sys._getframe())
    progress.at_step(0)
    assert not looks(watched, sys._getframe()), "before the first step it may compile for long"
    watched._trains = False
    assert looks(watched, sys._getframe()), "generate and evaluate have no steps"


@pytest.mark.parametrize("what", ["steps", "messages", "waits on purpose"])
def test_a_process_that_goes_on_does_not_though_it_is_seen_in_one_place(
    watched: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The host waits for a busy GPU in the same place in every step, or for space on a disk."""
    hangs, steps = watched._hangs, itertools.count(2)

    def going_on(frame: FrameType) -> bool:
        if what == "steps":
            progress.at_step(next(steps))
        elif what == "messages":
            watched._progress.posted("all_reduce", Axis("row"), "", 3, -1, None).end()
        else:
            progress.waits_on_purpose()
        return bool(hangs(frame))

    monkeypatch.setattr(watched, "_hangs", going_on, raising=False)
    assert not looks(watched, sys._getframe())


def test_a_process_that_waits_for_a_save_notes_it(watched: Any, tmp_path: Path) -> None:
    """It may take longer than a message: to slow storage, or to `train.checkpoint_to`."""
    saver = Saver(tmp_path, parse_run(RUN), Axes())
    ends = threading.Event()
    saver._thread = threading.Thread(target=ends.wait, args=(60.0,))
    saver._save = SimpleNamespace(  # type: ignore[assignment]
        wait_for_the_end=lambda: None, outcome=SaveOutcome("step-00000001", 1)
    )
    saver._thread.start()
    waiting = threading.Thread(target=saver.finish)
    before, until = watched._progress.waits, time.monotonic() + 60.0
    waiting.start()
    while watched._progress.waits < before + 3 and time.monotonic() < until:
        time.sleep(0.01)
    ends.set()
    waiting.join()
    assert watched._progress.waits >= before + 3


@pytest.mark.parametrize("name", ["_dump_nccl_trace_json", "_dump_fr_trace_json"])
def test_the_flight_recorder_is_read_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def dump(includeCollectives: bool, onlyActive: bool) -> bytes:
        assert includeCollectives
        assert onlyActive
        return b'{"entries": [{"state": "started"}]}'

    module = torch._C._distributed_c10d
    monkeypatch.delattr(module, "_dump_nccl_trace_json", raising=False)
    monkeypatch.setattr(module, name, dump, raising=False)
    assert answered(progress.flight_records, 60.0) == {"entries": [{"state": "started"}]}
    monkeypatch.setattr(module, name, lambda **how: time.sleep(60))
    with pytest.raises(TimeoutError):  # a GPU that does not answer holds up no report
        answered(progress.flight_records, 0.05)


def works(seconds: float) -> Any:
    """Return a reference to a tensor of a function that has returned."""
    x = torch.empty(3)
    found = weakref.ref(x)
    time.sleep(seconds)
    return found


def test_a_watch_keeps_no_tensor_alive_and_ends_before_the_process(watched: Any) -> None:
    """It looks at the main thread's frames, which hold tensors.

    A thread that frees a tensor while Python ends aborts the process, which then has another exit
    code than the run has chosen.
    """
    watched.timeout_s = 4.0  # it looks eight times in it
    watched._main = threading.get_ident()
    watched.place = SimpleNamespace(store_file="store", size=4)
    watched._board = SimpleNamespace(is_claimed=lambda: False, failed=lambda: "")
    watched._ended = threading.Event()
    watched._thread = threading.Thread(target=watched._run)
    watched._thread.start()
    try:
        kept = [works(0.6)() is not None for _ in range(4)]
    finally:
        watched.end()
    assert not all(kept)
    assert not watched._thread.is_alive()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> HangBoard:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    monkeypatch.setattr(watch, "store_of", lambda place: store)
    monkeypatch.setattr(watch, "at_failure", [])
    return HangBoard(SimpleNamespace(rank=3, size=8, store_file="", by="torchrun"))  # type: ignore[arg-type]


def test_a_failure_is_told_in_the_store(board: HangBoard) -> None:
    """A run of `launch` needs none, because it ends the other processes itself."""
    assert board.failed() == ""
    board.tell_failed()
    assert board.failed().startswith("rank 3 on ")
    assert not board.is_claimed()
    HangBoard(SimpleNamespace(rank=0, size=2, store_file="store"))  # type: ignore[arg-type]
    assert watch.at_failure == [board.tell_failed]
    assert asks_s(8) == 2.0
    assert asks_s(4096) > 10.0


def test_a_watch_ends_its_process_for_a_failed_peer(
    board: HangBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less than 10 s, though the main thread is stuck."""
    monkeypatch.setattr(watch, "_ASKS_S", 0.1)
    monkeypatch.setattr(watch, "HangBoard", lambda place: board)
    told: list[str] = []
    monkeypatch.setattr(watch, "end_from_watch", lambda reason, text, **_: told.append(text))
    place: Any = SimpleNamespace(rank=1, size=8, store_file="", by="torchrun")
    watching = HangWatch(place, 600.0, None, True)
    try:
        time.sleep(0.3)
        assert told == []
        began = time.monotonic()
        board.tell_failed()
        while not told and time.monotonic() - began < 60:
            time.sleep(0.05)
    finally:
        watching.end()
    (who,) = told
    assert who.startswith("rank 1 ends because rank 3 on ")


def test_a_process_that_ends_for_a_peer_says_so(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        from gridformer.launch.worker_process import end_from_watch
        text = "rank 1 ends because rank 3 on b has failed"
        end_from_watch(text, text, caused_by_peer=True)
    """)
    error_file = tmp_path / "error.json"
    environ = {**os.environ, "RANK": "1", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = python_alone("-c", script, env=environ)
    assert done.returncode == 1
    assert "rank 1 ends because rank 3 on b has failed" in done.stdout + done.stderr
    assert '"caused_by_peer": true' in error_file.read_text()


PLACES: list[str] = []
MODELS: list[nn.Module] = []


class Sum(torch.autograd.Function):
    """Notes where it runs, as a message would be noted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        PLACES.append(module_of(sys._getframe(), MODELS[0]))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        PLACES.append(module_of(sys._getframe(), MODELS[0]))
        return grads[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(Sum.apply(self.norm(x)))
        return found


def test_the_module_of_a_message_is_named() -> None:
    MODELS[:], PLACES[:] = [nn.Sequential(Layer(), Layer())], []
    MODELS[0](torch.ones(2, 4)).sum().backward()
    assert module_of(sys._getframe(), MODELS[0]) == ""
    assert PLACES[:2] == ["0 (forward)", "1 (forward)"]
    assert PLACES[2].startswith("the backward pass near 1.norm.")
    assert PLACES[3].startswith("the backward pass near 0.norm.")


def test_the_stack_ends_with_the_innermost_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two lines Python knows no number, and the watch must not end of it."""
    call = stack_of(sys._getframe())[-1]
    source = "    call = stack_of(sys._getframe())[-1]\n"
    assert call.endswith("in test_the_stack_ends_with_the_innermost_call\n" + source)
    calls = [(sys._getframe(), None)]
    monkeypatch.setattr(traceback, "walk_stack", lambda frame: calls)
    (line,) = stack_of(sys._getframe())
    assert line.endswith("line ?, in test_the_stack_ends_with_the_innermost_call\n")
