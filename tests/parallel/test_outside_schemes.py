"""A scheme that another package brings is a scheme like any other, and `prove` measures it."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gridformer import exactness
from gridformer.config import LayoutConfig, schemes
from gridformer.parallel.registry import specs
from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_alone, gridformer_here, write_run
from tests.support.fenced import ROOT
from tests.support.fuzz.drawing import WORDS
from tests.support.multirank.matrix import SCHEMES

Install = Callable[..., Path]
COLUMNS = ("layout.scheme=samples", "layout.cols=2")
# Norms see a device's own samples. This one does not say so, and their gradients stay partial.
BROKEN = """
class Broken(Samples):
    name = "broken"

    def table(self, model, axes, choices, layout):
        from dataclasses import replace
        table = super().table(model, axes, choices, layout)
        return replace(table, roles={k: v for k, v in table.roles.items() if k != "norm"})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A package in a folder of sys.path: its entry point, as `pip install` would write it."""
    folder = tmp_path / "site-packages"
    info = folder / "samples-1.0.dist-info"

    def write(value: str = "own_scheme:Samples", name: str = "samples") -> Path:
        info.mkdir(parents=True)
        shutil.copy(ROOT / "examples" / "own_scheme.py", folder)
        with (folder / "own_scheme.py").open("a") as code:
            code.write(BROKEN)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samples\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[gridformer.schemes]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(folder)
        forget()
        return folder

    def forget() -> None:
        sys.modules.pop("own_scheme", None)
        schemes.cache_clear()
        specs.cache_clear()

    yield write
    forget()


def test_commands_know_it(install: Install, token_folder: Path, tmp_path: Path) -> None:
    install()
    assert LayoutConfig(scheme="samples", cols=2).scheme == "samples"
    assert "own_scheme" not in sys.modules, "a name alone imports nothing"
    mine = write_run(tmp_path / "mine.yaml", token_folder, train={"global_batch": 4})
    plan = ("--cluster", "dgx-h100", "--devices", "2", "--json", "--top", "99", "--seconds", "1")
    for words, said in {
        ("check", mine, *COLUMNS): "custom on samples 1x2",
        ("memory", mine, *COLUMNS): "samples 1x2",
        ("layouts", mine, "--devices", "4", "--scheme", "samples"): "samples 1x2, pp=2",
        ("predict", mine, "--cluster", "dgx-h100", *COLUMNS): "samples 1x2",
        ("plan", mine, *plan): '"scheme": "samples"',
    }.items():
        done = gridformer_here(*words)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    done = gridformer_here("check", mine, "layout.scheme=sampels")
    assert "did you mean 'samples'?" in done.stderr
    done = gridformer_here("check", mine, "layout.scheme=samples", "layout.rows=2")
    assert "layout.scheme=samples uses layout.cols and cannot use layout.rows=2" in done.stderr
    done = gridformer_here("prove", "examples.own_model:network", *COLUMNS)
    assert done.returncode == 2
    assert "layout.scheme=samples is not for networks of others yet" in done.stderr


def test_it_trains_and_its_checkpoint_goes_on_elsewhere(
    install: Install, token_folder: Path, tmp_path: Path
) -> None:
    install()
    losses: list[list[float]] = []
    train = {"steps": 2, "global_batch": 4, "adam_eps": 1e-4}
    mine = write_run(tmp_path / "mine.yaml", token_folder, train=train)
    for layouts in ([COLUMNS, ()], [(), COLUMNS]):
        out = tmp_path / f"out{len(losses)}"
        for steps, layout in zip((2, 4), layouts):
            done = gridformer_here("train", mine, f"train.steps={steps}", *layout, "--out", out)
            assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in read_metrics(out) if "loss" in line])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_prove_says_equal_wrong_or_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"GPT-2": exactness.MODELS["GPT-2"]}
    monkeypatch.setattr(exactness, "MODELS", model)
    folder = install()
    done = gridformer_here("prove", "samples", "--json")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)
    assert (cell["model"], cell["layout"], cell["result"]) == ("GPT-2", "samples 1x2", "equal")
    assert 0 < cell["relative"] < 1e-12

    done = gridformer_here("prove", "samples", "layout.cols=5")
    assert done.returncode == 2
    assert done.stdout.startswith("refused GPT-2")
    assert "model.n_heads=12 does not divide over layout.cols=5" in done.stdout

    shutil.rmtree(folder)
    install("own_scheme:Broken", "broken")
    done = gridformer_here("prove", "broken")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("wrong   GPT-2              broken 1x2: ")
    assert "norm" in done.stdout


@pytest.mark.full
def test_every_family_on_it_equals_one_device(install: Install) -> None:
    """In processes of a user's own, which find the package by PYTHONPATH."""
    path = os.pathsep.join([str(install()), os.environ.get("PYTHONPATH", "")])
    done = gridformer_alone("prove", "samples", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(exactness.MODELS)
    assert all(line.startswith("equal ") for line in lines)


@pytest.mark.parametrize(
    ("value", "name", "said"),
    [
        ("own_scheme:Nothing", "samples", "cannot be loaded (AttributeError: "),
        ("nowhere:Samples", "samples", "cannot be loaded (ModuleNotFoundError: No module named"),
        ("own_scheme:BoundarySpec", "samples", "cannot be loaded (TypeError: "),
        ("own_scheme:LayoutConfig", "samples", "is of type LayoutConfig: make it a SchemeSpec"),
        ("own_scheme:SchemeSpec", "samples", "has another name: set `name` of its spec to "),
        ("own_scheme:Samples", "optimus", "has the name of the scheme gridformer.parallel.optimus"),
    ],
)
def test_what_is_no_scheme_is_named(install: Install, value: str, name: str, said: str) -> None:
    install(value, name)
    done = gridformer_here("check", "gpt2-124m", f"layout.scheme={name}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
    assert value in line
    assert name in line


def test_every_scheme_of_the_package_is_in_the_matrix_and_drawn() -> None:
    """What docs/architecture.md says to add for one; other tests hold the rest of its list."""
    of_matrix = {grid.get("scheme", "single") for grid, _ in SCHEMES.values()}
    assert of_matrix == {*WORDS["layout.scheme"]} == {*schemes()}
