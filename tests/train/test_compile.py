"""train.compile: the same training, compiled once, and refused where it cannot work."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, TrainConfig, parse_run
from gridformer.launch.plan import plan_run
from gridformer.launch.run import execute
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import scores
from gridformer.models.blocks.late_gradient import WeightPass, split_backward
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.zero import stored
from gridformer.train import compile as compiling
from gridformer.train import trainer
from gridformer.train.compile import (
    agreed_uncompiled,
    compile_model,
    compile_problems,
    why_uncompiled,
)
from gridformer.train.in_flight_steps import StepResult
from gridformer.train.metrics import read_metrics
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch, next_words
from tests.support.marks import full_unless
from tests.support.multirank.exactness import batch_of
from tests.support.multirank.exactness import tiny as two_layers
from tests.support.multirank.pool import WorkerPool

CPU = torch.device("cpu")
ON: dict[str, Any] = {"compile": True, "device": "cpu"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Clear compiled code, and use one thread, since tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


tiny = partial(two_layers, n_layers=3, max_seq_len=16)


def train(
    config: ModelConfig,
    backend: Any,
    n_steps: int = 3,
    layout: LayoutConfig | None = None,
    axes: Axes | None = None,
    dtype: Any = "float32",
    evaluates: bool = True,
    documents: bool = False,
    **methods: Any,
) -> tuple[list[StepResult], float, Model]:
    """Run some steps of two micro-batches and an evaluation; not compiled if `backend` is empty.

    Args:
        documents: Whether each row holds two documents that do not see each other.
        methods: Settings of TrainConfig that save memory.
    """

    def rows_of(batch: Tensor) -> Batch:
        found = next_words(batch)
        if documents:
            found["documents"] = (
                (torch.arange(found["tokens"].shape[1]) > 6).long().repeat(len(batch), 1)
            )
        if config.two_stacks:
            found["source"] = found["tokens"].flip(1)
        return found

    layout, axes = layout or LayoutConfig(), axes or Axes()
    model = build_parallel(config, layout, axes, 3, CPU, dtype)
    if backend:
        compile_model(model, backend, layout.splits_backward)
    # The keys' biases have gradients of rounding error only; a large epsilon keeps Adam from
    # scaling them up.
    settings = TrainConfig(global_batch=4, dtype=dtype, lr=1e-2, adam_eps=1e-3, **methods)
    layout = layout.model_copy(update={"micro_batches": 2})
    stepper = Stepper(model, settings, axes, layout)
    batches = [batch_of(step, config, 4) for step in range(n_steps)]
    results = [stepper(i, lambda rows, b=b: rows_of(b[rows])) for i, b in enumerate(batches)]  # type: ignore[misc]
    if not evaluates:
        return results, 0.0, model
    return results, stepper.evaluate([lambda rows: rows_of(batches[0][rows])]).loss, model


def assert_same(got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float = 1e-5) -> None:
    for a, b in zip(got[0], want[0]):
        assert a.loss == pytest.approx(b.loss, rel=tolerance)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=tolerance)
    assert got[1] == pytest.approx(want[1], rel=tolerance)
    for (name, p), (other, q) in zip(got[2].named_parameters(), want[2].named_parameters()):
        assert name == other
        scale = max(float(q.detach().abs().max()), 1e-3)
        assert float((p - q).detach().abs().max()) < 10 * tolerance * scale, name


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# --------------------------------------------------- the same training


@pytest.mark.parametrize("experts", [{}, {"n_experts": 3, "experts_per_token": 2}])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_compiled_llama_has_the_same_gradients(dtype: str, experts: dict[str, int]) -> None:
    """Its functions with gradients of their own must not return what they change in place."""
    config = tiny(family="llama", n_kv_heads=4, ffn_size=64, qk_norm=True, **experts)
    got, want = (train(config, backend, n_steps=2, dtype=dtype) for backend in ("aot_eager", ""))
    assert_same(got, want, 1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU backend compiles C++ with g++")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("evaluates", [False, pytest.param(True, marks=pytest.mark.full)])
def test_compiled_steps_are_the_same_steps(evaluates: bool) -> None:
    """With the real compiler, losses, norms and weights of 3 steps are the same.

    The block and the loss compile once each, however many layers there are.
    """
    want = train(tiny(), "", evaluates=evaluates)
    counters.clear()
    got = train(tiny(), "inductor", evaluates=evaluates)
    assert_same(got, want)
    assert not counters["graph_break"]
    assert graphs() == (4 if evaluates else 2), "block and loss, and both for evaluation"


@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU backend compiles C++ with g++")
@pytest.mark.timeout(600)
def test_weight_passes_find_what_compiled_backward_passes_had() -> None:
    """The real compiler puts tensors into the memory of others, if it is not told to leave it."""
    config, gradients = tiny(n_layers=2), []
    for backend in ("inductor", ""):
        model = build_parallel(config, LayoutConfig(), Axes(), 3, CPU)
        if backend:
            compile_model(model, backend, splits=True)
        passes = [WeightPass() for _ in range(2)]
        with split_backward():
            for number, left in enumerate(passes):
                hidden = model.run(next_words(batch_of(number, config, 2))).hidden
                assert hidden is not None
                with left.open():
                    hidden.square().sum().backward()
        assert model.get_parameter("layers.1.mlp.up.weight").grad is None
        for left in passes:
            left.run()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, want in gradients[1].items():
        assert torch.allclose(gradients[0][name], want, 1e-4, 1e-5 * float(want.abs().max())), name


def test_documents_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes its queries in parts, outside of the compiled code."""
    monkeypatch.setattr(scores, "QUERIES", 4)
    config = tiny(n_layers=2)
    got, want = (train(config, backend, 2, documents=True) for backend in ("aot_eager", ""))
    assert_same(got, want)
    assert got[0][0].loss != train(config, "", 1)[0][0].loss


