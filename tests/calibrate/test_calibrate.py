"""`gridformer calibrate` with tiny cases, on one process and on two."""

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gridformer.calibrate import device, messages
from gridformer.calibrate import operations as calibrated
from gridformer.calibrate.device import Measurements, cpu_seconds, n_copies, typical_host
from gridformer.calibrate.machine import cpu_cluster
from gridformer.calibrate.messages import group_sizes, message_seconds
from gridformer.calibrate.operations import Run, cpu_cases, gpu_cases, operations, quick_cases
from gridformer.cli.app import app
from gridformer.cluster.costs import KernelWork, kernel_s
from gridformer.cluster.file import load_cluster
from gridformer.cluster.messages import MessageWork, message_s
from gridformer.mesh.axes import Axis
from gridformer.train.attention import Shape
from gridformer.utils.errors import UserError
from tests.support.commands import gridformer_alone


def test_attention_is_measured_as_auto_would_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the kernels compete for each shape, and both passes use the fastest."""
    asked = []

    def times(names: object, shapes: list[Shape], *_: object) -> dict[str, float]:
        asked.append(shapes)
        return {"flash": 2.0, "math": 1.0}

    monkeypatch.setattr(calibrated, "times_of", times)
    enabled = torch.backends.cuda.flash_sdp_enabled
    both = [one for one in operations(quick_cases(gpu_cases()), False, True) if "sdpa" in str(one)]
    for one in both:
        with one.within(torch.device("cpu")):
            assert enabled()
        with one.within(torch.device("cuda", 0)):
            assert not enabled()
    assert len(both) == 2
    assert asked == [[Shape(2, 2, 2, 16, 16, 8, True)]]


def test_a_calibrated_machine_is_a_cluster_file_with_times_that_are_positive(
    tmp_path: Path,
) -> None:
    out = tmp_path / "machine.yaml"
    words = ["calibrate", "--quick", "--processes", "1,2", "--out"]
    done = gridformer_alone(*words, out, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "not measured" not in done.stderr
    cluster = load_cluster(out)
    tables = cluster.tables
    assert "measured by gridformer calibrate on" in tables.source
    assert {row.order for row in tables.products} == {"nn", "nt", "tn"}
    assert {row.backward for row in tables.attention} == {True, False}
    for rows in (tables.products, tables.attention, tables.memory, tables.host):
        assert {row.processes for row in rows} == {1, 2}
    ops = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"}
    assert {row.op for row in tables.messages} == {*ops, "send"}
    busy = cluster.model_copy(update={"processes": 2})
    for row in tables.products:
        if row.processes == 2:
            shape = (row.batch, row.m, row.n, row.k)
            work = KernelWork("product", 1.0, 1.0, row.dtype, shape, order=row.order)
            assert kernel_s(busy, work) == pytest.approx(row.us / 1e6)
    for message in tables.messages:
        seconds = message_s(busy, MessageWork(message.op, message.bytes, (0, 1)))  # type: ignore[arg-type]
        assert seconds == pytest.approx(message.us / 1e6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "0,0"), "--out 0,0: name a YAML file"),
        (("--processes", "0,1"), "--processes 0,1: use numbers from 1"),
        (("--processes", "9" * 5000), "use numbers from 1"),
    ],
)
def test_options_are_refused_before_anything_is_measured(
    words: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gridformer.calibrate.machine.calibrate", None)
    found = CliRunner().invoke(app, ["calibrate", *words])
    assert isinstance(found.exception, UserError)
    assert said in str(found.exception)


@pytest.mark.parametrize(("load", "said"), [(2.5, "2.5 processes were running"), (0.3, "")])
def test_a_busy_machine_is_told_and_noted_in_the_file(
    load: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_cluster("dgx-h100"), list[str]()
    monkeypatch.setattr("gridformer.calibrate.machine.calibrate", lambda *_: found)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    out = tmp_path / "local.yaml"
    done = CliRunner().invoke(app, ["calibrate", "--out", str(out)])
    assert done.exit_code == 0
    notes = [line for line in out.read_text().splitlines() if line.startswith("# Times")]
    assert [line.endswith(f"{said}.") for line in notes] == [True] * bool(said)
    assert ("This machine is busy" in done.stderr) is bool(said)
    assert said in done.stderr
    assert load_cluster(out).device == found[0].device


@pytest.mark.parametrize("gpu", [False, True])
def test_every_operation_has_a_row_that_its_table_accepts(gpu: bool) -> None:
    cases = quick_cases(gpu_cases() if gpu else cpu_cases())
    measured = Measurements()
    listed = [*operations(cases, few=False, gpu=gpu)]
    for number, operation in enumerate(listed, 1):
        measured.add(operation, 1, 1e-6 * number)
    tables = measured.tables("test")
    every = (tables.products, tables.attention, tables.memory)
    times = [row.us for rows in every for row in rows]
    assert sorted(times) == [i + 1 for i in range(len(listed))]
    assert {row.processes for rows in every for row in rows} == {1}


def test_an_operation_takes_turns_on_tensors_that_caches_cannot_all_hold() -> None:
    """As a training step, which comes back to a weight after all others."""
    assert n_copies(2**20, 1) == 64
    assert n_copies(4 * 2**20, 1) == 32
    assert n_copies(4 * 2**20, 16) == 2
    assert n_copies(2**40, 1) == 1
    called: list[int] = []
    results: list[weakref.ref[Tensor]] = []

    def run(number: int) -> Tensor:
        called.append(number)
        alive = sum(result() is not None for result in results)
        assert alive == min(len(results), 3)
        result = torch.ones(1)
        results.append(weakref.ref(result))
        return result

    cpu_seconds([partial(run, number) for number in range(3)], 1e-3, lambda: None)
    assert called == [number % 3 for number in range(len(called))]
    assert len(called) > 3


def test_all_operations_of_a_cpu_take_such_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def seconds(runs: list[Run], *_: object) -> float:
        copies.append(len(runs))
        return 1e-3

    monkeypatch.setattr(device, "cpu_seconds", seconds)
    device.measure_cpu(quick_cases(cpu_cases()), 4, True, 2, lambda: None, lambda _: None)
    *of_operations, of_the_host = copies
    assert ({*of_operations}, of_the_host) == ({64}, 1)


def test_times_are_means_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other of two processes has taken three times as long."""
    monkeypatch.setattr(device.comm, "all_reduce", lambda own, axis: own + 3 * own)
    measured = Measurements({"memory": [["add", "float32", 2, 64.0, 10.0]]}, host=[1e-6, 1e-3])
    measured.average(Axis("world", 2, 0))
    assert measured.rows == {"memory": [["add", "float32", 2, 64.0, 20.0]]}
    assert measured.host == pytest.approx([2e-6, 2e-3])


