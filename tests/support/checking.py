"""Checks of runs in this process, with a fault that is put back, for several tests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from gridformer.comm import P2PChannel


def one_group_for_all_messages() -> AbstractContextManager[object]:
    """A pipeline's messages are those of one group, in which a receive blocks a send."""
    return patch.object(P2PChannel, "_group", lambda self, *_: self.axis.group)
