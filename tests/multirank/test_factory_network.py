"""Networks that a function returns train from run files as on one device, on every layout that is
not refused, and move between layouts; what cannot work is refused before a process starts."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from examples import own_model
from gridformer.checkpoint.checkpoint import check_same_run
from gridformer.checkpoint.convert.exporting import export_run
from gridformer.checkpoint.manifest import read_manifest
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.exactness import METHODS, PIPELINES, REPLICAS
from gridformer.parallel.validation import check_layout
from gridformer.train.plan import Plan
from gridformer.utils.errors import CheckpointError, ConfigError
from tests.support.marks import full_unless
from tests.support.multirank import own_networks
from tests.support.multirank.exactness import compare, worst_of
from tests.support.multirank.matrix import SCHEMES, SETTINGS, Cell
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.own_networks import NETWORKS, planned
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import TRAIN, assert_same_run, plan_for, start_from, train

OWN, SCALED = {"factory": "examples.own_model:network"}, own_networks.of("scaled")
# Networks with the schemes, pipelines and modes of replicas of the exactness matrix.
REFUSED_SCHEMES = ("D&SP-cSub", "Optimus, stationary weights")
CELLS = [
    cell
    for cell in itertools.product(NETWORKS, SCHEMES, PIPELINES, REPLICAS)
    if cell[1] not in REFUSED_SCHEMES
]
METHOD = dict(zip(CELLS, itertools.cycle(("", *METHODS))))
QUICK = (
    (NETWORKS[0], "D&SP", 1, "fsdp"),
    ("examples.own_model:network", "single", 4, "none"),
    ("scaled", "Megatron, sequence parallel", 4, "none"),
    ("scaled", "Optimus, rows over s", 2, "none"),
    ("mixtral", "Optimus", 2, "none"),
)
# Their messages take NCCL's path.
QUICK_OVER_NCCL = ("mixtral", "D&SP", 1, "fsdp")
NCCL_SCHEMES = ("Optimus", "Megatron 2-D", "D&SP")
OVER_NCCL = [*itertools.product(("scaled", "mixtral"), NCCL_SCHEMES, (1,), ("none", "fsdp"))]
OVER_NCCL += [("scaled", "Optimus, rows over s", 2, "none"), ("scaled", "D&SP", 2, "fsdp")]


@pytest.mark.parametrize("cell", full_unless(QUICK.__contains__, CELLS), ids=str)
def test_equals_one_device(pool: WorkerPool, cell: tuple[str, str, int, str]) -> None:
    equals_one_device(pool, cell)


@pytest.mark.parametrize("cell", full_unless(QUICK_OVER_NCCL.__eq__, OVER_NCCL), ids=str)
def test_equals_one_device_over_nccl(pool: WorkerPool, cell: tuple[str, str, int, str]) -> None:
    equals_one_device(pool, cell, on_nccl)


def equals_one_device(pool: WorkerPool, cell: tuple[str, str, int, str], *over: Any) -> None:
    name, layout = cell[0], Cell("GPT-2", *cell[1:], False).layout
    model, n = own_networks.of(name, max_seq_len=12), LayoutConfig(**layout).n_processes
    check_layout(a_run(model, ".", layout))
    settings = {**SETTINGS, **METHODS.get(METHOD[cell], {})}
    with pool.limit(280.0):
        worst_of(pool.run(n, *over, own_networks.in_double, compare, layout, model, settings, 2))


def test_a_stage_without_layers_sends_what_layers_compute_in(pool: WorkerPool) -> None:
    """In 16 bits the network's own code adds embeddings in 32."""
    layout, model = {"pp": 3, "micro_batches": 4}, own_networks.of("scaled", n_layers=1)
    settings = {**SETTINGS, "dtype": "bfloat16"}
    worst = pool.run(3, compare, layout, {**model, "max_seq_len": 12}, settings, 2)
    assert max(rank["loss"] for rank in worst) < 1e-3


def a_run(model: Any, data: Path | str, layout: dict[str, Any]) -> RunConfig:
    settings = {**TRAIN, "global_batch": 32, "eval_batches": 2, "device": "cpu"}
    sections = {"model": model, "data": {"path": str(data), "seq_len": 12}, "layout": layout}
    return parse_run({"name": "test", **sections, "train": settings})


