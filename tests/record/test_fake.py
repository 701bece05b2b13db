"""Fake tensors that are made from what is remembered of earlier ones."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gridformer.record import fake
from gridformer.record.fake import FastFakeTensorMode


@pytest.mark.parametrize("attribute", ["_fake_device", "fake_device"])
def test_fakes_remember_their_device(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a property in some versions of torch and a plain attribute in others."""
    if attribute == "fake_device" and isinstance(vars(FakeTensor).get(attribute), property):
        monkeypatch.delattr(FakeTensor, attribute)
    ran: list[object] = []
    real = fake._real_dispatch

    def counted(self: FakeTensorMode, func: Any, *rest: Any) -> Any:
        ran.append(func)
        return real(self, func, *rest)

    monkeypatch.setattr(fake, "_real_dispatch", counted)
    with FastFakeTensorMode():
        x, y = (torch.empty(2, 3, device=device) for device in ("cpu", "meta"))
        sums = [z + 1 for z in (x, y, x, y)]
    assert ran.count(torch.ops.aten.add.Tensor) == 2, "equal ones are not computed again"
    assert [z.device.type for z in sums] == ["cpu", "meta"] * 2
    assert len({id(z) for z in sums}) == 4


def test_parts_begin_where_they_are_taken_from() -> None:
    """Equal parts of a tensor are made from what is remembered of the first one."""
    with FastFakeTensorMode():
        whole = torch.empty(4, 6)
        parts = [whole[1:3].t()[2:4], whole[2:4].t()[2:4], whole[2:4].t()[2:4][1]]
        again = torch.as_strided(whole[3], (2, 2), (1, 1), 5)
        sums = [part + 1 for part in parts]
    assert [part.storage_offset() for part in (*parts, again)] == [8, 14, 15, 5]
    assert [part.stride() for part in parts] == [(1, 6), (1, 6), (6,)]
    assert {part.untyped_storage()._cdata for part in parts} == {whole.untyped_storage()._cdata}
    assert [x.storage_offset() for x in sums] == [0, 0, 0]


def test_numbers_are_known_until_they_are_changed() -> None:
    with FastFakeTensorMode():
        number, other = torch.tensor(2.0), torch.tensor(3.0)
        x = torch.empty(4)
        x[1:] = 0
        assert float(number * other) == 6
        number += x[0]
        assert number.constant is None  # type: ignore[attr-defined]
        assert x.shape == (4,)
