"""The log of live bytes: what is counted, that it counts once, and until when."""

import torch

from gridformer.utils.tensors import allocate_storage, free_storage
from tests.support.memory_log import MemoryLog


def test_storages_count_once_and_until_nothing_holds_them() -> None:
    with MemoryLog() as tracker:
        x = torch.zeros(100)
        y = x.view(10, 10).t()
        assert tracker.live() == 400
        del x
        assert tracker.live() == 400, "a view holds the memory"
        z = y + 1
        assert tracker.live() == 800
        del y, z
        assert tracker.live() == 0
        torch.ones(50)
    assert tracker.peak() == 800
    assert [entry.n_bytes for entry in tracker.entries] == [400, 400, 200]


def test_what_autograd_keeps_is_held_until_its_backward_pass() -> None:
    with MemoryLog() as tracker:
        w = torch.zeros(1000, requires_grad=True)
        y = (w.sin() * 2).exp().sum()
        kept = tracker.live() - 4000
        assert kept == 4004, "exp keeps its result; sin its argument, which is w"
        y.backward()
        del y
        assert tracker.live() == 8000, "w and its gradient"
    in_forward = [entry for entry in tracker.entries if entry.until_backward]
    assert [entry.n_bytes for entry in in_forward] == [4000]
    assert not any(entry.in_backward for entry in in_forward)


def test_tensors_can_be_labeled() -> None:
    w = torch.zeros(10)
    tracker = MemoryLog()
    tracker.mark([w, w.view(2, 5)], "parameters")
    with tracker:
        tracker.at("somewhere")
        v = w + 1
    assert [(e.kind, e.place, e.n_bytes) for e in tracker.entries] == [
        ("parameters", "", 40),
        ("", "somewhere", 40),
    ]
    assert [(change.n_bytes, change.doing) for change in tracker.log[1:]] == [(40, "somewhere")]
    del v


def test_memory_freed_in_place_is_not_held() -> None:
    w = torch.zeros(100)
    tracker = MemoryLog()
    tracker.mark([w], "parameters")
    with tracker:
        free_storage(w)
        assert tracker.live() == 0
        allocate_storage(w)
        assert tracker.live() == 400
    assert [entry.kind for entry in tracker.entries] == ["parameters"] * 2
    free_storage(w)
    assert tracker.live() == 400, "the log is closed"


def test_other_devices_memory_does_not_count() -> None:
    with MemoryLog() as tracker:
        x = torch.zeros(100, device="meta") + 1
    assert not tracker.entries
    del x
