"""What a repository has beside its code: workflows, forms of issues, citation and changelog."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer import __version__

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = {
        name for line in re.findall(r"^([\w -]+):(?!=)", MAKEFILE, re.M) for name in line.split()
    }
    variables = {*re.findall(r"^(\w+)\s*[:?]=", MAKEFILE, re.M)}
    called = set()
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            assert job["runs-on"], name
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), name
                if "uses" in step:
                    assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
                    continue
                program, *words = shlex.split(re.sub(r"\$\{\{ .*? \}\}", "X", step["run"]))
                assert program == "make", step
                set_here = {word.partition("=")[0] for word in words if "=" in word}
                assert set_here <= variables
                called |= {word for word in words if "=" not in word}
    assert called <= targets
    assert {"lint", "suite", "release", "docs"} <= called


def test_the_tests_run_on_the_oldest_and_the_pinned_versions() -> None:
    versions = jobs(ROOT / ".github/workflows/test.yml")["tests"]["strategy"]["matrix"]
    (pinned,) = re.findall(r"^TORCH\s*:=\s*(\S+)", MAKEFILE, re.M)
    (oldest,) = (
        one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith("torch>")
    )
    assert versions["torch"] == [f"{oldest}.0", pinned]
    assert versions["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    assert len(versions["python"]) == 2


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert all(isinstance(form[key], str) for key in ("name", "description"))
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len({*ids})
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert set(part["attributes"]) <= {"label", "description", "render", "options", "value"}
        assert part["attributes"]["label"]
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_the_version_is_that_of_the_changelog_and_the_citation() -> None:
    headings = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert headings[0] == (__version__, str(cited["date-released"]))
    assert cited["version"] == __version__
    assert cited["license"] == PROJECT["license"]
    assert len(cited["references"]) == 3
