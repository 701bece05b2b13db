"""Traces in processes that end with them load neither sympy nor DTensors."""

import subprocess
import sys

import pytest
import torch

from gridformer.launch.plan import read_run_without_data
from gridformer.plan.predict import record_run
from gridformer.utils.process import as_far_as, ends_with_its_work, is_copy, last_work
from tests.support.fake_gpu import own_process

SLOW = ["torch._dynamo.eval_frame", "torch.distributed.tensor._api"]
if torch.__version__ >= "2.13":  # torch 2.11 needs sympy
    SLOW.append("sympy.core")


def loaded_by_a_trace() -> tuple[bool, list[str]]:
    overrides = ["layout.dp=2", "train.global_batch=2", "model.n_layers=2", "train.dtype=bfloat16"]
    run = read_run_without_data("gpt2-124m", overrides)

    def trace() -> tuple[bool, list[str]]:
        record_run(run)
        return is_copy(), [name for name in SLOW if name in sys.modules]

    [result] = as_far_as([trace], 600)
    assert result is not None
    return result


def test_traces_in_copies_load_neither_sympy_nor_dtensors() -> None:
    with own_process(imports_nothing=True) as call:
        assert call(loaded_by_a_trace) == (True, [])


@pytest.mark.parametrize("command", [pytest.param("check", marks=pytest.mark.full), "predict"])
def test_neither_do_commands_that_trace_in_their_own_process(command: str) -> None:
    words = ["bert-base", "layout.pp=2", "layout.micro_batches=2", "train.global_batch=4"]
    words += ["model.n_layers=2", "layout.dp=2", "layout.dp_mode=fsdp"]
    words += ["--cluster", "dgx-h100"] * (command == "predict")
    program = f"""if True:
        import sys
        from gridformer.__main__ import main
        sys.argv = {["gridformer", command, *words]}
        try:
            main()
        except SystemExit as ended:
            loaded = [name for name in {SLOW} if name in sys.modules]
            sys.exit(ended.code or ", ".join(loaded) or None)
    """
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_commands_inside_another_process_leave_dtensors_to_it() -> None:
    assert not ends_with_its_work()
    with last_work():
        assert not ends_with_its_work()
