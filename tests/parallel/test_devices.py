"""No rank mixes devices when its tensors are on a GPU; see tests/support/fake_gpu.py.

The cases are a selection of all schemes, pipelines, replica modes, memory-saving methods and models
in which each two of them meet. D&SP-cSub is checked on both kinds of sub-grids, whose messages must
also come in one order.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from gridformer.comm import record_messages
from gridformer.config import RunConfig
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.branches import parallelize_branches
from gridformer.parallel.validation import check_layout
from gridformer.record.device import fake_gpu
from gridformer.utils.errors import ConfigError
from tests.support.fake_gpu import Step, Watch, fake_tensors, own_process, playing, step_of
from tests.support.marks import full_unless
from tests.support.multirank.matrix import MODELS, of_one_task
from tests.support.multirank.memory import a_run
from tests.support.multirank.networks import NETWORKS, batch
from tests.support.pairs import pairwise

InProcess = Callable[..., Any]

CSUB = {"scheme": "subgraph", "branches": 2, "common": "first"}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
SCHEMES: dict[str, dict[str, Any]] = {
    "single": {},
    "Megatron": {"scheme": "megatron", "cols": 2},
    "Megatron, sequence parallel": {"scheme": "megatron", "cols": 2, "sequence_parallel": True},
    "Megatron 2-D": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "Optimus": OPTIMUS,
    "Optimus, panels": {**OPTIMUS, "schedule": "pipelined"},
    "Optimus, input stays": {**OPTIMUS, "stationary": "input", "schedule": "broadcast"},
    "D&SP": {"scheme": "subgraph", "branches": 2},
    "D&SP, outside": {"scheme": "subgraph", "branches": 2, "attention": "outside"},
    "cSub": CSUB,
    "cSub, common": {**CSUB, "feed_forward": "common"},
    "cSub, outside": {**CSUB, "attention": "outside"},
    "cSub, outside and common": {**CSUB, "attention": "outside", "feed_forward": "common"},
}
IN_BACKWARD = {"update": "in_backward", "clip_by": "layer"}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"loss_chunk_tokens": 0},
    "float16": {"dtype": "float16", "loss_chunk_tokens": 16, "clip_by": "layer"},
    "selective, bfloat16": {"dtype": "bfloat16", "recompute": "selective", "offload": "optimizer"},
    "full, in_backward": {**IN_BACKWARD, "recompute": "full", "loss_chunk_tokens": 16},
    "in_backward, offload": {**IN_BACKWARD, "offload": "optimizer"},
}
PIPELINES: tuple[dict[str, Any], ...] = (
    {},
    {"pp": 2, "micro_batches": 2},
    {"pp": 2, "micro_batches": 2, "stages_per_rank": 2},
)
REPLICAS: tuple[dict[str, Any], ...] = (
    {},
    {"dp": 2},
    {"dp": 2, "dp_mode": "zero1"},
    {"dp": 2, "dp_mode": "fsdp"},
)


class Case(NamedTuple):
    scheme: str
    pipeline: int
    replicas: int
    method: str
    model: str

    @property
    def run(self) -> RunConfig:
        layout = {**SCHEMES[self.scheme], **PIPELINES[self.pipeline], **REPLICAS[self.replicas]}
        model: dict[str, Any] = {"n_layers": 4 if self.pipeline == 2 else 2, "max_seq_len": 8}
        model |= of_one_task(MODELS[self.model], self.pipeline + self.replicas)
        if self.method == "plain":  # masks make up most operations of a fake step
            model |= {"dropout": 0.1, "attention_dropout": 0.1}
        return a_run(layout, model, {"global_batch": 8, **METHODS[self.method]})

    @property
    def title(self) -> str:
        pipeline = ("", "pp2", "interleaved")[self.pipeline]
        words = (self.scheme, pipeline, REPLICAS[self.replicas].get("dp_mode", ""))
        return "-".join((*words, self.method, self.model)).replace(", ", "_").replace(" ", "_")


CASES = [
    Case(*values)
    for values in itertools.product(
        SCHEMES, range(len(PIPELINES)), range(len(REPLICAS)), METHODS, MODELS
    )
]
QUICK = {
    Case("cSub", 1, 1, "plain", "BERT"),
    Case("cSub, common", 0, 0, "full, in_backward", "T5"),
    Case("cSub, outside", 0, 3, "float16", "GPT-2"),
    Case("D&SP, outside", 1, 2, "in_backward, offload", "GPT-2"),
    Case("Megatron", 2, 0, "full, in_backward", "GPT-2"),
    Case("Megatron 2-D", 1, 2, "plain", "Transformer"),
    Case("Megatron, sequence parallel", 0, 3, "full, in_backward", "GPT-2"),
    Case("Optimus", 0, 0, "plain", "BERT"),
    Case("Optimus, panels", 1, 0, "float16", "GPT-2"),
    Case("single", 1, 3, "selective, bfloat16", "GPT-2"),
}
PAIRED = {
    Case(scheme, pipeline, replicas, method, model)
    for scheme, model, method, replicas, pipeline in pairwise(
        [*SCHEMES], [*MODELS], [*METHODS], range(len(REPLICAS)), range(len(PIPELINES))
    )
}
# Of all cases those in which every pair of values occurs, and as many others.
CHOSEN = sorted(QUICK | PAIRED | set(random.Random(0).sample(CASES, 120)))


@pytest.fixture(scope="module")
def gpu() -> Iterator[InProcess]:
    with own_process() as call:
        yield call


def ranks_of(case: Case) -> list[list[int]]:
    """Return lists of ranks to check; the ranks of one list must send the same messages.

    A scheme's last rank is the most unusual; in D&SP-cSub the first and last sub-grids differ, on
    every stage.
    """
    layout = case.run.layout
    if layout.common == "first":
        return [stage[0].tolist() for stage in mesh_ranks(layout)]
    last = layout.n_processes - 1
    return [[last]] if case in QUICK else [[rank] for rank in {0, last}]


@pytest.mark.parametrize(
    "case", full_unless(QUICK.__contains__, CHOSEN), ids=lambda case: case.title
)
def test_a_step_mixes_no_devices(gpu: InProcess, case: Case) -> None:
    """Run an optimizer step and an evaluation, in which one thread sends every message.

    With both GPU and meta tensors in the graph, torch would run backward in two threads. The host
    never waits for the device.
    """
    if is_refused(case.run):
        pytest.skip("the layout is refused")
    for ranks in ranks_of(case):
        assert_on_one_device(case.run, [gpu(step_of, case.run, rank) for rank in ranks])


def step_beside_gpus(run: RunConfig) -> Step:
    """Run a fake step as on a machine that has GPUs, where torch makes some tensors otherwise."""
    with patch.object(FakeTensorMode, "avoid_device_init", False):
        return step_of(run, 0)


def test_a_machine_may_have_gpus(gpu: InProcess) -> None:
    run = Case("Optimus", 0, 0, "selective, bfloat16", "GPT-2").run
    assert_on_one_device(run, [gpu(step_beside_gpus, run)])


def is_refused(run: RunConfig) -> bool:
    try:
        check_layout(run)
    except ConfigError:
        return True
    return False


def assert_on_one_device(run: RunConfig, steps: list[Step]) -> None:
    """Check the steps of ranks which send the same messages."""
    common = ("branch", "every", "world")
    for step in steps:
        assert len(step.threads) == (run.layout.n_processes > 1)
        assert not step.reads, f"the host waits for the device: {step.places}"
        assert step.over(*common) == steps[0].over(*common)


def network_step(name: str, rank: int, how: dict[str, Any]) -> Step:
    """Return a training step of one of two ranks that share a network's branches."""
    watch = Watch()
    with playing(rank, 2), fake_tensors(), watch, record_messages() as recorder:
        with fake_gpu():
            network = NETWORKS[name]()
        placed = parallelize_branches(network, g=2, **how)
        optimizer = torch.optim.SGD(placed.parameters(), 0.1)
        images, labels = batch(name, 6, 0)
        x, y = placed.local(images.float()), placed.local(labels)
        loss = F.cross_entropy(placed.model(x), y, reduction="sum") / 6
        placed.backward(loss, last=False)
        loss = F.cross_entropy(placed.model(x), y, reduction="sum") / 6
        placed.backward(loss)
        placed.total(loss)
        placed.clip_gradients(1.0)
        optimizer.step()
    return Step.of(recorder, watch)


@pytest.mark.parametrize("common", ["first", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["resnext", "uneven"])
def test_a_network_with_branches_mixes_no_devices(gpu: InProcess, name: str, common: str) -> None:
    steps: list[Step] = [gpu(network_step, name, rank, {"common": common}) for rank in (0, 1)]
    for step in steps:
        assert len(step.threads) == 1
        assert step.over("branch", "world") == steps[0].over("branch", "world")
