"""Networks of transformers whose experts lie on different devices train as in one process.

Losses, every gradient and the weights after three steps of AdamW are compared in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gridformer
from examples import own_model
from gridformer.comm import record_messages
from gridformer.config import LayoutConfig
from gridformer.parallel.network.plan import default_plan
from gridformer.parallel.network.refusals import check
from gridformer.prove import compare, in_float64
from gridformer.utils.errors import ConfigError
from tests.support.marks import extra, full_unless
from tests.support.multirank.expert_networks import HEADS, MOE, NETWORKS, mixtral, qwen3
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool

transformers = extra("transformers")
MEGATRON: dict[str, Any] = {"scheme": "megatron", "cols": 2}
GRID = {"rows": 2, "cols": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "experts_over": ["dp"]},
    "cols": {**MEGATRON, "experts_over": ["cols"]},
    "dp beside columns": {**MEGATRON, "dp": 2, "experts_over": ["dp"]},
    "fsdp beside columns": {**MEGATRON, "dp": 2, "dp_mode": "fsdp", "experts_over": ["dp"]},
    "columns beside fsdp": {**MEGATRON, "dp": 2, "dp_mode": "fsdp", "experts_over": ["cols"]},
    "groups": {"dp": 4, "experts_over": ["dp"], "experts_dp": 2},
    "fsdp of groups": {"dp": 4, "dp_mode": "fsdp", "experts_over": ["dp"], "experts_dp": 2},
    "both": {**MEGATRON, "dp": 2, "dp_mode": "zero1", "experts_over": ["cols", "dp"]},
    "tokens": {**MEGATRON, "dp": 2, "sequence_parallel": True, "experts_over": ["cols", "dp"]},
    "branches": {"scheme": "subgraph", "branches": 2, "dp": 2, "experts_over": ["branches"]},
    "dp beside branches": {"scheme": "subgraph", "branches": 2, "dp": 2, "experts_over": ["dp"]},
    "rows": {"scheme": "optimus", **GRID, "experts_over": ["rows"]},
    "cols beside rows": {"scheme": "optimus", **GRID, "experts_over": ["cols"]},
    "grid": {"scheme": "megatron_2d", **GRID, "experts_over": ["rows", "cols"]},
    "dp beside rows": {"scheme": "optimus", "rows": 2, "dp": 2, "experts_over": ["dp"]},
    "stages": {"pp": 2, "micro_batches": 2, "dp": 2, "experts_over": ["dp"]},
}
QUICK = {
    "mixtral": "cols, groups, stages",
    "qwen3": "fsdp beside columns, both, rows",
    "deepseek": "tokens, branches",
    "olmoe": "dp, fsdp of groups",
    "gpt_oss": "cols, dp beside columns",
    "idle": "dp, cols",
}
PAIRS = [(name, layout) for name in NETWORKS for layout in LAYOUTS]


def measured(name: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module, inputs, plan = NETWORKS[name]()
    return compare(module, inputs, LayoutConfig(**layout), plan)


@pytest.mark.parametrize(
    ("name", "layout"),
    full_unless(lambda pair: pair[1] in QUICK[pair[0]].split(", "), PAIRS, unpack=True),
)
def test_equals_one_process(pool: WorkerPool, name: str, layout: str) -> None:
    """Tokens travel as they do over NCCL."""
    values = LAYOUTS[layout]
    proof = pool.run(LayoutConfig(**values).n_processes, on_nccl, measured, name, values)[0]
    assert proof.equal, proof.worst
    assert proof.worst["relative"] < 1e-10


def one_step(
    layout: dict[str, Any] | None,
) -> tuple[float, dict[str, torch.Tensor], int, dict[str, int]]:
    """Accumulates two batches, clips, and updates; on a layout or, without one, as torch does.

    Returns:
        The norm, all weights, how many elements of experts are here, and how many messages went
        between devices with different ones.
    """
    torch.manual_seed(0)
    made: Any = qwen3()
    module, inputs = made[0].double(), made[1]
    batches = [{key: x[rows] for key, x in inputs.items()} for rows in (slice(4), slice(4, 8))]
    with in_float64(), record_messages() as recorder:
        if layout is None:
            module.set_experts_implementation("eager")
            optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            for batch in batches:
                (module(**batch).loss / 2).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
            optimizer.step()
            state = module.state_dict()
        else:
            net = gridformer.parallelize(module, layout)
            optimizer = net.optimizer(torch.optim.SGD, lr=1.0)
            for i, batch in enumerate(batches):
                net.backward(net(**net.local(batch)).loss / 2, last=i == 1)
            norm = net.clip_gradients(0.1)
            optimizer.step()
            state = net.state_dict()
    held = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    return norm, state, held, recorder.count("experts", "experts")


@pytest.mark.parametrize("layout", ["both", "fsdp of groups", "dp beside columns"])
def test_a_step_with_clipping_and_two_batches(pool: WorkerPool, layout: str) -> None:
    """Each expert counts once in the norm, and is on the devices that the layout says."""
    norm, state, elements, _ = one_step(None)
    values = LAYOUTS[layout]
    of_experts = {"both": 2 / 6, "fsdp of groups": 3 / 6, "dp beside columns": 3 / 6 / 2}[layout]
    for ours, whole, held, messages in pool.run(4, one_step, values):
        assert ours == pytest.approx(norm, rel=1e-12)
        assert held == elements * of_experts
        # Of each batch and layer counts, rows and results, and gradients of these two.
        assert messages == {"all_to_all": 2 * 2 * 5}
        for key, value in state.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-11, atol=1e-13)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no experts": (own_model.network, LAYOUTS["dp"], "the plan of Decoder has no experts"),
    "no axis": (mixtral, {"dp": 2, "experts_over": ["cols"]}, "scheme=single has no cols"),
    "no dp": (mixtral, {"dp": 2, "experts_dp": 2}, "experts_dp=2 needs dp in layout.experts_over"),
    "groups": (mixtral, {**LAYOUTS["groups"], "experts_dp": 3}, "experts_dp=3 does not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(case: str) -> None:
    make, layout, said = REFUSED[case]
    module, _, plan = make()
    with pytest.raises(ConfigError, match=said):
        check(module, LayoutConfig(**layout), plan)


def test_experts_that_nobody_else_can_compute_are_refused() -> None:
    """In a module around a network of transformers, whose own code runs; or with a norm."""
    module, layout = mixtral()[0], LayoutConfig(**LAYOUTS["dp"])
    plan = {f"0.{name}": role for name, role in (default_plan(module) or {}).items()}
    with pytest.raises(ConfigError, match="its own code chooses among all experts"):
        check(torch.nn.Sequential(module), layout, plan)
    vars(module.get_submodule("model.layers.1.mlp.experts"))["has_post_expert_norm"] = True
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts .*a norm of their own"):
        check(module, layout)


def test_widths_need_not_divide_where_experts_do() -> None:
    """The inner width of 15 is that of whole experts, which lie over columns."""
    config = transformers.MixtralConfig(**{**MOE, **HEADS, "intermediate_size": 15})
    module = transformers.MixtralForCausalLM(config)
    check(module, LayoutConfig(**LAYOUTS["cols"]))
    with pytest.raises(ConfigError, match=r"15 does not divide by layout\.cols=2"):
        check(module, LayoutConfig(**MEGATRON))
