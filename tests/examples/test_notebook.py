"""The notebook runs from its first to its last cell, and its figure says what it promises."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from tests.support.commands import gridformer_here
from tests.support.fenced import ROOT

NOTEBOOK = ROOT / "examples" / "layouts.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that begin with `!` are commands, whose {values} are the notebook's variables."""
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, Any] = {}

    def command(text: str) -> None:
        text = re.sub(r"\{(.*?)\}", lambda value: str(eval(value[1], names)), text)
        text = text.replace("prepare docs README.md", f"prepare {ROOT}/docs/concepts")
        words, _, file = text.partition(" > ")
        done = gridformer_here(*shlex.split(words)[1:])
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        if file:
            Path(file).write_text(done.stdout)

    names["command"] = command
    for cell in cells():
        code = re.sub(r"^!(.*)$", lambda line: f"command({line[1]!r})", cell, flags=re.MULTILINE)
        exec(code, names)
    assert len(names["one"]) == names["steps"]
    assert names["one"].keys() == names["moved"].keys()
    assert names["furthest"] < 1e-4
    assert len(names["ranking"]) == 4