def test_what_several_processes_could_not_measure_is_said_once() -> None:
    measured = Measurements(failures=["one"], backend="gloo")
    measured.extend(Measurements(failures=["one", "two"]))
    assert (measured.failures, measured.backend) == (["one", "two"], "gloo")


def test_rates_are_those_of_the_fastest_rows() -> None:
    """1000^3 is 2 GFLOP, and an operation other than a copy does not count."""
    sizes = [1000] * 3
    products = [["float32", 1, n, *sizes, "nn", us] for n, us in ((1, 2e3), (2, 1e3))]
    memory = [["copy_", "float32", 1, 1e6, 10.0], ["add", "float32", 1, 1e6, 1.0]]
    found = cpu_cluster(Measurements({"products": products, "memory": memory})).device
    assert found.peak_tflops["float32"].value == 4
    assert found.memory_gbps.value == 100


def test_groups_of_several_sizes_divide_the_processes() -> None:
    assert [group_sizes(n) for n in (2, 4, 8, 9, 16)] == [[2], [2, 4], [2, 8], [3, 9], [2, 4, 16]]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_a_message_has_the_bytes_of_its_row(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a rank passes in or, for the first two, those of the gathered buffer."""
    sent: list[Tensor] = []

    def sends(x: Tensor | list[Tensor], *_: object) -> None:
        sent.extend([x] if isinstance(x, Tensor) else x)

    monkeypatch.setattr(messages.comm, op, sends)
    axis = Axis("calibrate", 4, 1)
    messages.sends_of(axis, torch.device("cpu"))[op](4096)()
    assert sum(x.nbytes for x in sent) * (4 if op == "all_gather" else 1) == 4096


class Clock:
    """A clock that messages move, which take `seconds()`, and that ranks may meet at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.sent, self.since_met = 0.0, 0, 0
        patch.setattr(messages.comm, "barrier", self.meet)
        patch.setattr(messages.time, "perf_counter", lambda: self.now)

    def meet(self, *_: object) -> None:
        self.now, self.since_met = self.now + 100.0, 0

    def measured(self, window_s: float, seconds: Callable[[], float]) -> float:
        def run() -> None:
            self.sent, self.since_met = self.sent + 1, self.since_met + 1
            self.now += seconds()

        return message_seconds(run, window_s, Axis("world", 1, 0), False)


def test_a_message_takes_what_a_busy_link_needs_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was idle lets some bytes pass at once, which a step of messages does not see."""
    clock = Clock(monkeypatch)
    seconds = clock.measured(1e3, lambda: 1.5 if clock.since_met == 1 else 4.0)
    assert seconds == pytest.approx(4.0, rel=0.02), "not the 1.5 s of one message"


def test_a_message_takes_as_long_as_one_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages in a row each may begin before the last one is over."""
    clock = Clock(monkeypatch)
    assert clock.measured(10.0, lambda: 3.0 if clock.since_met == 1 else 1.0) == 3.0


@pytest.mark.parametrize("stuck", [3, 8, 12, 17, 22])
def test_a_message_that_was_stuck_does_not_count(
    monkeypatch: pytest.MonkeyPatch, stuck: int
) -> None:
    """One message of all waits a long time, such as for a packet that is sent again."""
    clock = Clock(monkeypatch)
    assert clock.measured(5.0, lambda: 100.0 if clock.sent == stuck else 1.0) == 1.0
    assert (clock.sent > 20) == (8 < stuck < 14), "rows are sent again only if they were slow"


def test_a_slow_moment_of_the_host_does_not_count() -> None:
    """On a machine that others use, too, one of three measurements may be twice as long."""
    assert typical_host([[57e-6, 1e-6], [35e-6, 4e-4], [34e-6, 5e-4]]) == [35e-6, 4e-4]
    assert typical_host([[], [35e-6, 4e-4], []]) == [35e-6, 4e-4]
    assert typical_host([[], []]) == []
