"""A check finds the faults of a step that were seen or foreseen on GPUs, when they are put back.

Faults that are not in a step are put back where they are tested: a rank that does not report before
it leaves in tests/launch/test_failing.py, and a rendezvous that can be reached from outside in
tests/launch/test_privacy.py.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer import comm
from gridformer.check import Problem, Report, report_of
from gridformer.comm import Pending, collectives
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks import Recompute
from gridformer.parallel.data import gradients
from gridformer.parallel.data.buckets import in_buckets
from gridformer.parallel.pipeline import executor
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.validation import check_layout
from gridformer.record import trace_rank
from gridformer.train import forward_backward, step
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run
from tests.support.multirank.nccl_path import one_group_for_all_messages

Fault = Callable[[], AbstractContextManager[object]]

OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
MEGATRON = {"scheme": "megatron", "cols": 2}
CSUB = {"scheme": "subgraph", "branches": 2, "common": "first"}
IN_BACKWARD = {"update": "in_backward", "clip_by": "layer"}


def checked(
    layout: dict[str, Any],
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    fault: Fault = nullcontext,
    valid: bool = True,
) -> Report:
    """Return the report of a small run, all ranks of which are traced in this process.

    Args:
        valid: Whether the sizes of the run fit, as they do in every run that can be started.
    """
    torch.set_num_threads(1)
    model = {"n_layers": 2, "max_seq_len": 8, **(model or {})}
    run = a_run(layout, model, {"global_batch": 16, "loss_chunk_tokens": 0, **(train or {})})
    if valid:
        check_layout(run)
    with fault():
        return report_of(run, [trace_rank(run, rank) for rank in range(run.layout.n_processes)])


def only(report: Report) -> Problem:
    (problem,) = report.problems
    return problem


def shape_kept() -> AbstractContextManager[object]:
    """The result of a reduce-scatter has the shape of a block, not that of where it belongs."""

    def start(x: Tensor, axis: Axis, dim: int, *_: Any, **__: Any) -> Pending:
        dim %= x.dim()
        blocks = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0)
        out, sent = torch.empty_like(blocks[0]), blocks.reshape(-1)
        work = collectives._reduce_scatter(out.view(-1), sent, group=axis.group, async_op=True)
        return Pending(out, work, None, sent)

    return patch.object(comm, "start_reduce_scatter", start)


def counts_left_on_the_device() -> AbstractContextManager[object]:
    """Losses that another device computes are divided by counts of this one."""

    def weighted(losses: Any, counts: Any, scale: float) -> Tensor:
        parts = [loss / counts[name].clamp(min=1) for name, loss in losses.items()]
        return sum(parts, torch.zeros((), device=parts[0].device)) * scale

    return patch.object(forward_backward, "weighted", weighted)


def hooks_inside_of_what_is_recomputed() -> AbstractContextManager[object]:
    def before_backward(self: Recompute, block: nn.Module, hook: Callable[[Tensor], None]) -> None:
        def after_forward(_: nn.Module, __: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(hook)

        block.register_forward_hook(after_forward)

    return patch.object(Recompute, "before_backward", before_backward)


@contextmanager
def starting(name: str, started: Callable[..., Pending]) -> Iterator[None]:
    """Replace a function that starts a collective, for callers in and outside of `comm`."""
    with patch.object(collectives, name, started), patch.object(comm, name, started):
        yield


def _on_rank_1(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return `all_reduce` with a change at its third message on global rank 1."""
    real, numbers = collectives.start_all_reduce, itertools.count()

    def started(x: Tensor, axis: Axis, *rest: Any, **more: Any) -> Pending:
        last = axis.size > 1 and axis.ranks[axis.index] == 1 and next(numbers) == 2
        return change(real, x, axis, *rest, **more) if last else real(x, axis, *rest, **more)

    return started


def one_rank_leaves_out_a_sum() -> AbstractContextManager[object]:
    return starting("start_all_reduce", _on_rank_1(lambda _, x, *rest, **more: Pending(x)))


def _wider(real: Callable[..., Pending], x: Tensor, *rest: Any, **more: Any) -> Pending:
    real(x.double(), *rest, **more)
    return Pending(x)


def _longer(real: Callable[..., Pending], x: Tensor, *rest: Any, **more: Any) -> Pending:
    real(torch.cat((x, x)), *rest, **more)
    return Pending(x)


def another_type() -> AbstractContextManager[object]:
    return starting("start_all_reduce", _on_rank_1(_wider))


def another_size() -> AbstractContextManager[object]:
    return starting("start_all_reduce", _on_rank_1(_longer))


