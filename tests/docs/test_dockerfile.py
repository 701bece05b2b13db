"""The Dockerfile: what it copies, its versions, and the user that its image runs as."""

import json
import re
import shlex
import tomllib
from pathlib import Path

from packaging.version import Version

from gridformer import __version__
from gridformer.launch.kubernetes import _TEMPLATE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Return the instructions and their arguments, with joined lines and without comments."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    pairs = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, rest) for name, _, rest in pairs]


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    copies = (rest for name, rest in instructions() if name == "COPY" and "--from=" not in rest)
    copied = {path for rest in copies for path in shlex.split(rest)[:-1]}
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in sent
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {PROJECT["project"]["readme"], *wheel["force-include"], "src"} <= copied


def test_versions_agree() -> None:
    makefile = re.search(r"^TORCH\s*:=\s*(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile is not None
    assert re.findall(r"torch==(\S+)", TEXT) == [makefile[1]]
    assert {*re.findall(r"gridformer:(\d[\w.]*)", TEXT)} == {__version__}
    least = re.match(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert least is not None
    (python,) = {*re.findall(r"^FROM python:3\.(\d+)-slim", TEXT, re.MULTILINE)}
    assert int(python) >= int(least[1])


def test_an_argument_chooses_the_build_of_torch() -> None:
    """Pip reads PIP_EXTRA_INDEX_URL, which an argument sets for the instructions after it."""
    at_end = instructions()[[name for name, _ in instructions()].index("FROM", 1) :]
    argument = at_end.index(("ARG", "PIP_EXTRA_INDEX_URL"))
    (torch,) = (i for i, (_, rest) in enumerate(at_end) if " torch==" in rest)
    assert argument < torch
    assert Version("2.13.0+cpu") > Version("2.13.0")  # so pip takes it for torch==2.13.0
    assert "--build-arg PIP_EXTRA_INDEX_URL=https://" in TEXT
    (rest,) = (rest for _, rest in at_end if "*.whl" in rest)
    assert "--constraint /tmp/requirements.lock" in rest


def test_it_runs_as_an_ordinary_user_and_knows_no_secret() -> None:
    names = [name for name, _ in instructions()]
    (user,) = (rest for name, rest in instructions() if name == "USER")
    assert f"runAsUser: {user} " in _TEMPLATE
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert "ADD" not in names, "it fetches from the network"
    assert not re.search(r"token|password|secret|key=", TEXT, re.IGNORECASE)
    for name, rest in instructions():
        if "[" in rest and name in ("ENTRYPOINT", "CMD", "HEALTHCHECK"):
            assert all(isinstance(word, str) for word in json.loads(rest[rest.index("[") :]))
