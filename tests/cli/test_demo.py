"""The demo's three parts on a small run of one process; `make demo` does the same on four."""

from pathlib import Path

import pytest

from gridformer.checkpoint import find
from gridformer.cli import demo
from gridformer.config import load_run
from gridformer.data import TokenFolder
from tests.support.commands import write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    train = {"steps": 3, "global_batch": 2, "eval_batches": 1}
    return write_run(tmp_path / "small.yaml", tmp_path / "text", train=train)


def test_from_nothing_to_a_summary(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # no workers follow that it could help
    monkeypatch.setattr("gridformer.launch.processes.warm_up", lambda *modules: None)
    corpus = tmp_path / "corpus.py"
    corpus.write_text("\n\n".join(f"def read_{i}(self):\n    return {i}" for i in range(300)))
    monkeypatch.setattr(demo, "CORPUS", str(corpus))
    out = tmp_path / "out"
    monkeypatch.setattr(demo, "RUN_FILE", str(run_file))
    demo.demo(out)
    text = capsys.readouterr().out
    assert TokenFolder.open(tmp_path / "text").vocab_size <= demo.VOCABULARY
    folder = find.latest(out)
    assert folder is not None
    shown = "".join(text.split())
    for part in (folder, out / "loss.png", out / "tensorboard"):
        assert str(part) in shown
    for word in ("validation loss", "training loss", "tokens/s", "perplexity", "class Reader:"):
        assert word in text
    assert "gridformer generate" in text
    assert "layout.scheme=megatron" in text
    demo.demo(out)  # on a second call, nothing is prepared or trained again
    assert "3 of 3 steps" in capsys.readouterr().out


def test_the_shipped_run_is_a_2x2_grid() -> None:
    layout = load_run(demo.RUN_FILE).layout
    assert (layout.scheme, layout.rows, layout.cols, layout.n_processes) == ("optimus", 2, 2, 4)
