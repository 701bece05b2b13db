"""Traces in copies of a process load neither sympy nor DTensors."""

from __future__ import annotations

import sys

from gridformer.launch.plan import read_run_without_data
from gridformer.plan.recorded import record_run
from gridformer.utils.beside import beside, is_copy
from tests.support.fake_gpu import own_process

SLOW = ("sympy.core", "torch._dynamo.eval_frame", "torch.distributed.tensor._api")


def loaded_by_a_trace() -> tuple[bool, list[str]]:
    overrides = ["layout.dp=2", "train.global_batch=2", "model.n_layers=2", "train.dtype=bfloat16"]
    run = read_run_without_data("gpt2-124m", overrides)

    def trace() -> tuple[bool, list[str]]:
        record_run(run)
        return is_copy(), [name for name in SLOW if name in sys.modules]

    return beside(trace)()


def test_traces_in_copies_load_neither_sympy_nor_dtensors() -> None:
    with own_process(imports_nothing=True) as call:
        assert call(loaded_by_a_trace) == (True, [])
