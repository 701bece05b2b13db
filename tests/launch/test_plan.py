"""Planning a run: what is refused is refused before torch is loaded, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gridformer.launch.plan import check_run_dir, read_run_without_data
from gridformer.utils.errors import ConfigError

SCRIPT = """
import sys
from gridformer.cli.app import app
try:
    app(["train", "demo", "layout.cols=3"], standalone_mode=False)
except Exception as error:
    print(type(error).__name__, "torch" in sys.modules)
"""


def test_a_refusal_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "ConfigError False\n", done.stderr


@pytest.mark.parametrize("name", ["index.json", "config.json", "config.yaml"])
def test_a_run_replaces_no_files_of_others(tmp_path: Path, name: str) -> None:
    """A folder of tokens, a model of Hugging Face, and the folder of a run file."""
    check_run_dir(tmp_path / "new")
    check_run_dir(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"has a file {name}"):
        check_run_dir(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    check_run_dir(tmp_path)


def test_a_model_that_takes_its_vocabulary_from_the_data() -> None:
    with pytest.raises(ConfigError, match=r"add model\.vocab_size"):
        read_run_without_data("demo-4m")
    assert read_run_without_data("demo-4m", ["model.vocab_size=300"]).model.vocab_size == 300
