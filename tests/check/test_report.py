"""A check finds the faults of a step that were seen or foreseen on GPUs, when they are put back.

Faults that are not in a step are put back where they are tested: a rank that does not report before
it leaves in tests/launch/test_failing.py, and a rendezvous that can be reached from outside in
tests/launch/test_privacy.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer import comm
from gridformer.check import Problem, Report, report_of
from gridformer.comm import Pending, collectives
from gridformer.mesh import Axes, Axis, groups
from gridformer.models.blocks import Recompute
from gridformer.parallel.data import gradients
from gridformer.parallel.data.buckets import in_buckets
from gridformer.parallel.pipeline import executor
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.validation import check_layout
from gridformer.record import trace_rank
from gridformer.train import forward_backward, step
from tests.support.checking import one_group_for_all_messages
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

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


# --------------------------------------------------------------------------- faults put back


def strides_kept() -> AbstractContextManager[object]:
    """The result of a reduce-scatter keeps the strides of a transposed block, as it once did."""

    def add(total: comm.SumOfBlocks, own: Tensor) -> Pending:
        axis = total._axis
        terms = torch.stack([*total._others[: axis.index], own, *total._others[axis.index :]])
        out = torch.empty_like(own)
        work = collectives._reduce_scatter(
            out.view(-1), terms.view(-1), group=axis.group, async_op=True
        )
        return Pending(out, work, None, terms)

    return patch.object(comm.SumOfBlocks, "add", add)


def test_strides_that_a_result_keeps_are_found(gpu: InProcess) -> None:
    problem = only(gpu(checked, OPTIMUS, None, None, strides_kept))
    assert (problem.kind, problem.ranks) == ("error", (0, 1, 2, 3))
    assert problem.place.file == "parallel/tensor/summa/gathered.py"
    assert "view size is not compatible" in problem.text


@pytest.mark.parametrize(
    "layout",
    full_unless(
        lambda layout: layout["pp"] == 4 and "stages_per_rank" not in layout,
        [
            {"pp": 4, "micro_batches": 5},
            {"pp": 5, "micro_batches": 8},
            {"pp": 3, "stages_per_rank": 2, "micro_batches": 4},
        ],
    ),
    ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_a_pipeline_in_one_group_waits_in_a_circle(gpu: InProcess, layout: dict[str, Any]) -> None:
    model = {"n_layers": 6 if "stages_per_rank" in layout else layout["pp"]}
    train = {"global_batch": layout["micro_batches"]}
    problem = only(gpu(checked, layout, model, train, one_group_for_all_messages))
    assert (problem.kind, problem.axis) == ("deadlock", "pp")
    assert problem.place.file == "parallel/pipeline/executor.py"
    assert "before it in the same group comes" in problem.text
    assert "layout.pipeline=gpipe" in problem.remedy
    assert gpu(checked, layout, model, train).ok


def counts_left_on_the_device() -> AbstractContextManager[object]:
    """Losses that another device computes are divided by counts of this one."""

    def weighted(losses: Any, counts: Any, scale: float) -> Tensor:
        parts = [loss / counts[name].clamp(min=1) for name, loss in losses.items()]
        return sum(parts, torch.zeros((), device=parts[0].device)) * scale

    return patch.object(forward_backward, "weighted", weighted)


def test_counts_on_another_device_are_found(gpu: InProcess) -> None:
    problem = only(gpu(checked, CSUB, None, None, counts_left_on_the_device))
    assert (problem.kind, problem.ranks) == ("device", (1,)), "only other sub-grids mix devices"
    assert "cuda" in problem.text


def hooks_inside_of_what_is_recomputed() -> AbstractContextManager[object]:
    def before_backward(self: Recompute, block: nn.Module, hook: Callable[[Tensor], None]) -> None:
        def after_forward(_: nn.Module, __: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(hook)

        block.register_forward_hook(after_forward)

    return patch.object(Recompute, "before_backward", before_backward)


def test_the_deadlock_of_updates_in_backward_is_found(gpu: InProcess) -> None:
    layout = {**CSUB, "feed_forward": "common"}
    train = {**IN_BACKWARD, "recompute": "full"}
    problem = only(gpu(checked, layout, None, train, hooks_inside_of_what_is_recomputed))
    assert problem.ranks == (0, 1)
    assert problem.kind in ("deadlock", "order")
    assert "train/optimizer.py" in f"{problem.place} {problem.text}"
    assert gpu(checked, layout, None, train).ok


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


def test_a_rank_that_misses_a_collective_is_found(gpu: InProcess) -> None:
    """The next message of the group does not fit, and the numbers of messages say why."""
    problem = only(gpu(checked, MEGATRON, {"n_layers": 1}, None, one_rank_leaves_out_a_sum))
    assert (problem.kind, problem.axis, problem.ranks) == ("size", "col", (0, 1))
    assert "rank 1 starts one message less" in problem.text


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


@pytest.mark.parametrize("fault", [another_type, another_size])
def test_messages_of_different_sizes_and_types_are_found(gpu: InProcess, fault: Fault) -> None:
    problem = only(gpu(checked, MEGATRON, {"n_layers": 1}, None, fault))
    assert (problem.kind, problem.axis, problem.ranks) == ("size", "col", (0, 1))
    assert "rank 1: all_reduce of" in problem.text
    assert problem.place.module.startswith("layers.0"), "it names the module"


def a_value_read_early() -> AbstractContextManager[object]:
    real = step.Stepper._count

    def counted(self: step.Stepper, *args: Any) -> Any:
        counts, tokens = real(self, *args)
        assert float(tokens[0]) > 0
        return counts, tokens

    return patch.object(step.Stepper, "_count", counted)


def test_values_read_early_are_found(gpu: InProcess) -> None:
    report: Report = gpu(checked, {}, None, None, a_value_read_early)
    problem = only(report)
    assert problem.kind == "read-back"
    assert not problem.stops
    assert sum(report.reads.values()) == 1
    assert not gpu(checked, {}).reads


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


def test_groups_that_a_rank_does_not_create_are_found(gpu: InProcess) -> None:
    layout = {"pp": 3, "micro_batches": 2}
    problem = only(gpu(checked, layout, {"n_layers": 3}, None, one_rank_leaves_out_groups))
    assert (problem.kind, problem.ranks) == ("groups", (0, 1))
    assert problem.text == "rank 0 creates 1 group for pp, but rank 1 creates no more groups"


def a_call_for_each_line() -> AbstractContextManager[object]:
    """Every group is created by a call of its own, in which all ranks take part."""
    real = groups.make_groups

    def make_groups(lines: Sequence[Sequence[int]], purpose: str) -> Any:
        made = [real([line], purpose) for line in lines]
        return next((group for group in made if group is not None), None)

    return patch.object(groups, "make_groups", make_groups)


def test_calls_that_grow_with_ranks_are_found(gpu: InProcess) -> None:
    layout = {"pp": 3, "cols": 2, "scheme": "megatron", "micro_batches": 2}
    model = {"n_layers": 3}
    report: Report = gpu(checked, layout, model, None, a_call_for_each_line)
    assert {problem.kind for problem in report.problems} == {"calls"}
    assert not any(problem.stops for problem in report.problems)
    said = {problem.axis: problem.text for problem in report.problems}
    assert {"pp", "col", "pp up", "pp down"} <= {*said}
    assert said["col"].startswith("3 calls create the 3 groups for col, one for each")
    assert gpu(checked, layout, model).ok


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


@pytest.mark.parametrize("mode", full_unless("replicate".__eq__, ["replicate", "zero1", "fsdp"]))
def test_sums_over_stages_before_replicas_are_found(gpu: InProcess, mode: str) -> None:
    layout = {"pp": 2, "dp": 2, "dp_mode": mode, "micro_batches": 2}
    problem = only(gpu(checked, layout, None, None, over_stages_first))
    assert (problem.kind, problem.axis, problem.ranks) == ("drift", "pp", (0, 1, 2, 3))
    assert "only then over dp at parallel/data/gradients.py" in problem.text
    assert gpu(checked, layout).ok


def one_rank_keeps_its_part() -> AbstractContextManager[object]:
    """A rank does not send the part of the parameters that it has updated."""
    real = step.share_parts

    def share(*args: Any) -> None:
        if dist.get_rank() != 1:
            real(*args)

    return patch.object(step, "share_parts", share)


def test_a_collective_that_is_never_answered_is_found(gpu: InProcess) -> None:
    layout = {"dp": 2, "dp_mode": "zero1"}
    problem = only(gpu(checked, layout, {"n_layers": 1}, None, one_rank_keeps_its_part))
    assert (problem.kind, problem.axis, problem.ranks) == ("unmatched", "dp", (0, 1))
    assert "rank 1 comes to the end of the step without it" in problem.text
    assert "dp_mode" in problem.remedy


def one_rank_broadcasts() -> AbstractContextManager[object]:
    def broadcast(_: Any, x: Tensor, axis: Axis, *rest: Any, **more: Any) -> Pending:
        return collectives.start_broadcast(x, axis, 0, later=more.get("later", True))

    return starting("start_all_reduce", _on_rank_1(broadcast))


def test_different_collectives_are_found(gpu: InProcess) -> None:
    problem = only(gpu(checked, MEGATRON, {"n_layers": 1}, None, one_rank_broadcasts))
    assert (problem.kind, problem.axis, problem.ranks) == ("order", "col", (0, 1))
    assert "rank 1: broadcast of" in problem.text
    assert "rank 0: all_reduce of" in problem.text


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


def test_what_only_a_trace_cannot_do_is_told_apart(gpu: InProcess) -> None:
    problem = only(gpu(checked, {}, None, None, an_operation_that_needs_values))
    assert problem.kind == "untraced"
    assert not problem.stops
