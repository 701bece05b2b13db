"""`gridformer layouts`: nothing is left out, what is listed works, what does not has a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.config import RunConfig, parse_run
from gridformer.errors import ConfigError
from gridformer.layout import check
from gridformer.listing import by_reason, candidates, list_layouts
from gridformer.parallel.registry import describe

MODEL: dict[str, Any] = {"n_layers": 2, "hidden_size": 24, "n_heads": 6, "vocab_size": 50}


def run_of(settings: str, batch: int, model: dict[str, Any]) -> RunConfig:
    overrides = [] if settings == "" else settings.split(" ")
    return parse_run(
        {"model": model, "data": {"path": "."}, "train": {"global_batch": batch}}, overrides
    )


@pytest.mark.parametrize("processes", [1, 2, 6, 12])
def test_all_candidates_take_all_processes(processes: int) -> None:
    found = [*candidates(processes)]
    assert {layout.n_processes for layout in found} == {processes}
    assert len({layout.model_dump_json() for layout in found}) == len(found)


def test_candidates_of_four_processes() -> None:
    names = {describe(layout) for layout in candidates(4)}
    assert names >= {
        "single device, dp=4",
        "single device, pp=4",
        "single device, dp=2, pp=2",
        "megatron 1x4",
        "megatron 1x2, sequence parallel, dp=2",
        "optimus 2x2",
        "megatron_2d 2x2",
        "megatron_2d 2x1, dp=2",
        "optimus 4x1",
        "optimus 2x1, pp=2",
        "subgraph, 4 branches",
        "subgraph, 2 branches, common layers on the first, dp=2",
    }


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "transformer"])
def test_what_is_listed_works_as_it_is_written(family: str) -> None:
    """The settings of a line, as overrides of a run file, pass all checks; those of the others
    fail, with the reason that is given."""
    model = {**MODEL, "family": family}
    found = list_layouts(model, 8)
    assert any(one.problems for one in found)
    assert any(not one.problems for one in found)
    for one in found:
        run = run_of(one.settings, one.global_batch, model)
        assert run.layout == one.layout
        if one.problems:
            with pytest.raises(ConfigError) as error:
                check(run)
            assert tuple(error.value.problems) == one.problems
            assert not one.modes
            continue
        check(run)
        replicas = one.layout.dp > 1 or (one.layout.branches > 1 and one.layout.common == "all")
        assert one.modes == (("replicate", "zero1", "fsdp") if replicas else ("replicate",))


def test_a_batch_may_be_what_does_not_fit() -> None:
    (only,) = (one for one in list_layouts(MODEL, 2, 3, 0, ["single"]) if one.layout.dp == 2)
    assert re.search("train.global_batch=3 does not divide", only.problems[0])
    assert by_reason([only]) == {only.problems[0]: [only]}


def test_command() -> None:
    result = CliRunner().invoke(app, ["layouts", "demo-4m", "--processes", "6"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "demo-4m on 6 processes" in lines[0]
    assert any(line.startswith("single device, dp=6 ") for line in lines)
    assert "layout.dp=3" in result.output
    assert any("n_heads=8 does not divide over layout.branches=6" in line for line in lines)
    result = CliRunner().invoke(app, ["layouts", "demo-4m", "-p", "2", "--scheme", "mega"])
    assert isinstance(result.exception, ConfigError)
