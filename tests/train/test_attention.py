"""train.attention: the fastest kernel as measured, a named one, and where these are refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from gridformer.config import RunConfig
from gridformer.launch import plan
from gridformer.memory.estimate import estimate_rank
from gridformer.mesh import Axes
from gridformer.train import attention
from gridformer.train.attention import Shape, attending, choose, shapes_of, times_of
from gridformer.utils.errors import ConfigError
from tests.support.fixes import run_of
from tests.support.multirank.memory import a_run
from tests.support.multirank.pool import WorkerPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HALF = {"dtype": "bfloat16", "device": "cuda"}


def a_choice(name: str = "auto", **train: Any) -> tuple[str, str]:
    run = a_run({}, {}, {**HALF, "attention": name, **train})
    return choose(run, CUDA, Axes().world)


def milliseconds(times: dict[str, float]) -> Any:
    """Return a function that finds these times, and cannot run kernels that are not there."""
    return lambda names, *_: {name: times[name] / 1e3 for name in names if name in times}


@pytest.mark.parametrize("fastest", ["flash", "cudnn", "flash3"])
def test_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    times = {"flash": 2.0, "cudnn": 2.1, "flash3": 2.2, fastest: 0.5}
    monkeypatch.setattr(attention, "times_of", milliseconds(times))
    name, said = a_choice()
    assert name == fastest
    assert f"auto: {fastest}: " in said
    assert all(f"{one} {ms:.3f} ms" in said for one, ms in times.items())


def test_nothing_is_measured_where_results_must_not_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "times_of", None)
    name, said = a_choice(deterministic=True)
    assert name == "flash"
    assert "deterministic" in said
    assert choose(a_run({}, {}, {}), CPU, Axes().world) == ("auto", "")
    assert a_choice("math") == ("math", "")


def test_a_named_kernel_that_does_not_run_is_refused_with_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "times_of", milliseconds({"flash": 2.0, "efficient": 1.0}))
    assert a_choice("flash") == ("flash", "")
    with pytest.raises(ConfigError, match=r"attention=cudnn does not run .*: use efficient"):
        a_choice("cudnn")


def chosen_by(rank: int, axes: Axes) -> tuple[str, str]:
    """Return the choice where each rank would have measured something else."""
    times = {"flash": 1.0, "cudnn": 0.5 + rank}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "times_of", milliseconds(times))
        run = a_run({}, {}, {**HALF, "attention": "auto"})
        return choose(run, CUDA, axes.world)


def test_rank_0_decides(pool: WorkerPool) -> None:
    found = pool.run(2, chosen_on)
    assert found[0] == found[1]
    assert found[0][0] == "cudnn"


def chosen_on() -> tuple[str, str]:
    from gridformer.config import LayoutConfig
    from gridformer.parallel.axes import build_axes

    axes = build_axes(LayoutConfig(dp=2), "cpu")
    return chosen_by(axes.world.index, axes)


def test_kernels_that_cannot_run_are_left_out() -> None:
    """On a CPU there are two; others raise errors, in rows over the sequence as well."""
    shapes = [Shape(1, 4, 2, 32, 32, 8, True), Shape(1, 2, 2, 8, 32, 8, True)]
    found = times_of(("math", "flash", "cudnn", "flash3"), shapes[:1], torch.float32, CPU)
    assert {*found} == {"math", "flash"}
    assert all(seconds > 0 for seconds in found.values())
    assert "math" in times_of(("math",), shapes, torch.float32, CPU)


def test_shapes_are_those_of_a_device() -> None:
    """That of a grid whose rows divide sequences has some of the last queries."""
    grid = {"layout.scheme": "megatron_2d", "layout.rows": 2, "layout.cols": 3}
    (shape,) = shapes_of(run_of(**grid, **{"layout.dp": 2}))
    assert shape == Shape(1, 12 * 12 // 6, 12 * 12 // 6, 24, 24, 4, True)
    (shape,) = shapes_of(run_of(**grid, **{"layout.rows_over": "sequence"}))
    assert shape == Shape(1, 24 * 12 // 3, 24 * 12 // 3, 6, 24, 4, True)


# --------------------------------------------------------------------------- what is computed


def operators(compiled: bool, name: str) -> set[str]:
    """Return the operators of a forward pass of attention."""
    found: set[str] = set()

    def backend(graph: GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def kept(inner: GraphModule, _: Any) -> Any:
            found.update(str(node.target) for node in inner.graph.nodes)
            return make_boxed_func(inner.forward)

        return aot_autograd(fw_compiler=kept)(graph, inputs)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        with attending(name):
            torch.compile(attend, backend=backend)(q)
        assert not counters["graph_break"]
        return found
    with attending(name), torch.profiler.profile() as profile:
        attend(q)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("compiled", [True, False])
def test_the_kernel_that_is_named_computes(compiled: bool) -> None:
    plain, by_operators = operators(compiled, "auto"), operators(compiled, "math")
    assert any("flash_attention" in name for name in plain)
    assert not any("flash_attention" in name for name in by_operators)
    assert any("softmax" in name for name in by_operators)
    assert torch.backends.cuda.flash_sdp_enabled(), "the settings are as they were"


def peaks(kernel: str, device: str) -> int:
    model = {"max_seq_len": 256, "n_layers": 2}
    train = {"global_batch": 4, "device": device, "attention": kernel}
    return estimate_rank(a_run({}, model, train), 0).peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_estimate_of_memory_has_the_scores_of_math(device: str) -> None:
    plain, math = (peaks(kernel, device) for kernel in ("auto", "math"))
    n_heads = a_run({}, {}, {}).model.n_heads
    assert math - plain > 4 * 4 * n_heads * 256 * 256
    assert device == "cpu" or peaks("efficient", device) == plain


def test_a_named_kernel_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run: RunConfig = a_run({}, {}, {**HALF, "device": "auto", "attention": "flash"})
    monkeypatch.setattr(plan, "_read", lambda *_: (run, []))
    monkeypatch.setattr(plan, "check_devices", lambda *_: [])
    with pytest.raises(ConfigError, match=r"attention=flash needs a GPU .* use train.attention=au"):
        plan.check_run("x")