def a_value_read_early() -> AbstractContextManager[object]:
    real = step.Stepper._count

    def counted(self: step.Stepper, *args: Any) -> Any:
        counts, tokens = real(self, *args)
        assert float(tokens[0]) > 0
        return counts, tokens

    return patch.object(step.Stepper, "_count", counted)


def sent_with_gaps() -> AbstractContextManager[object]:
    real = collectives.start_broadcast

    def started(x: Tensor, *rest: Any, **more: Any) -> Pending:
        real(torch.stack((x, x), -1)[..., 0], *rest, **more)
        return Pending(x)

    return starting("start_broadcast", started)


def sent_from_the_host() -> AbstractContextManager[object]:
    real = collectives.start_broadcast

    def started(x: Tensor, *rest: Any, **more: Any) -> Pending:
        real(torch.zeros(x.shape, dtype=x.dtype), *rest, **more)
        return Pending(x)

    return starting("start_broadcast", started)


@pytest.mark.parametrize(
    ("fault", "kind"), [(sent_with_gaps, "contiguity"), (sent_from_the_host, "device")]
)
def test_tensors_that_nccl_refuses_are_found(gpu: InProcess, fault: Fault, kind: str) -> None:
    report: Report = gpu(
        checked, {**OPTIMUS, "schedule": "broadcast"}, {"n_layers": 1}, None, fault
    )
    assert {problem.kind for problem in report.problems} == {kind}
    assert {"row", "col"} <= {problem.axis for problem in report.problems}
    assert any("summa" in problem.place.file for problem in report.problems)


def one_rank_leaves_out_groups() -> AbstractContextManager[object]:
    """The stage that does not hold the shared table does not help to create its groups."""
    real = executor.shared_sets

    def sets(*args: Any) -> Any:
        return [] if dist.get_rank() == 1 else real(*args)

    return patch.object(executor, "shared_sets", sets)


def over_stages_first() -> AbstractContextManager[object]:
    """Gradients of what stages share are summed over the stages before they are over replicas."""
    real = gradients.reduce_gradients

    def reduce(found: Iterable[nn.Parameter], mesh: Axes, *rest: Any) -> None:
        parameters = [*found]
        for stages in sorted({shard_of(p).stages for p in parameters} - {()}):
            axis = mesh.holders(stages)
            grads = [gradients._grad(p) for p in parameters if shard_of(p).stages == stages]
            in_buckets(grads, lambda x, axis=axis: comm.all_reduce(x, axis, label=gradients.LABEL))  # type: ignore[misc]
        with patch.object(gradients, "_sum_over_stages", lambda flat, axis: flat):
            real(parameters, mesh, *rest)

    return patch.object(step, "reduce_gradients", reduce)


def one_rank_keeps_its_part() -> AbstractContextManager[object]:
    """A rank does not send the part of the parameters that it has updated."""
    real = step.share_parts

    def share(*args: Any) -> None:
        if dist.get_rank() != 1:
            real(*args)

    return patch.object(step, "share_parts", share)


def one_rank_broadcasts() -> AbstractContextManager[object]:
    def broadcast(_: Any, x: Tensor, axis: Axis, *rest: Any, **more: Any) -> Pending:
        return collectives.start_broadcast(x, axis, 0, later=more.get("later", True))

    return starting("start_all_reduce", _on_rank_1(broadcast))


def one_element_too_few() -> AbstractContextManager[object]:
    real = collectives._reduce_scatter

    def scatter(out: Tensor, x: Tensor, **more: Any) -> Any:
        return real(out, x[:-1], **more)

    return patch.object(collectives, "_reduce_scatter", scatter)


def test_blocks_that_are_not_equal_are_found(gpu: InProcess) -> None:
    sequence = {**MEGATRON, "sequence_parallel": True}
    report: Report = gpu(checked, sequence, {"n_layers": 1}, None, one_element_too_few)
    assert {problem.kind for problem in report.problems} == {"size"}
    assert "6143 elements of float32 are not 2 x 3072" in report.problems[0].text


def test_a_length_that_does_not_divide_is_found(gpu: InProcess) -> None:
    """Such a run is refused before; here nothing has checked its sizes."""
    sequence = {**MEGATRON, "sequence_parallel": True}
    model = {"n_layers": 1, "max_seq_len": 9}
    problem = only(gpu(checked, sequence, model, None, nullcontext, False))
    assert (problem.kind, problem.ranks) == ("error", (0, 1))
    assert "9 does not divide over col=2" in problem.text