@pytest.mark.parametrize(
    "family", full_unless("gpt2".__eq__, ["gpt2", "bert", "llama", "transformer", "t5"])
)
def test_dropout_is_in_the_graph_and_keeps_its_masks(family: str) -> None:
    """Compiled steps are bit-equal, but for norms of Llama and T5, which are rounded otherwise."""
    config = tiny(family=family, dropout=0.2, attention_dropout=0.2)
    got, want = (train(config, backend, evaluates=False) for backend in ("aot_eager", ""))
    assert_same(got, want, 1e-6)
    if family not in ("llama", "t5"):
        assert [(r.loss, r.grad_norm) for r in got[0]] == [(r.loss, r.grad_norm) for r in want[0]]
        assert all(map(torch.equal, got[2].parameters(), want[2].parameters()))
    assert not counters["graph_break"]
    assert graphs() == 2 + config.two_stacks, "a block of each stack, and the loss"
    without = train(tiny(family=family), "", n_steps=1, evaluates=False)
    assert without[0][0].loss != want[0][0].loss


@pytest.mark.parametrize(
    ("recompute", "changes", "dtype"),
    full_unless(
        lambda case: case[:2] == ("selective", {"attention_dropout": 0.2}),
        [
            ("full", {"dropout": 0.2}, "bfloat16"),
            ("full", {"attention_dropout": 0.2}, "float32"),
            ("selective", {}, "float32"),
            ("selective", {"attention_dropout": 0.2}, "float32"),
        ],
        unpack=True,
    ),
    ids=str,
)
def test_recomputed_blocks_compile(recompute: str, changes: dict[str, float], dtype: str) -> None:
    """The loss is chunked, and nothing is compiled again after the first step."""
    config, seen = tiny(**changes), []
    for n_steps in (1, 3):
        torch._dynamo.reset()
        counters.clear()
        methods: dict[str, Any] = {"recompute": recompute, "loss_chunk_tokens": 12}
        got = train(config, "aot_eager", n_steps, dtype=dtype, **methods)
        seen.append(graphs())
    assert seen[0] == seen[1]
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    assert_same(got, train(config, "", dtype=dtype), tolerance)


