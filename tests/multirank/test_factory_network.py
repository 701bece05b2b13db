"""Networks that a function returns train from run files as on one device, on every layout that is
not refused, and move between layouts; what cannot work is refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from examples import own_model
from gridformer.checkpoint.convert.exporting import export_run
from gridformer.config import LayoutConfig, ModelConfig, RunConfig, parse_run
from gridformer.parallel.validation import check_layout
from gridformer.train.plan import Plan
from gridformer.utils.errors import ConfigError
from tests.multirank.test_generate import both_of, likelihoods_of
from tests.support.marks import full_unless
from tests.support.multirank.exactness import compare
from tests.support.multirank.matrix import SETTINGS
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import TRAIN, assert_same_run, plan_for, start_from, train


class Scaled(own_model.Decoder):
    """Code of its own reads whole logits, of words that nothing divides, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(n_layers=3, h=48, n_heads=12)
        self.words, self.head = nn.Embedding(301, 48), nn.Linear(48, 301, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 301), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def scaled() -> nn.Module:
    return Scaled()


GRID = {"rows": 2, "cols": 2}
OWN = {"factory": "examples.own_model:network"}
SCALED = {"factory": f"{__name__}:scaled", "plan": own_model.PLAN}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron": (OWN, {"scheme": "megatron", "cols": 2}),
    "megatron s": (SCALED, {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2}),
    "megatron_2d": (OWN, {"scheme": "megatron_2d", **GRID, "dp": 2, "dp_mode": "zero1"}),
    "optimus": (OWN, {"scheme": "optimus", **GRID, "dp": 2, "dp_mode": "fsdp"}),
    "optimus, scaled": (SCALED, {"scheme": "optimus", **GRID}),
    "branches": (SCALED, {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"}),
    "fsdp": (OWN, {"dp": 2, "dp_mode": "fsdp"}),
}
QUICK = ("megatron s", "optimus")


def told(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**ModelConfig.model_validate(model).model_dump(), **changes}


@pytest.mark.parametrize("case", full_unless(QUICK.__contains__, LAYOUTS))
def test_equals_one_device(pool: WorkerPool, case: str) -> None:
    model, layout = LAYOUTS[case]
    settings = {**SETTINGS, "recompute": "full" if "dp_mode" in layout else "none"}
    n = LayoutConfig(**layout).n_processes
    worst = pool.run(n, compare, layout, told(model), settings, 2)
    assert max(max(one.values()) for one in worst) < 1e-9, worst


@pytest.mark.full
@pytest.mark.parametrize("case", ["megatron s", "branches"])
def test_every_layout_says_the_same(pool: WorkerPool, case: str) -> None:
    """Texts are continued without caches of keys, and past the length that the network reads."""
    model, layout = told(SCALED, max_seq_len=11), LAYOUTS[case][1]
    n = LayoutConfig(**layout).n_processes
    alone, scores = both_of({}, model), [one.log_likelihood for one in likelihoods_of({}, model)]
    assert pool.run(n, both_of, layout, model) == [alone] * n
    for mine in pool.run(n, likelihoods_of, layout, model):
        assert [one.log_likelihood for one in mine] == pytest.approx(scores, rel=1e-9)


def a_run(model: Any, data: Path | str, layout: dict[str, Any]) -> RunConfig:
    settings = {**TRAIN, "global_batch": 8, "eval_batches": 2, "device": "cpu"}
    sections = {"model": model, "data": {"path": str(data), "seq_len": 12}, "layout": layout}
    return parse_run({"name": "test", **sections, "train": settings})


def test_a_run_moves_without_its_plan_file(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    patterns = tmp_path / "plan.yaml"
    patterns.write_text(yaml.safe_dump(own_model.PLAN))
    first = a_run({**SCALED, "plan": str(patterns)}, token_folder, LAYOUTS["megatron"][1])
    patterns.unlink()
    again = parse_run(yaml.safe_load(first.to_yaml()))
    assert again == first, "all that is needed is in the run"

    def plan(out: str, layout: dict[str, Any]) -> Plan:
        run = again.model_copy(update={"layout": LayoutConfig(**layout)})
        return plan_for(run, tmp_path / out)

    pool.run(2, train, plan("whole", LAYOUTS["megatron"][1]))
    start_from(tmp_path / "whole", tmp_path / "moved")
    pool.run(4, train, plan("moved", {"dp": 2, "dp_mode": "fsdp", "scheme": "optimus", "rows": 2}))
    assert_same_run(tmp_path / "whole", tmp_path / "moved")
    with pytest.raises(ConfigError, match="transformers has no Scaled that could open a folder"):
        export_run(tmp_path / "moved", tmp_path / "exported")


class Untold(Scaled):
    """Its positions are neither a parameter nor a buffer, and its result no logits of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.arange(24)


class Last(Scaled):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1:]


def untold() -> tuple[nn.Module, None, dict[str, str]]:
    return Untold(), None, own_model.PLAN


def last() -> tuple[nn.Module, None, dict[str, str]]:
    return Last(), None, own_model.PLAN


def without_layers() -> nn.Module:
    return nn.Linear(2, 2)


def fails() -> nn.Module:
    raise OSError("no such weights")


HERE = __name__
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no chain": (OWN, {"pp": 2}, "layout.pp=2: transformers has no plan for Decoder: use pp=1"),
    "heads": (OWN, {"scheme": "megatron", "cols": 8}, "must be a number that layout.cols=8 div"),
    "no plan": ({**SCALED, "plan": {}, "n_heads": 12}, {}, "Scaled carries no plan for tensor"),
    "role": ({**OWN, "plan": {"*": "opned"}, "n_heads": 4}, {}, "did you mean 'opening'"),
    "size": ({**OWN, "hidden_size": 32}, {}, "examples.own_model:network has hidden_size=64"),
    "heads untold": ({**SCALED, "plan": {"head": "head"}}, {}, "does not tell n_heads: set it"),
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
}


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
