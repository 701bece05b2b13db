"""Commands that read a run find its checkpoints where `train.checkpoint_to` has copied them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gridformer.checkpoint.copies import clash, run_with_checkpoints, url_of
from gridformer.checkpoint.store import RemoteStore
from tests.support.checkpoints import flip_a_bit, save_model, small_run
from tests.support.commands import gridformer_here

MODEL = {"hidden_size": 16, "max_seq_len": 24, "vocab_size": 301}
STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def far(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a run directory with three checkpoints of different weights, and their URL."""
    root = tmp_path_factory.mktemp("runs")
    out, url = root / "run", f"file://{root}/far"
    run = small_run(token_folder, MODEL, checkpoint_to=url)
    out.mkdir()
    (out / "config.yaml").write_text(run.to_yaml())
    shutil.copy(token_folder / "tokenizer.json", out)
    for step in STEPS:
        RemoteStore(url).upload(save_model(out, run, step, step))
    return out, url


def without_checkpoints(run_dir: Path, copy: Path) -> Path:
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("checkpoints"))
    return copy


def test_a_url_survives_the_command_line(tmp_path: Path) -> None:
    for url in ("s3://bucket/run", "memory://run", "file:///nfs/run", "s3a+x://a/b//c"):
        assert url_of(Path(url)) == url.replace("//c", "/c")
    for path in ("runs/demo", "/nfs/run", "C:/runs", "a:b", str(tmp_path)):
        assert url_of(Path(path)) is None
    assert url_of(Path("gs://" + str(tmp_path))) is not None


@pytest.mark.parametrize("named", ["run directory", "URL"])
def test_commands_find_the_copies(far: tuple[Path, str], tmp_path: Path, named: str) -> None:
    run_dir, url = far
    lost = without_checkpoints(run_dir, tmp_path / "lost")
    there = lost if named == "run directory" else url
    before = sorted(lost.rglob("*"))
    words = ("--prompt", "line 3", "--max-tokens", "8", "--greedy", "--device", "cpu")
    said = [gridformer_here("generate", one, *words) for one in (run_dir, there)]
    assert said[0].returncode == said[1].returncode == 0, said[1].stderr
    assert said[0].stdout == said[1].stdout
    for command in (("export",), ("average", "--last", "2")):
        written = []
        for number, one in enumerate((run_dir, there)):
            out = tmp_path / f"{command[0]}-{number}"
            done = gridformer_here(command[0], one, "--out", out, *command[1:])
            assert done.returncode == 0, done.stderr
            written.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*.*")
                            if p.is_file()})  # fmt: skip
        assert written[0] == written[1]
    assert sorted(lost.rglob("*")) == before, "these commands only read"


def test_own_checkpoints_are_used_without_asking(far: tuple[Path, str], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(far[0], copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(far[1], "nonsense://bucket"))
    with run_with_checkpoints(copy) as found:
        assert found == copy
    shutil.rmtree(copy / "checkpoints" / "step-00000003")
    with run_with_checkpoints(copy) as found:
        assert found == copy


def test_where_was_looked_is_said(far: tuple[Path, str], tmp_path: Path) -> None:
    lost = without_checkpoints(far[0], tmp_path / "lost")
    config = lost / "config.yaml"
    for url, why in ((f"file://{tmp_path}/none", "there is no checkpoint at "), ("x://y", "x")):
        config.write_text(far[0].joinpath("config.yaml").read_text().replace(far[1], url))
        for words in (("generate", lost), ("export", lost, "--out", tmp_path / "out")):
            done = gridformer_here(*words)
            assert done.returncode == 2
            assert url in done.stderr
            assert why in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
    done = gridformer_here("average", far[1], "--last", "9", "--out", tmp_path / "out")
    assert f"{far[1]} has 3 checkpoints: use --last 3" in done.stderr
    assert "reads metrics" in gridformer_here("report", far[1]).stderr


def test_copies_are_verified(far: tuple[Path, str], tmp_path: Path) -> None:
    done = gridformer_here("verify", far[1], "--finite")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [f"step-{step:08d}", "ok"] for step in STEPS
    ]
    assert f"verify {far[1]}` verifies them" in gridformer_here("verify", far[0]).stdout
    damaged = tmp_path / "damaged"
    shutil.copytree(far[1].removeprefix("file://"), damaged)
    shard = damaged / "step-00000002" / "shard-00001.safetensors"
    flip_a_bit(shard)
    done = gridformer_here("verify", f"file://{damaged}", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [one["ok"] for one in found["findings"]] == [True, False, True]
    note = found["findings"][1]["note"]
    assert note.startswith(f"file://{damaged}/step-00000002/shard-00001.safetensors is damaged")


@pytest.mark.parametrize(
    ("url", "clashes"),
    [
        ("{out}/checkpoints", True),
        ("file://{out}/checkpoints/", True),
        ("file://{out}/checkpoints/copies", True),
        ("{link}/checkpoints", True),
        ("local://{out}", True),
        ("{top}", True),  # the run directory is one of the folders of copies there
        ("{out}/copies", False),
        ("{out}/../far", False),
        ("{out}-far", False),
        ("{top}/..", False),
        ("memory://{out}/checkpoints", False),
        ("nonsense://{out}", False),
    ],
)
def test_copies_never_replace_what_the_run_writes(tmp_path: Path, url: str, clashes: bool) -> None:
    out, link = tmp_path / "step-00000004", tmp_path / "link"
    link.symlink_to(out)
    asked = url.format(out=out, link=link, top=tmp_path)
    said = clash(asked, out)
    assert said.startswith(f"train.checkpoint_to={asked} is where the run itself writes") == clashes
    assert bool(said) == clashes
    if clashes:
        assert "name a folder outside the run directory" in said
