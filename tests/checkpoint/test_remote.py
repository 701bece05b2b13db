"""Checkpoints are copied to any file system of fsspec; runs and commands go on from there."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gridformer.checkpoint import find
from gridformer.checkpoint.copies import clash, fetch_newest, give_up, run_with_checkpoints, url_of
from gridformer.checkpoint.manifest import KEPT, MANIFEST, Manifest, verify_checkpoint
from gridformer.checkpoint.save import SaveOutcome
from gridformer.checkpoint.saver import Saver
from gridformer.checkpoint.store import RemoteStore
from gridformer.config import RunConfig
from gridformer.mesh import Axes
from gridformer.train.divergence import Recovery
from gridformer.utils.errors import CheckpointError, UserError
from tests.support.checkpoints import flip_a_bit, save_filled, save_model, small_run
from tests.support.commands import gridformer_here

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    remote = RemoteStore(URL)
    if remote.files.exists("/bucket"):
        remote.files.rm("/bucket", recursive=True)


def a_run(**train: Any) -> RunConfig:
    return small_run(**{"checkpoint_to": URL, "keep_checkpoints": 2, **train})


def save(out: Path, step: int, run: RunConfig) -> SaveOutcome:
    outcome = save_filled(Saver(out, run, Axes()), step, run, float(step), wait=False)
    assert not outcome.failure
    return outcome


@pytest.mark.parametrize("url", [URL, "file://"])
def test_a_run_goes_on_elsewhere_from_the_newest_copy(tmp_path: Path, url: str) -> None:
    url = url if url == URL else f"file://{tmp_path}/far"
    here, there = tmp_path / "here", tmp_path / "there"
    run = a_run(checkpoint_to=url, keep_every=2)
    (here / KEPT).mkdir(parents=True)
    small = {"tokenizer.json": "{}", f"{KEPT}/merges.txt": "a b"}  # each checkpoint has copies
    for name, text in small.items():
        (here / name).write_text(text)
    for step in range(1, 6):
        assert not save(here, step, run).not_copied
    kept = [f"step-{step:08d}" for step in (2, 4, 5)]
    assert RemoteStore(url).complete() == kept == [folder.name for folder in find.complete(here)]
    assert [path.name for path in (here / "checkpoints").iterdir() if path.name[0] == "."] == []
    fetched = fetch_newest(url, there)
    assert fetched == there / "checkpoints" / kept[-1]
    assert verify_checkpoint(fetched).side_files.keys() == small.keys()
    newest = here / "checkpoints" / kept[-1]
    for path in newest.rglob("*.*"):
        assert (fetched / path.relative_to(newest)).read_bytes() == path.read_bytes()
    RemoteStore(url).download_beside(there)
    assert {name: (there / name).read_text() for name in small} == small
    assert fetch_newest(url, there) is None, "it is there already"
    save(there, 6, a_run(checkpoint_to=""))
    assert fetch_newest(url, there) is None, "a newer one is there"
    assert [path.name for path in (there / "checkpoints").iterdir() if path.name[0] == "."] == []


def there() -> list[str]:
    """Return the names of all folders at the URL, whether or not they are complete."""
    remote = RemoteStore(URL)
    listed = remote.files.ls(remote.root, detail=True)
    return sorted(Path(one["name"]).name for one in listed if one["type"] == "directory")


@pytest.mark.parametrize("file", ["shard-00001.safetensors", MANIFEST])
def test_a_copy_that_fails_costs_no_checkpoint_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """On a disk that was full once, half a copy would take what becomes free for ever."""
    save(tmp_path, 1, a_run())
    put = RemoteStore._put

    def fails(self: RemoteStore, here: Path, name: str, there: str) -> None:
        put(self, here, name, there)
        if name == file:
            raise PermissionError("no credentials")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "_put", fails)
        outcome = save(tmp_path, 2, a_run())
    assert outcome.not_copied == "PermissionError: no credentials"
    assert verify_checkpoint(tmp_path / "checkpoints" / "step-00000002").step == 2
    assert there() == ["step-00000001"]
    assert not save(tmp_path, 3, a_run()).not_copied
    assert there() == ["step-00000001", "step-00000003"]


def test_a_damaged_copy_and_that_of_another_run_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "here", 1, a_run())

    def check(manifest: Manifest) -> None:
        raise CheckpointError(f"step {manifest.step} is of another run")

    with pytest.raises(UserError, match=r"checkpoint_to=memory.*step 1 is of another run"):
        fetch_newest(URL, tmp_path / "there", check)
    remote = RemoteStore(URL)
    remote.files.pipe_file(f"{remote.root}/step-00000001/shard-00001.safetensors", b"half")
    with pytest.raises(UserError, match=r"shard-00001\.safetensors is truncated or was changed"):
        fetch_newest(URL, tmp_path / "there")
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_a_rollback_gives_up_the_copies_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(on_divergence="rollback", keep_checkpoints=9, rollback_checkpoints=2)
    for step in (1, 2, 3):
        save(tmp_path, step, run)
    decision = Recovery(run.train, tmp_path, Axes())._back("why", "advice", 3)
    assert decision[1:] == (2, tmp_path / "checkpoints" / "step-00000002")
    assert there() == ["step-00000001", "step-00000002"]
    assert fetch_newest(URL, tmp_path) is None, "the run resumes from where it went back to"
    assert give_up(URL, ["step-00000009"]) == give_up("", ["step-00000001"]) == ""

    def broken(self: RemoteStore, name: str) -> None:
        raise PermissionError("no credentials")

    monkeypatch.setattr(RemoteStore, "remove", broken)
    assert "step-00000001 could not be removed" in give_up(URL, ["step-00000001"])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.checkpoint_to=nonsense://bucket/run: "):
        fetch_newest("nonsense://bucket/run", tmp_path)


def test_a_checkpoint_is_never_replaced_by_a_copy_of_itself(tmp_path: Path) -> None:
    """A mount can make the run's own folder look like another one."""
    outcome = save(tmp_path, 1, a_run(checkpoint_to=f"file://{tmp_path}/checkpoints"))
    assert "is the checkpoint itself" in outcome.not_copied
    assert verify_checkpoint(tmp_path / "checkpoints" / "step-00000001").step == 1


