"""The log of live bytes: what counts, once, and until when."""

from __future__ import annotations

import torch

from gridformer.memory.tracker import Ledger


def test_storages_count_once_and_until_nothing_holds_them() -> None:
    with Ledger() as ledger:
        x = torch.zeros(100)
        y = x.view(10, 10).t()
        assert ledger.live() == 400
        del x
        assert ledger.live() == 400, "a view holds the memory"
        z = y + 1
        assert ledger.live() == 800
        del y, z
        assert ledger.live() == 0
        torch.ones(50)
    assert ledger.peak()[1] == 800
    assert [entry.n_bytes for entry in ledger.entries] == [400, 400, 200]
    assert all(entry.died for entry in ledger.entries)


def test_what_autograd_keeps_is_held_until_its_backward_pass() -> None:
    with Ledger() as ledger:
        w = torch.zeros(1000, requires_grad=True)
        y = (w.sin() * 2).exp().sum()
        kept = ledger.live() - 4000
        assert kept == 4004, "exp keeps its result; sin its argument, which is w"
        y.backward()
        del y
        assert ledger.live() == 8000, "w and its gradient"
    in_forward = [entry for entry in ledger.entries if entry.until_backward]
    assert [entry.n_bytes for entry in in_forward] == [4000]
    assert not any(entry.in_backward for entry in in_forward)


def test_what_a_tensor_is_can_be_said() -> None:
    w = torch.zeros(10)
    ledger = Ledger()
    ledger.mark([w, w.view(2, 5)], "parameters")
    with ledger:
        ledger.at("somewhere")
        v = w + 1
    assert [(e.kind, e.place, e.n_bytes) for e in ledger.entries] == [
        ("parameters", "", 40),
        ("", "somewhere", 40),
    ]
    assert ledger.place_at(ledger.entries[1].born) == "somewhere"
    del v


def test_memory_that_is_let_go_of_in_place_is_not_held() -> None:
    w = torch.zeros(100)
    ledger = Ledger()
    ledger.mark([w], "parameters")
    with ledger:
        w.untyped_storage().resize_(0)
        assert ledger.live() == 0
        w.untyped_storage().resize_(400)
        assert ledger.live() == 400
    assert [entry.kind for entry in ledger.entries] == ["parameters"] * 3
    w.untyped_storage().resize_(0)
    assert ledger.live() == 400, "the log is closed"


def test_what_another_device_has_does_not_count() -> None:
    with Ledger() as ledger:
        x = torch.zeros(100, device="meta") + 1
    assert not ledger.entries
    del x
