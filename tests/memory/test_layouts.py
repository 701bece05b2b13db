"""`gridformer layouts`: the list is complete, what it lists works, and the rest has a reason."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.config import RunConfig, load_run, parse_run
from gridformer.memory import layouts
from gridformer.memory.layouts import _enumerated, candidates, common_batch, list_layouts, reasons
from gridformer.parallel.registry import describe_layout
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError, UserError

MODEL: dict[str, Any] = {"n_layers": 2, "hidden_size": 24, "n_heads": 6, "vocab_size": 50}


def run_of(settings: str, batch: int, model: dict[str, Any]) -> RunConfig:
    overrides = [] if settings == "" else settings.split(" ")
    return parse_run(
        {"model": model, "data": {"path": "."}, "train": {"global_batch": batch}}, overrides
    )


RUN = run_of("", 1, MODEL)


@pytest.mark.parametrize("processes", [1, 2, 6, 12])
def test_all_candidates_take_all_processes(processes: int) -> None:
    found = [*candidates(processes)]
    assert {layout.n_processes for layout in found} == {processes}
    assert len({layout.model_dump_json() for layout in found}) == len(found)


def test_candidates_of_four_processes() -> None:
    names = {describe_layout(layout) for layout in candidates(4)}
    assert names >= {
        "dp=4", "pp=4", "dp=2, pp=2", "megatron 1x4", "megatron 1x2, sequence parallel, dp=2",
        "optimus 2x2", "megatron_2d 2x2", "megatron_2d 2x1, dp=2", "optimus 4x1",
        "optimus 2x1, pp=2", "subgraph, 4 branches",
        "subgraph, 2 branches, common layers on the first, dp=2",
    }  # fmt: skip


def test_a_busy_machine_leaves_out_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a clock runs on while other programs have the processor."""
    clock = itertools.count(step=1000)
    monkeypatch.setattr(layouts.time, "monotonic", lambda: float(next(clock)))
    found = list_layouts(RUN, 4, seconds=600)
    assert len(found) == len([*candidates(4)])


def test_all_rows_have_one_batch(tmp_path: Path) -> None:
    found = list_layouts(RUN, 12)
    (batch,) = {one.global_batch for one in found}
    assert batch == common_batch(12) == 12
    assert not any("train.global_batch" in text for one in found for text in one.problems)
    file = tmp_path / "mine.yaml"
    for train, words, said in (
        ("{}", (), "12 samples of 1024 tokens a step (the fewest that all layouts split)"),
        ("{global_batch: 6}", (), "6 samples of 1024 tokens a step (train.global_batch)"),
        (
            "{global_batch: 6}",
            ("train.global_batch=24", "data.seq_len=8"),
            "24 samples of 8 tokens",
        ),
        ("{dtype: bfloat16}", (), "all layouts split), bfloat16: "),
    ):
        file.write_text(f"model: {json.dumps(MODEL)}\ndata: {{path: x}}\ntrain: {train}\n")
        assert said in " ".join(invoke(str(file), "--devices", "12", *words))
    alone, *_ = invoke("llama-3.1-8b", "--devices", "1", "--scheme", "single", columns=200)
    assert alone.startswith("llama-3.1-8b on 1 device, 1 sample of 8192 tokens a step")
    assert alone.endswith("split), bfloat16: 1 layout works")


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "transformer"])
def test_listed_layouts_work_as_written(family: str) -> None:
    """Listed settings pass all checks as overrides; others fail with the given reason."""
    model = {**MODEL, "family": family}
    found = list_layouts(run_of("", 1, model), 8)
    assert any(one.problems for one in found)
    assert any(not one.problems for one in found)
    for one in found:
        run = run_of(one.settings, one.global_batch, model)
        assert run.layout == one.layout
        if one.problems:
            with pytest.raises(ConfigError) as error:
                check_layout(run)
            with_fixes = error.value.problems
            assert len(with_fixes) == len(one.problems)
            assert all(map(str.startswith, with_fixes, one.problems))
            assert not one.modes
            continue
        check_layout(run)
        replicas = one.layout.dp > 1 or (one.layout.branches > 1 and one.layout.common == "all")
        assert [*one.modes] == (["replicate", "zero1", "fsdp"] if replicas else ["replicate"])
        held = [*one.modes.values()]
        # In traces of these tiny models, too, fsdp may need more than zero1: it gathers two layers.
        assert held[0] >= 0.98 * max(held)
        assert min(held) > 0


def test_a_batch_that_does_not_divide_is_reported() -> None:
    (only,) = (one for one in list_layouts(RUN, 2, 3, ["single"]) if one.layout.dp == 2)
    assert re.search("train.global_batch=3 does not divide", only.problems[0])
    (reason,) = reasons([only])
    assert (reason.where, reason.n_layouts) == ("samples at a time=2", 1)
    assert reason.why == "train.global_batch=3 does not divide"


