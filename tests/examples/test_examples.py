"""The examples: their losses fall, and any number of processes gives one process's losses."""

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from examples import own_model, resnext_digits, two_towers
from tests.support.commands import called_here, python_alone
from tests.support.launch.programs import ROOT, TORCHRUN
from tests.support.multirank.pool import WorkerPool

Learned = tuple[list[float], float]


def quietly(train: Callable[..., Learned], *args: Any) -> tuple[list[float], float, str]:
    """Return what a rank learned, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses, score = train(*args)
    return losses, score, printed.getvalue()


def run(pool: WorkerPool, n: int, train: Callable[..., Learned], *args: Any) -> tuple[Any, ...]:
    """Return rank 0's result; the others have the same and print nothing."""
    first, *others = pool.run(n, quietly, train, *args)
    for losses, score, printed in others:
        assert (losses, score, printed) == (first[0], first[1], "")
    found: tuple[Any, ...] = first
    return found


def test_digits_on_any_processes(pool: WorkerPool) -> None:
    """104 images for training make 3 batches of 32 and one of 8, over two epochs."""
    images, labels = (x[:464] for x in resnext_digits.digits())
    train = resnext_digits.train
    losses, score, _ = run(pool, 1, train, images, labels, 1, "all", 2)
    assert losses[1] < losses[0]
    for n, g, common in [(4, 4, "first"), (4, 3, "all")]:
        found = run(pool, n, train, images, labels, g, common, 2)
        assert found[0] == pytest.approx(losses, rel=1e-9), (n, g, common)
        assert found[1] == score
        assert f"blocks.1.paths: {g} sub-grids" in found[2]


def test_towers_on_any_processes(pool: WorkerPool) -> None:
    losses, error, _ = run(pool, 1, two_towers.train, two_towers.sub_grids(1), 1)
    assert error < 0.5  # 1 without learning
    for n in (2, 4):
        found = run(pool, n, two_towers.train, two_towers.sub_grids(n), 1)
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(error, rel=1e-9)
    # With the last choice, LPT divides the paths of widths 48, 8, 32, 16 and 24 evenly.
    assert "ranks 0, 2: branch 0 (67%)\n" in found[2]
    assert "rank 0: branches 0, 3 (50%)\n  rank 2: branches 1, 2, 4 (50%)\n" in found[2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "score", "enough"),
    [
        ("resnext_digits.py --processes 2 --epochs 4", r"accuracy (\d+\.\d)%", (85.0, 100.0)),
        ("two_towers.py --processes 2 --epochs 1", r"held-out squared error (\S+)", (0.0, 0.5)),
    ],
)
def test_from_the_command_line(command: str, score: str, enough: tuple[float, float]) -> None:
    script, *options = command.split()
    done = python_alone(ROOT / "examples" / script, *options)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.search(score, done.stdout)
    assert found, done.stdout
    assert enough[0] <= float(found[1]) <= enough[1]


def test_the_script_of_the_how_to_is_complete(tmp_path: Path) -> None:
    """The script, saved and run on two processes and on one, has the same losses."""
    text = (ROOT / "docs" / "how-to" / "branches.md").read_text(encoding="utf-8")
    (script,) = (s for s in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "launch(" in s)
    many, one = tmp_path / "many.py", tmp_path / "one.py"
    many.write_text(script.replace("PROCESSES = 4", "PROCESSES = 2"), encoding="utf-8")
    one.write_text(script.replace("PROCESSES = 4", "PROCESSES = 1"), encoding="utf-8")
    done = python_alone(many)
    assert (done.returncode, done.stderr) == (0, "")
    with contextlib.redirect_stdout(io.StringIO()) as here:
        runpy.run_path(str(one), run_name="__main__")
    assert "2 sub-grids\n" in done.stdout
    assert "1 sub-grid\n" in here.getvalue()
    found = [
        [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
        for printed in (done.stdout, here.getvalue())
    ]
    assert found[0] == pytest.approx(found[1], abs=0.01)
    assert found[0][-1] < found[0][0]


def of_own_model(*words: str) -> str:
    """Return what a rank of the script prints, in the group of the pool."""
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        return called_here(own_model.main, "own_model.py", *words).stdout


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_own_model(pool: WorkerPool, torchrun: bool) -> None:
    """The losses of a decoder in plain torch are the same on two layouts, to all digits printed."""
    printed = []
    for layout in (["scheme=megatron", "cols=2"], ["dp=2", "dp_mode=fsdp"]):
        words = [*layout, "--steps", "20"]
        if torchrun:
            done = python_alone(*TORCHRUN, "2", ROOT / "examples/own_model.py", *words)
            assert done.returncode == 0, done.stderr
        said = done.stdout if torchrun else pool.run(2, of_own_model, *words)[0]
        printed.append([float(x) for x in re.findall(r"step +\d+  loss ([\d.]+)", said)])
    assert len(printed[0]) == 2
    assert printed[0] == pytest.approx(printed[1], abs=1e-4)  # in float32
    assert printed[0][1] < printed[0][0] - 0.3