@pytest.mark.parametrize("changes", [{}, {"family": "llama", "n_kv_heads": 4, "ffn_size": 64}])
def test_compiled_products_are_those_of_uncompiled_code(changes: dict[str, Any]) -> None:
    """In bfloat16 compiled code casts no weight and no gradient of one, and multiplies as often."""
    graphs: list[list[str]] = []
    casts: list[tuple[int, ...]] = []

    def compiler(graph: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([str(node.target) for node in nodes])
        casts.extend(
            tuple(node.meta["val"].shape) for node in nodes if "_to_copy" in str(node.target)
        )
        called: Callable[..., Any] = make_boxed_func(graph.forward)
        return called

    config = tiny(**changes)
    got = train(config, aot_autograd(fw_compiler=compiler), 2, dtype="bfloat16", evaluates=False)
    want = train(config, "", 2, dtype="bfloat16", evaluates=False)
    assert [(r.loss, r.grad_norm) for r in got[0]] == [(r.loss, r.grad_norm) for r in want[0]]
    assert all(map(torch.equal, got[2].parameters(), want[2].parameters()))
    assert not counters["graph_break"]
    for operator in ("linear", "linear_input_gradient", "linear_weight_gradients"):
        per_graph = [nodes.count(f"gridformer.{operator}.default") for nodes in graphs]
        assert sorted(per_graph) == [0, 0, 0, 4], "one of forward and backward, of block and loss"
    assert not any("mm" in target for nodes in graphs for target in nodes)
    shapes = {tuple(p.shape) for p in got[2].parameters() if p.dim() == 2}
    assert not shapes & {*casts}


KEPT: list[dict[str, Any]] = [
    {"dropout": 0.1},
    {"family": "bert", "attention_dropout": 0.1},
    {"family": "llama", "n_kv_heads": 2, "ffn_size": 256, "qk_norm": True},
    {"family": "t5"},
]


@pytest.mark.parametrize("changes", full_unless(KEPT[0].__eq__, KEPT), ids=str)
def test_compiled_blocks_keep_what_uncompiled_ones_do(changes: dict[str, Any]) -> None:
    """`memory` records uncompiled code, which must keep no more than the compiler's partitioner."""
    kept = [bytes_of_a_layer(backend, **changes) for backend in (CUTS, "")]
    assert kept[0] == pytest.approx(kept[1], rel=0.01)


CUTS = aot_autograd(
    fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
    partition_fn=min_cut_rematerialization_partition,
    decompositions=select_decomp_table(),
)


def bytes_of_a_layer(backend: Any, **changes: Any) -> int:
    """Return how many bytes autograd keeps of the activations of a layer in bfloat16."""
    kept = []
    for n_layers in (2, 3):
        config = tiny(**{"n_layers": n_layers, "hidden_size": 96, "n_heads": 4, **changes})
        model = build_parallel(config, LayoutConfig(), Axes(), 3, CPU, "bfloat16")
        if backend:
            compile_model(model, backend)
        saved: list[Tensor] = []

        def keep(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        batch = next_words(batch_of(0, config, 2))
        batch["source"] = batch["tokens"]
        with saved_tensors_hooks(keep, lambda x: x):
            hidden = model.run(batch).hidden  # its graph keeps what it saves
        assert hidden is not None
        of_model = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        kept.append(sum(n for where, n in storages.items() if where not in of_model))
    return kept[1] - kept[0]


def test_names_and_state_stay() -> None:
    plain, compiled = (build_parallel(tiny(), LayoutConfig(), Axes(), 3, CPU) for _ in range(2))
    names = [name for name, _ in compiled.named_modules()]
    compile_model(compiled, "aot_eager")
    assert [name for name, _ in compiled.named_modules()] == names
    assert list(compiled.state_dict()) == list(plain.state_dict())
    compiled.load_state_dict(plain.state_dict(), strict=True)


# --------------------------------------------------- on every layout

GRID: dict[str, Any] = {"rows": 2, "cols": 2}
BRANCHES: dict[str, Any] = {"scheme": "subgraph", "branches": 2}
DROPS = {"dropout": 0.1, "attention_dropout": 0.1}
# A layout, changes of the model, settings, and the graph breaks of a block's training step, as in
# docs/reference/compile.md.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "replicas": ({"dp": 2}, {"dropout": 0.1}, {"recompute": "full"}, 0),
    "fsdp": ({"dp": 2, "dp_mode": "fsdp"}, {}, {}, 0),
    "zero1, bfloat16": ({"dp": 2, "dp_mode": "zero1"}, {}, {"dtype": "bfloat16"}, 0),
    "fsdp, bfloat16": ({"dp": 2, "dp_mode": "fsdp"}, {}, {"dtype": "bfloat16"}, 0),
    "fsdp, recomputed, bfloat16": ({"dp": 2, "dp_mode": "fsdp"}, {"dropout": 0.1},
        {"dtype": "bfloat16", "recompute": "full"}, 0),
    "stages, bfloat16": ({"pp": 2}, {}, {"dtype": "bfloat16", "cast": "use"}, 0),
    # Between forward and backward of a micro-batch its stage runs another one.
    "stages": ({"pp": 2}, DROPS, {"recompute": "full"}, 0),
    "zero bubble": ({"pp": 2, "pipeline": "zb_h1"}, DROPS, {"recompute": "full"}, 0),
    "zero bubble, fsdp, bfloat16": ({"pp": 2, "pipeline": "zb_h1", "dp": 2, "dp_mode": "fsdp"}, {},
        {"dtype": "bfloat16"}, 0),
    "zero bubble, V": ({"pp": 2, "pipeline": "zbv", "stages_per_rank": 2}, DROPS,
        {"dtype": "bfloat16"}, 0),
    "zero bubble, megatron": ({"pp": 2, "pipeline": "zb_h1", "scheme": "megatron", "cols": 2}, {},
        {"dtype": "bfloat16"}, 6),
    "megatron": ({"scheme": "megatron", "cols": 2}, {}, {}, 6),
    "sequence": ({"scheme": "megatron", "cols": 2, "sequence_parallel": True}, DROPS, {}, 6),
    "megatron_2d": ({"scheme": "megatron_2d", **GRID}, {}, {}, 6),
    "grid, updated in backward, bfloat16": ({"scheme": "megatron_2d", **GRID}, {},
        {"dtype": "bfloat16", "update": "in_backward", "clip_by": "layer"}, 6),
    "grid, fsdp, recomputed, bfloat16": (
        {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "fsdp"},
        {},
        {"dtype": "bfloat16", "recompute": "full"},
        6,
    ),
    "stages of grids": ({"scheme": "megatron_2d", "rows": 2, "pp": 2}, DROPS,
        {"recompute": "full"}, 6),
    "rows over s": ({"scheme": "megatron_2d", **GRID, "rows_over": "sequence"}, DROPS, {}, 9),
    "optimus": ({"scheme": "optimus", **GRID}, {}, {"recompute": "full"}, 6),
    "optimus, llama": ({"scheme": "optimus", **GRID},
        {"family": "llama", "n_kv_heads": 4, "ffn_size": 64}, {}, 6),
    "optimus, broadcast": (
        {"scheme": "optimus", **GRID, "schedule": "broadcast", "stationary": "input"},
        {},
        {},
        6,
    ),
    "D&SP": (BRANCHES, DROPS, {}, 6),
    "D&SP-cSub, recomputed": ({**BRANCHES, "common": "first"}, {"dropout": 0.1},
        {"recompute": "full"}, 6),
    "outside": ({**BRANCHES, "common": "first", "attention": "outside", "feed_forward": "common"},
        {}, {}, 3),
}  # fmt: skip


QUICK = "sequence", "zero bubble", "zero bubble, V"


@pytest.mark.parametrize("name", full_unless(QUICK.__contains__, LAYOUTS))
def test_every_layout_is_compiled(pool: WorkerPool, name: str) -> None:
    """Compiled and uncompiled steps are bit-equal, and blocks break where they communicate alone.

    More layers and more steps compile nothing more.
    """
    layout, changes, methods, breaks = LAYOUTS[name]
    n = LayoutConfig(**layout).n_processes
    for number, rank in enumerate(pool.run(n, compiled_and_not, layout, changes, methods)):
        assert rank["differences"] == 0.0
        # Where the common layers are on another rank, nothing is compiled.
        compiles = layout.get("common") != "first" or number == 0
        assert rank["graphs at first"] == rank["graphs in the end"]
        assert (rank["graphs at first"] > 0) == compiles
        assert rank["breaks"] == (breaks if compiles else 0)
        assert rank["breaks inside"] == 0


def compiled_and_not(
    fields: dict[str, Any], changes: dict[str, Any], methods: dict[str, Any]
) -> dict[str, float]:
    """Return the largest difference between compiled and uncompiled training, and counts."""
    torch.set_num_threads(1)
    layout = LayoutConfig(**fields)
    config, axes = tiny(**changes), build_axes(layout, "cpu")
    found: dict[str, float] = {}
    # A pipeline has at least as many layers as stages.
    for n_steps, n_layers in ((1, layout.n_stages), (3, layout.n_stages + 2)):
        torch._dynamo.reset()
        counters.clear()
        sized = config.model_copy(update={"n_layers": n_layers})
        got = train(sized, "aot_eager", n_steps, layout, axes, evaluates=False, **methods)
        found["graphs in the end" if found else "graphs at first"] = graphs()
        reasons = counters["graph_break"]
        found["breaks"] = sum(reasons.values())
        # Those that are not at a function which is left out of compilation.
        left_out = "torch.compiler.disable"
        found["breaks inside"] = sum(n for why, n in reasons.items() if left_out not in why)
    want = train(sized, "", 3, layout, axes, evaluates=False, **methods)
    apart = [abs(a.loss - b.loss) + abs(a.grad_norm - b.grad_norm) for a, b in zip(got[0], want[0])]
    for p, q in zip(got[2].parameters(), want[2].parameters()):
        mine, other = stored(p).detach(), stored(q).detach()
        apart.append(float((mine - other).abs().max()) if mine.numel() else 0.0)
    return {**found, "differences": max(apart)}


def test_a_compiled_run_resumes_an_uncompiled_one(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {
        "model": {"n_layers": 2, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(token_folder)},
        "train": {"steps": 2, "global_batch": 4, "eval_every": 0, "eval_batches": 2},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(sections))
    calls: list[Model] = []

    def compile_quickly(model: Model, splits: bool) -> None:
        calls.append(model)
        compile_model(model, "aot_eager")

    monkeypatch.setattr(trainer, "compile_model", compile_quickly)
    monkeypatch.setattr(compiling, "compile_problems", lambda run: [])
    for out, on in (("plain", "false"), ("compiled", "true")):
        for steps, flag in ((2, "false"), (5, on)):
            words = [f"train.steps={steps}", f"train.compile={flag}", "train.device=cpu"]
            execute(plan_run(tmp_path / "mine.yaml", words, out=tmp_path / out))
    assert len(calls) == 1, "only the run that asks for it"
    plain, compiled = (
        [m["loss"] for m in read_metrics(tmp_path / out) if "loss" in m]
        for out in ("plain", "compiled")
    )
    assert len(plain) == 5
    assert compiled == pytest.approx(plain, rel=1e-5)


# --------------------------------------------------- where it cannot work


@pytest.mark.parametrize(
    ("changes", "device", "why"),
    [
        ({}, "cuda", ""),
        ({}, "cpu", "CPUs"),
        ({"compile": True}, "cpu", ""),
        ({"compile": False}, "cuda", "false"),
        ({"recompute": "except_attention"}, "cuda", "except_attention"),
        ({"deterministic": True}, "cuda", "deterministic"),
        ({"compile": True, "deterministic": True}, "cuda", ""),
    ],
)
def test_auto_compiles_on_gpus_what_it_can(changes: dict[str, Any], device: str, why: str) -> None:
    said = why_uncompiled(run_of(changes), device)
    assert why in said
    assert bool(why) == bool(said)


def test_auto_leaves_mixtures_and_what_lacks_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    model: dict[str, Any] = {
        "family": "llama",
        "n_layers": 1,
        "hidden_size": 8,
        "n_heads": 1,
        "n_experts": 4,
    }
    model["experts_per_token"] = 1
    mixture = parse_run({"data": {"path": "x"}, "model": {**model, "vocab_size": 64}})
    assert "mixture" in why_uncompiled(mixture, "cuda")
    monkeypatch.setattr(compiling, "_missing_tools", lambda device: [f"a tool for {device}"])
    run, world = run_of({}), Axes().world
    assert agreed_uncompiled(run, "cuda", world) == "it needs a tool for cuda"
    assert agreed_uncompiled(run_of(ON), "cpu", world) == "", "it was refused before it started"
    assert "CPUs" in agreed_uncompiled(run, "cpu", world)


def run_of(train: dict[str, Any], **layout: Any) -> RunConfig:
    raw = {"model": "gpt2-124m", "data": {"path": "x"}, "layout": layout, "train": train}
    return parse_run(raw)


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Python's headers, which this machine may lack."""
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda *_: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return tmp_path / "Python.h"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, headers: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    assert not compile_problems(run_of({}))
    (problem,) = compile_problems(run_of(ON))
    assert "C++ compiler" in problem
    assert "g++" in problem
    assert "train.compile=false" in problem
    triton, c_compiler = compile_problems(run_of({**ON, "device": "cuda"}))
    assert "pip install triton" in triton
    assert "gcc or clang" in c_compiler
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setenv("CC", "my-cc")
    assert "my-c++ was not found" in compile_problems(run_of(ON))[0]
    assert "my-cc was not found" in compile_problems(run_of({**ON, "device": "cuda"}))[1]
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert not compile_problems(run_of(ON))
    headers.unlink()
    assert "Python.h" in compile_problems(run_of(ON))[0]


@pytest.mark.parametrize(("n_gpus", "sign"), [(0, "C++ compiler"), (1, "C++ compiler"), (2, "CC")])
def test_auto_looks_at_the_device_that_will_be_taken(
    monkeypatch: pytest.MonkeyPatch, headers: Path, n_gpus: int, sign: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling, "find_spec", partial(str))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    (problem,) = compile_problems(run_of({**ON, "device": "auto"}, dp=2))
    assert sign in problem