def test_one_reason_for_all_that_fail_alike() -> None:
    """Every layout that does not work is counted once, and all of its sizes are named."""
    found = list_layouts(RUN, 20)
    failing = [one for one in found if one.problems]
    said = reasons(found)
    assert len({reason.why for reason in said}) == len(said)
    assert sum(reason.n_layouts for reason in said) == len(failing)
    heads = next(r for r in said if r.why == "model.n_heads=6 does not divide")
    assert heads.where == "branches=4 to 20; cols=2 to 20; rows=2, 4"  # rows of stationary weights
    stages = next(r for r in said if r.why.startswith("more stages than layers"))
    assert stages.where == "pp=5, 10, 20"


def test_many_sizes_of_a_reason_are_a_range_only_without_gaps() -> None:
    """`8 to 128` would name sizes that work if one of them lay between."""
    assert _enumerated([2, 4, 8], [1, 2, 4, 8]) == "2, 4, 8"
    assert _enumerated([8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64]) == "8 to 64"
    assert _enumerated([5, 8, 10, 20], [1, 2, 4, 5, 8, 10, 20, 40]) == "5 to 20"
    assert _enumerated([4, 5, 10, 20], [1, 2, 4, 5, 8, 10, 20, 40]) == "4, 5, 10, 20"


@pytest.mark.parametrize("model", ["gpt-175b", "transformer-base"])
def test_every_reason_is_one_line_also_for_many_processes(model: str) -> None:
    lines = invoke(model, "--devices", "1024", "--scheme", "megatron", "--scheme", "subgraph")
    at = next(number for number, line in enumerate(lines) if " do not work" in line)
    assert len(lines) > at + 1
    for line in lines[at + 1 :]:
        assert re.match(r" *\d+  \w+=\d.*: \w", line), line


def invoke(*words: str, columns: int = 80) -> list[str]:
    result = CliRunner().invoke(app, ["layouts", *words], env={"COLUMNS": str(columns)})
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


@pytest.mark.parametrize("columns", [80, 120])
def test_command(columns: int) -> None:
    lines = invoke("gpt2-124m", "--devices", "36", columns=columns)
    assert max(map(len, lines)) <= columns
    assert "gpt2-124m on 36 devices" in lines[0]
    (row,) = (line for line in lines if line.startswith("dp=36 "))
    replicate, zero1, fsdp = map(float, row.split()[-3:])
    assert replicate > zero1 > fsdp
    assert replicate > 124.4e6 * 16 / 2**30
    text = " ".join(lines)
    assert "cols=9, 18, 36: model.n_heads=12 does not divide" in text
    assert text.count("model.n_heads=12 does not divide") == 1
    at = next(number for number, line in enumerate(lines) if " do not work" in line)
    assert re.fullmatch(r"\d+ do not work, counted by their first reason:", lines[at])
    counts = [int(line.split()[0]) for line in lines[at + 1 :]]  # one line a reason
    assert sum(counts) == int(lines[at].split()[0])
    with pytest.raises(UserError, match="--scheme mega is unknown: use single, megatron"):
        invoke("demo-4m", "--devices", "2", "--scheme", "mega")
    with pytest.raises(UserError, match="cols=2: layouts are what this lists"):
        invoke("demo-4m", "--devices", "2", "layout.cols=2")


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "mine.json", "mine"])
def test_a_run_file_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"name": "mine", "n_layers": 2, "hidden_size": 16, "n_heads": 2, "vocab_size": 64}
    Path(name).write_text(json.dumps({"model": model, "data": {"path": "x"}}))
    assert "mine on 2 devices" in invoke(name, "--devices", "2")[0]


def test_what_is_no_model_and_no_run_file_is_told_both() -> None:
    assert "on 2 devices" in invoke("demo", "--devices", "2")[0]
    with pytest.raises(ConfigError, match="demo-4n: no such run file or model: did you mean 'demo"):
        invoke("demo-4n", "--devices", "2")


def test_settings_can_be_copied() -> None:
    found = list_layouts(run_of("", 1, {**MODEL, "vocab_size": 0}), 2)
    assert not all(one.problems for one in found)
    lines = invoke("demo-4m", "--devices", "2", "--settings")
    assert "layout.scheme=megatron layout.cols=2 layout.sequence_parallel=true" in lines
    for line in lines:
        assert run_of(line, 4, {**MODEL, "n_heads": 8}).layout.n_processes == 2


def test_settings_over_a_run_file_that_has_a_layout(tmp_path: Path) -> None:
    """They start the layout that is listed, not one of its keys beside those of the file."""
    file = tmp_path / "mine.yaml"
    layout = {"scheme": "megatron", "cols": 2, "dp": 2, "sequence_parallel": True}
    sections: dict[str, Any] = {
        "model": {**MODEL, "n_heads": 8},
        "layout": layout,
        "data": {"path": "."},
    }
    file.write_text(yaml.safe_dump(sections))
    lines = invoke(str(file), "--devices", "4", "--settings")
    names = set()
    for line in lines:
        run = load_run(file, line.split())
        check_layout(run)
        assert run.layout.n_processes == 4, line
        names.add(describe_layout(run.layout))
    assert len(names) == len(lines) > 8
