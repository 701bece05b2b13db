"""The wheel, in an environment that has what the wheel requires and nothing else.

`make release` checks the files in dist/ with this; otherwise they are built here.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gridformer import __version__

ROOT = Path(__file__).parents[2]
# The demo with less text and fewer steps, on the same four processes.
SHORT_DEMO = """
from gridformer.cli import demo

if __name__ == "__main__":
    demo.CORPUS, demo.RUN_FILE = "text", "short.yaml"
    demo.demo()
"""


@pytest.fixture(scope="module")
def dist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the wheel and the sdist."""
    if given := request.config.getoption("--built"):
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"gridformer-{__version__}-py3-none-any.whl"


def files_below(folder: Path, suffix: str) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob(f"*{suffix}")}


def test_files_and_metadata(dist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    info = f"gridformer-{__version__}.dist-info"
    sources = files_below(ROOT / "src/gridformer", ".py")
    sources |= files_below(ROOT / "src/gridformer", ".jinja") | {"py.typed": b""}
    configs = files_below(ROOT / "configs", ".yaml") | files_below(ROOT / "configs", ".json")
    assert {name.partition("/")[0] for name in configs} == {
        *("clusters", "models", "runs", "schemas")
    }
    wanted = {f"gridformer/{name}": content for name, content in sources.items()}
    wanted |= {f"gridformer/configs/{name}": content for name, content in configs.items()}
    assert {name: content for name, content in files.items() if info not in name} == wanted
    told = message_from_string(files[f"{info}/METADATA"].decode())
    assert told["Version"] == __version__
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{info}/licenses/LICENSE" in files
    with tarfile.open(dist / f"gridformer-{__version__}.tar.gz") as sources_packed:
        names = {name.partition("/")[2] for name in sources_packed.getnames()}
    assert {f"src/gridformer/{name}" for name in sources} <= names
    assert {f"configs/{name}" for name in configs} <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"} <= names
    assert not {name for name in names if name.startswith((".venv", "runs", "data"))}


def required(wheel: Path) -> set[str]:
    """Return the names of all distributions that `pip install` of the wheel would install."""
    with zipfile.ZipFile(wheel) as packed:
        told = packed.read(f"gridformer-{__version__}.dist-info/METADATA").decode()
    waiting = [(one, "") for one in message_from_string(told).get_all("Requires-Dist", [])]
    found: set[str] = set()
    while waiting:
        text, extra = waiting.pop()
        one = Requirement(text)
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(one.name)
        inner = metadata.requires(name) or []
        new = {*(() if name in found else ("",)), *one.extras}
        waiting += [(text, extra) for extra in new for text in inner]
        found.add(name)
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the wheel, and with links to what it requires."""
    made = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    python = made / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    said = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    there = Path(said.stdout.strip())
    for one in map(metadata.distribution, required(wheel)):
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (there / top).exists():
                (there / top).symlink_to(str(one.locate_file(top)))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    return made


def test_the_demo_runs_from_an_environment_with_the_wheel(
    environment: Path, tmp_path: Path
) -> None:
    """Runs outside the checkout, with the shipped model and run file."""
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def said(*words: str) -> str:
        program = environment / "bin" / words[0]
        done = subprocess.run(
            [program, *words[1:]], cwd=tmp_path, env=outside, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert said("gridformer", "--version") == f"gridformer {__version__}\n"
    ask = (
        "import gridformer, importlib.util as u; print(gridformer.__file__, u.find_spec('pytest'))"
    )
    where, pytest_there = said("python", "-c", ask).split()
    assert Path(where).is_relative_to(environment)
    assert pytest_there == "None", "the environment has more than the wheel requires"
    shipped = (Path(where).parent / "configs/runs/demo.yaml").read_text(encoding="utf-8")
    short = shipped.replace("steps: 150", "steps: 2").replace("global_batch: 16", "global_batch: 4")
    assert short != shipped
    (tmp_path / "short.yaml").write_text(short, encoding="utf-8")
    (tmp_path / "text").mkdir()
    for i in range(20):
        lines = (f"def read_{i}_{k}(self):\n    return {k}\n" for k in range(40))
        (tmp_path / "text" / f"{i}.py").write_text("\n".join(lines))
    (tmp_path / "short.py").write_text(SHORT_DEMO)
    shown = said("python", "short.py")
    assert "optimus 2x2" in shown
    assert "validation loss" in shown
    assert (tmp_path / "runs/demo/checkpoints/step-00000002").is_dir()
