"""Fake tensors that are made from what is remembered of earlier ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gridformer.trace.fast_fake import FastFakeTensorMode


@pytest.mark.parametrize("attribute", ["_fake_device", "fake_device"])
def test_fakes_remember_their_device(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a property in some versions of torch and a plain attribute in others."""
    if attribute == "fake_device" and isinstance(vars(FakeTensor).get(attribute), property):
        monkeypatch.delattr(FakeTensor, attribute)
    ran: list[object] = []
    real = FakeTensorMode.__torch_dispatch__

    def counted(self: FakeTensorMode, func: object, *rest: object) -> object:
        ran.append(func)
        return real(self, func, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    with FastFakeTensorMode():
        x, y = (torch.empty(2, 3, device=device) for device in ("cpu", "meta"))
        sums = [z + 1 for z in (x, y, x, y)]
    assert ran.count(torch.ops.aten.add.Tensor) == 2, "equal ones are not computed again"
    assert [z.device.type for z in sums] == ["cpu", "meta"] * 2
    assert len({id(z) for z in sums}) == 4
