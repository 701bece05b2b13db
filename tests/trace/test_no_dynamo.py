"""Traces do without torch's compiler, and who needs it gets it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.memory.estimate import estimate_rank
from gridformer.trace.no_dynamo import without_dynamo
from tests.support.fake_gpu import own_process
from tests.support.multirank.memory import a_run


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def is_loaded_by_an_estimate() -> bool:
    estimate_rank(a_run({}, {"n_layers": 2}, {"global_batch": 2}), 0)
    return "torch._dynamo" in sys.modules


def is_there_for_others() -> tuple[bool, int, bool]:
    with without_dynamo(), Seen() as seen:
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).zero_grad()
        loaded, before = "torch._dynamo.eval_frame" in sys.modules, seen.n
        from torch._dynamo.source import ConstantSource

        assert ConstantSource("one").name
        n = seen.n - before
    import torch._dynamo.source as again

    return loaded, n, again.ConstantSource is ConstantSource and hasattr(torch._dynamo, "reset")


def test_estimates_and_traces_do_not_load_the_compiler() -> None:
    with own_process(imports_nothing=True) as call:
        assert not call(is_loaded_by_an_estimate)
        loaded, n_seen, real = call(is_there_for_others)
    assert not loaded
    assert n_seen == 0, "what its modules compute is not a part of a trace"
    assert real