def an_operation_that_needs_values() -> AbstractContextManager[object]:
    real = step.Stepper._count

    def counted(self: step.Stepper, *args: Any) -> Any:
        counts, tokens = real(self, *args)
        tokens.nonzero()
        return counts, tokens

    return patch.object(step.Stepper, "_count", counted)


class Found(NamedTuple):
    """A fault, the run into which it is put, and what a check says of it."""

    fault: Fault
    layout: dict[str, Any]
    kind: str
    ranks: tuple[int, ...]
    axis: str
    said: tuple[str, ...]  # at its place, in its text or as its remedy
    n_layers: int = 1
    train: dict[str, Any] | None = None


COMMON = {**CSUB, "feed_forward": "common"}
DRIFT: dict[str, Any] = {"pp": 2, "dp": 2, "micro_batches": 2}
LONGER = ("rank 1: all_reduce of", "module layers.0")
CIRCLE = ("pipeline/executor.py", "before it in the same group comes", "layout.pipeline=gpipe")
OVER_DP = ("only then over dp at parallel/data/gradients.py",)
SHAPE = ("models/blocks/layer.py", "should be broadcastable")
NO_GROUP = ("rank 0 creates 1 group for pp, but rank 1 creates no more groups",)
FOUND: dict[str, Found] = {
    "shape kept": Found(shape_kept, OPTIMUS, "error", (0, 1, 2, 3), "", SHAPE),
    # Only other sub-grids mix devices.
    "counts": Found(counts_left_on_the_device, CSUB, "device", (1,), "", ("cuda",)),
    # The next message of the group does not fit, and the numbers of messages say why.
    "a sum left out": Found(
        *(one_rank_leaves_out_a_sum, MEGATRON, "size", (0, 1), "col"),
        ("rank 1 starts one message less",),
    ),
    "another type": Found(another_type, MEGATRON, "size", (0, 1), "col", LONGER),
    "another size": Found(another_size, MEGATRON, "size", (0, 1), "col", LONGER),
    "another collective": Found(
        *(one_rank_broadcasts, MEGATRON, "order", (0, 1), "col"),
        ("rank 1: broadcast of", "rank 0: all_reduce of"),
    ),
    "an answer left out": Found(
        *(one_rank_keeps_its_part, {"dp": 2, "dp_mode": "zero1"}, "unmatched", (0, 1), "dp"),
        ("rank 1 comes to the end of the step without it", "dp_mode"),
    ),
    "groups left out": Found(
        *(one_rank_leaves_out_groups, {"pp": 3, "micro_batches": 2}, "groups", (0, 1), ""),
        *(NO_GROUP, 3),
    ),
    "an early read": Found(a_value_read_early, {}, "read-back", (0,), "", ()),
    "a trace alone": Found(an_operation_that_needs_values, {}, "untraced", (0,), "", ()),
    "updates in backward": Found(
        *(hooks_inside_of_what_is_recomputed, COMMON, "", (0, 1), "", ("train/optimizer.py",)),
        *(2, {**IN_BACKWARD, "recompute": "full"}),
    ),
} | {
    f"drift, {mode}": Found(
        over_stages_first, {**DRIFT, "dp_mode": mode}, "drift", (0, 1, 2, 3), "pp", OVER_DP, 2
    )
    for mode in ("replicate", "zero1", "fsdp")
}
for pp, k, m in ((4, 1, 5), (5, 1, 8), (3, 2, 4)):
    layout = {"pp": pp, "stages_per_rank": k, "micro_batches": m}
    FOUND[f"one group, {pp} ranks"] = Found(
        *(one_group_for_all_messages, layout, "deadlock", (), "pp", CIRCLE),
        *(pp * k, {"global_batch": m}),
    )
FULL = ("drift, zero1", "drift, fsdp", "one group, 5 ranks", "one group, 3 ranks")


@pytest.mark.parametrize("name", full_unless(lambda name: name not in FULL, FOUND))
def test_a_fault_is_found_and_nothing_without_it(gpu: InProcess, name: str) -> None:
    fault, layout, kind, ranks, axis, said, n_layers, train = FOUND[name]
    model = {"n_layers": n_layers}
    report: Report = gpu(checked, layout, model, train, fault)
    problem = only(report)
    assert problem.kind in ((kind,) if kind else ("deadlock", "order"))
    assert ranks in ((), problem.ranks)
    assert axis in ("", problem.axis)
    for words in said:
        assert words in f"{problem.place} {problem.text} {problem.remedy}"
    assert problem.stops == (kind not in ("read-back", "untraced"))
    assert sum(report.reads.values()) == (kind == "read-back")
    assert gpu(checked, layout, model, train).ok
