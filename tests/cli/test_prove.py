"""`gridformer prove`: its exit codes, what it prints, and that it runs no code of a folder."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from examples import own_model
from gridformer.prove import NetworkSource
from tests.support.commands import gridformer_here

OWN = "examples.own_model:network"
MEGATRON = ("layout.scheme=megatron", "layout.cols=2")


class Twice(nn.Module):
    """A network whose result a plan does not keep: it adds its part of columns to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        out: Tensor = self.down(y) * y.sum(-1, keepdim=True)  # of a part, without a word
        return out


def twice() -> tuple[nn.Module, tuple[Tensor], dict[str, str]]:
    return Twice(), (torch.ones(2, 3, 8),), {"up": "opening", "down": "closing"}


class Whole(Twice):
    """A network that states the width of what is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        out: Tensor = self.down(self.up(x).view(b, s, 8))
        return out


def whole() -> tuple[nn.Module, tuple[Tensor], dict[str, str]]:
    return Whole(), *twice()[1:]


def broken() -> tuple[nn.Module, tuple[Tensor], dict[str, str]]:
    return Whole(), (torch.ones(2, 8),), twice()[2]


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (
            "whole",
            "test_prove.py:{line} fails on megatron 1x2: out: Tensor = "
            "self.down(self.up(x).view(b, s, 8)): "
            "shape '[2, 3, 8]' is invalid for input of size 24. ",
        ),
        ("broken", "test_prove.py:{before} fails in one process, unchanged: b, s, _ = x.shape: "),
    ],
)
def test_what_fails_in_code_of_the_network_is_one_sentence(network: str, said: str) -> None:
    done = gridformer_here("prove", f"tests.cli.test_prove:{network}", *MEGATRON)
    assert done.returncode == 2, done.stderr
    line = inspect.getsourcelines(Whole.forward)[1] + 2
    assert said.format(line=line, before=line - 1) in done.stderr
    assert ("write -1 for a width" in done.stderr) is (network == "whole")
    assert "Traceback" not in done.stderr


def test_equal() -> None:
    done = gridformer_here("prove", OWN, *MEGATRON, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("worst")["relative"] < 1e-10
    assert abs(said.pop("loss")) > 0, "of a random linear function"
    assert said == {"equal": True, "layout": "megatron 1x2", "not_placed": []}


def test_not_equal() -> None:
    done = gridformer_here("prove", "tests.cli.test_prove:twice", *MEGATRON)
    assert done.returncode == 1, done.stderr
    assert "megatron 1x2: NOT EQUAL to one process" in done.stdout
    assert "the largest difference is in " in done.stdout


def test_a_plan_that_leaves_something_open(tmp_path: Path) -> None:
    """Nothing is started; the parameters are listed, and what would place them is said."""
    plan = tmp_path / "plan.yaml"
    left = {key: role for key, role in own_model.PLAN.items() if key != "positions"}
    plan.write_text(yaml.safe_dump(left))
    done = gridformer_here("prove", OWN, *MEGATRON, "--plan", plan, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout) == {
        "equal": False,
        "worst": None,
        "loss": None,
        "layout": "megatron 1x2",
        "not_placed": ["positions.weight"],
    }
    assert "positions.weight: nothing places it. Give 'positions' a role" in done.stderr


def folder_of(path: Path, **config: object) -> Path:
    """Make a folder of a small Llama whose config names code of its own."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    code = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    text = json.dumps({**kind, **sizes, **heads, **code, **config})
    (path / "config.json").write_text(text)
    (path / "code.py").write_text(f"open({str(path / 'ran')!r}, 'w')")
    return path


def test_a_folder_and_none_of_its_code_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = gridformer_here("prove", folder_of(tmp_path), *MEGATRON, "--batch", "2")
    assert done.returncode == 0, done.stderr
    assert "dropout is 0" in done.stdout
    assert "megatron 1x2: equal to one process" in done.stdout
    assert not (tmp_path / "ran").exists()


def test_a_large_model_is_cut_to_few_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("gridformer.prove._MOST_PARAMETERS", 1000)
    module, inputs, _, notes = NetworkSource(str(folder_of(tmp_path)), batch=2, seq_len=4).load()
    assert len(module.get_submodule("model.layers")._modules) == 2
    assert "2 of its 3 layers, with the same widths and heads" in notes
    assert {name: x.shape for name, x in inputs.items()} == dict.fromkeys(
        ("input_ids", "labels"), (2, 4)
    )


def test_an_architecture_that_is_not_installed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = gridformer_here("prove", folder_of(tmp_path, architectures=["Mine"]), *MEGATRON)
    assert done.returncode == 2
    assert "Mine is not a model of the installed transformers" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere: is neither a folder nor package.module:function"),
        (("examples.own_model:nothing",), "has no function nothing; use one of Attention"),
        (("examples.nothing:network",), "there is no module examples.nothing"),
        (("examples.own_model:batch_of",), "missing 1 required positional argument"),
        ((OWN, "layout.colls=2"), "unknown key layout.colls"),
        ((OWN, "train.steps=2"), "'train.steps=2' is no part of a layout"),
    ],
)
def test_bad_arguments(words: tuple[str, ...], said: str) -> None:
    done = gridformer_here("prove", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    done = gridformer_here("prove", tmp_path)
    assert done.returncode == 2
    assert "has no config.json" in done.stderr