def test_a_copy_without_a_manifest_is_none_and_the_next_removes_it(tmp_path: Path) -> None:
    """As what a killed process leaves: the manifest is copied last, and removed first."""
    save(tmp_path / "here", 1, a_run())
    remote = RemoteStore(URL)
    for name in ("step-00000002/shard-00001.safetensors", "mine/shard-00001.safetensors"):
        remote.files.pipe_file(f"{remote.root}/{name}", b"half")
    fetched = fetch_newest(URL, tmp_path / "there")
    assert fetched is not None
    assert verify_checkpoint(fetched).step == 1
    save(tmp_path / "here", 3, a_run())
    assert there() == ["mine", "step-00000001", "step-00000003"], "other folders are left alone"


MODEL = {"hidden_size": 16, "max_seq_len": 24, "vocab_size": 301}


@pytest.fixture(scope="module")
def far(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a run directory with three checkpoints of different weights, and their URL."""
    root = tmp_path_factory.mktemp("runs")
    out, url = root / "run", f"file://{root}/far"
    run = small_run(token_folder, MODEL, checkpoint_to=url)
    out.mkdir()
    (out / "config.yaml").write_text(run.to_yaml())
    shutil.copy(token_folder / "tokenizer.json", out)
    for step in (1, 2, 3):
        RemoteStore(url).upload(save_model(out, run, step, step))
    return out, url


def without_checkpoints(run_dir: Path, copy: Path) -> Path:
    return Path(shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("checkpoints")))


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
            files = [path for path in out.rglob("*.*") if path.is_file()]
            written.append({path.relative_to(out): path.read_bytes() for path in files})
        assert written[0] == written[1]
    assert sorted(lost.rglob("*")) == before, "these commands only read"


def test_own_checkpoints_are_used_without_asking(far: tuple[Path, str], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(far[0], tmp_path / "run"))
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(far[1], "nonsense://bucket"))
    shutil.rmtree(copy / "checkpoints" / "step-00000003")
    with run_with_checkpoints(copy) as run_dir:
        assert run_dir == copy


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
        [f"step-{step:08d}", "ok"] for step in (1, 2, 3)
    ]
    assert f"verify {far[1]}` verifies them" in gridformer_here("verify", far[0]).stdout
    damaged = Path(shutil.copytree(far[1].removeprefix("file://"), tmp_path / "damaged"))
    flip_a_bit(damaged / "step-00000002" / "shard-00001.safetensors")
    done = gridformer_here("verify", f"file://{damaged}", "--json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert [one["ok"] for one in findings] == [True, False, True]
    note = findings[1]["note"]
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
