"""Training and traces do without torch's compiler, and code that needs it gets it."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.launch.run import worker
from gridformer.memory.estimate import estimate_rank
from gridformer.train.plan import Plan
from gridformer.utils.placeholder_module import without_dynamo
from tests.support.fake_gpu import own_process
from tests.support.multirank.memory import a_run
from tests.support.multirank.runs import plan_of

DYNAMO = "torch._dynamo"


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def loaded_by_training(plan: Plan) -> list[str]:
    worker(plan)
    return [name for name in (DYNAMO, "torch._inductor", "sympy") if name in sys.modules]


def is_loaded_by_an_estimate() -> bool:
    estimate_rank(a_run({}, {"n_layers": 2}, {"global_batch": 2}), 0)
    return DYNAMO in sys.modules


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def is_there_for_others() -> tuple[bool, int, int, int]:
    with without_dynamo(), Seen() as seen:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=True)
        weight.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        loaded, before = f"{DYNAMO}.eval_frame" in sys.modules, seen.n
        torch._dynamo.config.recompile_limit = 77
        excluded = torch.compiler.disable(double)
        from torch._dynamo.testing import CompileCounter

        n_seen = seen.n - before
    import torch._dynamo.testing as again

    assert again.CompileCounter is CompileCounter
    assert torch._dynamo.config.recompile_limit == 77, "a setting that was made before"
    optimizer.zero_grad()
    of_torch: Any = torch.optim.Optimizer.zero_grad
    function = of_torch.__wrapped__
    assert function.__dynamo_disable is not function, "torch is to ask again"
    counter = again.CompileCounter()

    @torch.compile(backend=counter)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        optimizer.zero_grad()
        return excluded(y * 3)

    assert compiled(torch.ones(2)).tolist() == [12.0, 12.0]
    return loaded, n_seen, counter.frame_count, counter.op_count


def test_training_and_traces_do_not_load_the_compiler(token_folder: Path, tmp_path: Path) -> None:
    train = {"steps": 1, "recompute": "full", "device": "cpu"}
    plan = plan_of(token_folder, tmp_path, {"micro_batches": 2}, **train)
    with own_process(imports_nothing=True) as call:
        assert call(loaded_by_training, plan) == []
        assert not call(is_loaded_by_an_estimate)
        loaded, n_seen, n_graphs, n_operations = call(is_there_for_others)
    assert not loaded
    assert n_seen == 0, "what its modules compute is not a part of a trace"
    assert n_graphs == 2, "the graph breaks at the optimizer, of which torch says so"
    assert n_operations == 2, "the function that a user has excluded is in none"
