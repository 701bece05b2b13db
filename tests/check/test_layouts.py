"""Every layout passes a check: deep pipelines, all families, both forms of D&SP, up to 64 ranks."""

from typing import Any, NamedTuple

import pytest
import torch

from gridformer.check import Report, report_of
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.record.rank import record_ranks
from gridformer.record.step import RecordOptions
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.multirank import matrix
from tests.support.multirank.matrix import MODELS, Cell, of_one_task, refusal
from tests.support.multirank.memory import a_run

MEGATRON = {"scheme": "megatron", "cols": 2}
SEQUENCE = {**MEGATRON, "sequence_parallel": True}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
DSP = {"scheme": "subgraph", "branches": 2}
CSUB = {**DSP, "common": "first"}
V_SHAPED = {"stages_per_rank": 2, "pipeline": "zbv"}
IN_BACKWARD = {"update": "in_backward", "clip_by": "layer", "recompute": "full"}
BF16 = {"recompute": "full", "dtype": "bfloat16"}


class Case(NamedTuple):
    model: str
    layout: dict[str, Any]
    train: dict[str, Any]

    @property
    def title(self) -> str:
        values = [self.model, *self.layout.values(), *self.train.values()]
        return "-".join(map(str, values))


DEEP = [
    Case("GPT-2", {"pp": 8, "micro_batches": 32}, {}),
    Case("GPT-2", {"pp": 8, "micro_batches": 32, "pipeline": "gpipe"}, {}),
    Case("BERT", {"pp": 8, "micro_batches": 32}, {}),
    Case("Llama", {"pp": 8, "micro_batches": 32, **MEGATRON}, {}),
    Case("GPT-2", {"pp": 5, "micro_batches": 7, **MEGATRON}, {}),
    Case("GPT-2", {"pp": 4, "micro_batches": 32, "stages_per_rank": 4}, {}),
    Case("GPT-2", {"pp": 8, "micro_batches": 16, "stages_per_rank": 2}, {}),
    Case("GPT-2", {"pp": 8, "micro_batches": 16, **V_SHAPED}, {}),
    Case("T5", {"pp": 5, "micro_batches": 6, **V_SHAPED, **MEGATRON}, {}),
    Case("T5", {"pp": 8, "micro_batches": 16, **SEQUENCE}, {}),
    Case("GPT-2", {"pp": 4, "micro_batches": 8, "stages_per_rank": 4, **OPTIMUS}, {}),
    Case("BERT", {"pp": 4, "micro_batches": 8, "stages_per_rank": 4, **DSP}, {}),
    Case("T5", {"pp": 2, "micro_batches": 8, "stages_per_rank": 4, **CSUB}, {}),
    Case("Transformer", {"pp": 4, "micro_batches": 8, "stages_per_rank": 2, **CSUB}, IN_BACKWARD),
]
WIDE = [
    Case("GPT-2", {**OPTIMUS, "rows": 4, "cols": 4, "dp": 2, "pp": 2, "micro_batches": 4}, {}),
    Case("GPT-2", {**MEGATRON, "cols": 4, "dp": 4, "dp_mode": "fsdp", "pp": 4}, {}),
    Case("GPT-2", {**CSUB, "branches": 4, "dp": 2, "pp": 8, "micro_batches": 8}, IN_BACKWARD),
]
QUICK = [
    Case("BERT", {"scheme": "megatron_2d", "rows": 2}, BF16),
    Case("GPT-2", {**DSP, "attention": "outside", "pp": 2, "micro_batches": 2}, {}),
    Case("Transformer", {"pp": 2, "micro_batches": 4, "stages_per_rank": 2}, {}),
    Case("Llama", {"pp": 4, "micro_batches": 6}, {}),
    Case("Llama", {"pp": 3, "micro_batches": 5, **V_SHAPED}, {}),
    Case("GPT-2", {**OPTIMUS, "schedule": "pipelined"}, BF16),
    Case("GPT-2", {**CSUB, "dp": 2}, IN_BACKWARD),
    Case("GPT-2", {**CSUB, "pp": 2, "micro_batches": 6}, {}),
]
CELLS = [cell for cell in sorted(matrix.QUICK) if not refusal(cell)]
CASES = [*QUICK, *DEEP, *WIDE, *CELLS]


def checked(case: Case | Cell) -> Report:
    """Return the report of a run, all ranks of which are traced in this process."""
    torch.set_num_threads(1)
    layout = case.layout
    n_layers = 2 * layout.get("pp", 1) * layout.get("stages_per_rank", 1)
    shares = layout.get("micro_batches", 1) * layout.get("dp", 1) * 4
    train = {"global_batch": shares, "loss_chunk_tokens": 0}
    model: dict[str, Any] = {"n_layers": n_layers, "max_seq_len": 16}
    if isinstance(case, Cell):
        run = a_run(layout, model | case.config, {**train, "global_batch": 2 * shares}, case.task)
    else:
        config = of_one_task(MODELS[case.model], [*MODELS].index(case.model))
        run = a_run(layout, model | config, {**train, **case.train})
    check_layout(run)
    decisions = decide_run(run)
    lines = [[rank] for rank in range(run.layout.n_processes)]
    records = record_ranks(run, lines, decisions, RecordOptions(extent="all layers"))
    return report_of(run, [one.trace for one in records])


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case in QUICK, CASES), ids=lambda case: case.title
)
def test_the_layout_has_no_problem(gpu: InProcess, case: Case | Cell) -> None:
    report: Report = gpu(checked, case)
    assert report.ok, "\n".join(f"{one.kind} {one.place}: {one.text}" for one in report.problems)
    assert report.n_messages or report.n_ranks == 1
