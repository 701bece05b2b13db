"""Which settings torch's CUDA allocator gets."""

from __future__ import annotations

import os
import sys

import pytest

from gridformer.utils.allocator import ALLOC_CONF, use_expandable_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def chosen(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, str]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    use_expandable_segments()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    monkeypatch.delenv(ALLOC_CONF, raising=False)  # it was set behind monkeypatch's back
    return found


def test_segments_grow_unless_the_user_has_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert chosen(monkeypatch) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in NAMES:
        theirs = {name: "max_split_size_mb:128"}
        assert chosen(monkeypatch, **theirs) == theirs
    monkeypatch.setattr(sys, "platform", "win32")
    assert chosen(monkeypatch) == {}
