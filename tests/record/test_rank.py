"""The trace of one rank: its messages with their places, groups, waits and read-backs."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from gridformer import comm
from gridformer.config import RunConfig
from gridformer.parallel.axes import build_axes
from gridformer.record import Start, Trace, Wait, trace_rank
from gridformer.record.device import fake_gpu
from gridformer.record.fake import watched_fakes
from gridformer.record.step import _said, on_devices
from tests.support.fake_gpu import InProcess
from tests.support.multirank.memory import a_run

MEGATRON = {"scheme": "megatron", "cols": 2, "pp": 2}


@pytest.fixture(scope="module")
def traces(gpu: InProcess) -> list[Trace]:
    run = a_run(MEGATRON, {"n_layers": 2, "max_seq_len": 8}, {"global_batch": 2})
    return [gpu(trace_rank, run, rank) for rank in (0, 3)]


def starts(trace: Trace) -> list[Start]:
    return [event for event in trace.events if isinstance(event, Start)]


def test_every_message_is_waited_for_once(traces: list[Trace]) -> None:
    for trace in traces:
        assert trace.complete
        assert not trace.troubles
        waits = Counter(event.number for event in trace.events if isinstance(event, Wait))
        assert waits == Counter(start.number for start in starts(trace))


def test_messages_name_their_group_axis_and_purpose(traces: list[Trace]) -> None:
    first, last = traces
    assert {s.ranks for s in starts(first) if s.axis == "col"} == {(0, 1)}
    assert {s.ranks for s in starts(last) if s.axis == "col"} == {(2, 3)}
    assert {s.group for s in starts(first) if s.axis == "world"} == {"0"}
    (sent,) = (part for s in starts(first) for part in s.parts if part.what == "send")
    (received,) = (part for s in starts(last) for part in s.parts if part.what == "recv")
    assert (sent.peer, received.peer) == (2, 1)
    assert sent.size == received.size == 8 * 48, "half of [2, 8, 48]: two columns send slices"
    assert {s.label for s in starts(first)} >= {"pipeline", "metrics"}
    assert first.groups == last.groups, "all ranks create the same groups"


def test_places_name_the_line_the_module_and_the_direction(traces: list[Trace]) -> None:
    sums = [s for s in starts(traces[0]) if s.op == "all_reduce" and s.axis == "col"]
    inside = [s.place for s in sums if s.place.module.startswith("layers.0")]
    assert {place.backward for place in inside} == {False, True}
    assert all(place.file.startswith("parallel/tensor/") for place in inside)
    assert {s.place.file for s in starts(traces[0]) if s.axis == "world"} == {"train/step.py"}


def test_the_host_waits_for_nothing(traces: list[Trace]) -> None:
    """The step's result is copied without waiting, and read when the next step is under way."""
    assert [trace.reads for trace in traces] == [[]] * len(traces)


def reading(run: RunConfig) -> list[bool]:
    """Return what is recorded about reading from the device in all ways."""
    with on_devices(run, 0) as log, watched_fakes(log):
        x = torch.ones(2, 2, device=fake_gpu())
        _ = [x.tolist(), x[0, 0].item(), float(x[0, 0]), int(x[0, 0]), bool(x[0, 0])]
        _ = x.cpu()
        torch.empty(2, 2).copy_(x)
        x.to("cpu", non_blocking=True)
        torch.ones(2).tolist()  # is in the host's memory
    return [read.copies for read in log.trace.reads]


def test_all_ways_to_read_are_recorded(gpu: InProcess) -> None:
    assert gpu(reading, a_run({}, {}, {})) == [False] * 8 + [True] * 2


def posted(run: RunConfig) -> tuple[Trace, list[int]]:
    """Post two messages together and one alone."""
    with on_devices(run, 1) as log:
        axis = build_axes(run.layout, log.device.type).col
        with watched_fakes(log):
            x, y = torch.ones(3, device=fake_gpu()), torch.ones(4, device=fake_gpu())
            comm.exchange({0: x}, {0: y}, axis)
            comm.exchange({}, {0: y}, axis)
            alone = dist.irecv(x, 0)
            assert alone is not None
            alone.wait()
            alone.wait()
    return log.trace, [len(event.parts) for event in starts(log.trace)]


def test_messages_that_are_posted_together_are_one(gpu: InProcess) -> None:
    trace, parts = gpu(posted, a_run({"scheme": "megatron", "cols": 2}, {}, {}))
    assert parts == [2, 1, 1]
    assert [type(event) for event in trace.events] == [Start, Wait] * 3


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Expected all tensors to be on the same device, but found at least two devices", "device"),
        ("Unhandled FakeTensor Device Propagation, found two different devices cpu, x", "device"),
        ("The size of tensor a (3) must match the size of tensor b (4)", "error"),
    ],
)
def test_all_versions_of_torch_say_that_devices_are_mixed(said: str, kind: str) -> None:
    assert _said(RuntimeError(said)) == (kind, f"RuntimeError: {said}")