def test_a_run_moves_without_its_plan_file(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    patterns = tmp_path / "plan.yaml"
    patterns.write_text(yaml.safe_dump(own_model.PLAN))
    megatron = {"scheme": "megatron", "cols": 2}
    first = a_run({**SCALED, "plan": str(patterns)}, token_folder, megatron)
    patterns.unlink()
    again = parse_run(yaml.safe_load(first.to_yaml()))
    assert again == first, "all that is needed is in the run"

    def plan(out: str, layout: dict[str, Any]) -> Plan:
        run = again.model_copy(update={"layout": LayoutConfig(**layout)})
        return plan_for(run, tmp_path / out)

    pool.run(2, train, plan("whole", megatron))
    start_from(tmp_path / "whole", tmp_path / "moved")
    pool.run(4, train, plan("moved", {"pp": 2, "micro_batches": 2, "scheme": "optimus", "rows": 2}))
    assert_same_run(tmp_path / "whole", tmp_path / "moved")
    saved = next((tmp_path / "moved" / "checkpoints").glob("step-*"))
    other = again.model.model_copy(update={"plan": {"*": "replicated"}, "factory": OWN["factory"]})
    with pytest.raises(CheckpointError, match=r"model.factory is .*, there .*; model.plan is"):
        check_same_run(read_manifest(saved), again.model_copy(update={"model": other}), saved)
    with pytest.raises(ConfigError, match="transformers has no Scaled that could open a folder"):
        export_run(tmp_path / "moved", tmp_path / "exported")


class Untold(own_networks.Scaled):
    """Its positions are neither a parameter nor a buffer, and its result no logits of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.arange(24)


class Last(own_networks.Scaled):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(tokens)[:, -1:]


class Unplaced(own_networks.Scaled):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


class Skips(own_networks.Scaled):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        results = [x := layer(x) for layer in self.layers]
        logits: Tensor = self.head(self.norm(x + results[0]))
        return logits


class LooksBack(own_networks.Scaled):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = super().forward(tokens, position_ids)
        return x + x.roll(1, 1)


class Orders(own_networks.Scaled):
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(24))

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(tokens, self.order[: tokens.shape[1]].unsqueeze(0))


untold, last, orders = partial(planned, Untold), partial(planned, Last), partial(planned, Orders)
skips, looks_back = partial(planned, Skips), partial(planned, LooksBack)
unplaced = partial(planned, Unplaced)


class AddsWords(own_model.Layer):
    words: nn.Embedding

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.words.weight[0]


def frozen() -> tuple[nn.Module, None, dict[str, str]]:
    network = own_networks.Scaled()
    network.words.requires_grad_(False)
    return network, None, own_model.PLAN


def shares() -> tuple[nn.Module, None, dict[str, str]]:
    network = own_networks.Scaled()
    network.layers = nn.ModuleList(AddsWords(own_networks.H, 4) for _ in range(2))
    for layer in network.layers:
        vars(layer)["words"] = network.words  # it is not one of its submodules
    return network, None, own_model.PLAN


def unplanned() -> nn.Module:
    return own_networks.Scaled()


def without_layers() -> nn.Module:
    return nn.Linear(2, 2)


def fails() -> nn.Module:
    raise OSError("no such weights")


HERE = __name__
ROWS_OVER_S = {"scheme": "optimus", "rows": 2, "rows_over": "sequence"}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no chain": (f"{HERE}:skips", {"pp": 2}, r"skips is no chain of layers, what is behind the"),
    "read in layers": (f"{HERE}:shares", {"pp": 2}, "layer 0 reads what is computed outside it"),
    "places": (f"{HERE}:unplaced", ROWS_OVER_S, "its forward has no argument position_ids=None"),
    "place of its own": (f"{HERE}:orders", ROWS_OVER_S, "or on its place instead of position_ids"),
    "place untold": (f"{HERE}:looks_back", ROWS_OVER_S, "logits of a token depend on others"),
    "heads": (OWN, {"scheme": "megatron", "cols": 8}, "must be a number that layout.cols=8 div"),
    "no plan": ({"factory": f"{HERE}:unplanned", "n_heads": 4}, {}, "Scaled carries no plan"),
    "frozen": (f"{HERE}:frozen", {}, "words.weight is frozen, and a run updates all parameters"),
    "heads untold": (f"{HERE}:unplanned", {}, "does not tell n_heads: set it"),
    "role": ({**OWN, "plan": {"*": "opned"}, "n_heads": 4}, {}, "did you mean 'opening'"),
    "size": ({**OWN, "hidden_size": 32}, {}, "examples.own_model:network has hidden_size=64"),
    "tensor": ({"factory": f"{HERE}:untold"}, {}, "order is a tensor, and neither parameter nor"),
    "no logits": ({"factory": f"{HERE}:last"}, {}, r"makes \[1, 1, 301\] of tokens \[1, 2\]"),
    "no list": (f"{HERE}:without_layers", {}, "the network has no torch.nn.ModuleList of layers"),
    "fails": (f"{HERE}:fails", {}, "fails: OSError: no such weights"),
    "module": ("examples.own_modle:network", {}, "did you mean 'examples.own_model'"),
    "function": ("examples.own_model:netwrk", {}, "did you mean 'network'"),
    "no module": ("examples.own_model:batch_of", {}, "missing 1 required positional argument"),
    "another": ("examples.own_model:PLAN", {}, "has no function PLAN; use one of Attention"),
    "file": ({**OWN, "plan": "nowhere.yaml"}, {}, "nowhere.yaml: cannot be read"),
    "both": ({**OWN, "folder": "nowhere"}, {}, "nowhere has no config.json"),
    "no network": ("builtins:dict", {}, "returns a dict, not a torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    model, layout, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        check_layout(a_run(model, ".", layout))


def test_longer_sequences_than_the_network_reads_are_refused() -> None:
    run = a_run({**OWN, "max_seq_len": 64}, ".", {})
    data = run.data.model_copy(update={"seq_len": 33})
    with pytest.raises(ConfigError, match=r"does not map tokens \[1, 33\] to logits"):
        check_layout(run.model_copy(update={"data": data}))


def test_what_lies_in_a_run_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").touch()
    (tmp_path / "of_a_run.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a run, from which no code is imported"):
        a_run("of_a_run:network", ".", {})
    assert not (tmp_path / "ran").exists()
