"""Damaged run directories: each damage is one sentence that names it, with its exit code."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import MANIFEST
from gridformer.launch.run_lock import RunLock
from tests.support.commands import gridformer_here, write_run
from tests.support.marks import full_unless

NEWEST, BEFORE = "step-00000004", "step-00000002"


@pytest.fixture(scope="module")
def run_file(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damages")
    shutil.copytree(token_folder, folder / "data")
    train = {"steps": 4, "save_every": 2, "global_batch": 2, "eval_every": 99, "eval_batches": 1}
    train_on_cpu = {**train, "device": "cpu"}
    path = write_run(folder / "mine.yaml", folder / "data", train=train_on_cpu)
    done = gridformer_here("train", path, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def out(run_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_file.parent / "out", tmp_path / "out"))


def newest(out: Path) -> Path:
    return out / "checkpoints" / NEWEST


def shard(out: Path, name: str = NEWEST) -> Path:
    return next((out / "checkpoints" / name).glob("*.safetensors"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def edit(change: Callable[[Any], object], checked: bool = False) -> Callable[[Path], object]:
    """Return a damage that changes the manifest, like one of an older version or with its sum."""

    def damage(out: Path) -> None:
        path = newest(out) / MANIFEST
        content = json.loads(path.read_text())
        checksum = content.pop("checksum", 0)
        change(content)
        text = json.dumps(content, separators=(",", ":"))
        path.write_text(text[:-1] + f',"checksum":{checksum}}}' if checked else text)

    return damage


def header_is(content: bytes) -> Callable[[Path], object]:
    """Return a damage that was there already when checksums were computed."""

    def damage(out: Path) -> None:
        whole = content + shard(out).read_bytes()[len(content) :]
        shard(out).write_bytes(whole)
        edit(set_to(zlib.crc32(whole), "files", shard(out).name, "crc32"))(out)

    return damage


def manifest_is(content: bytes) -> Callable[[Path], object]:
    return lambda out: (newest(out) / MANIFEST).write_bytes(content)


def set_to(value: Any, *keys: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def positions(content: Any) -> Any:
    (found,) = content["index"]["files"].values()
    return found


def linked(out: Path) -> None:
    outside = out.parent / "outside.safetensors"
    shard(out).rename(outside)
    (newest(out) / "shard-00001.safetensors").symlink_to(outside)


def swapped(out: Path) -> None:
    """Exchange the files of two checkpoints, which have the same size."""
    a, b = shard(out), shard(out, BEFORE)
    aside = out / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory_as_manifest(out: Path) -> None:
    (newest(out) / MANIFEST).unlink()
    (newest(out) / MANIFEST).mkdir()


def models(all: dict[str, Any]) -> list[dict[str, Any]]:
    return [all["model"], all["run"]["model"]]


def metrics(change: Callable[[list[str]], object]) -> Callable[[Path], object]:
    def damage(out: Path) -> None:
        path = out / "metrics.jsonl"
        lines = path.read_text().splitlines()
        change(lines)
        path.write_text("".join(f"{line}\n" for line in lines))

    return damage


# For each damage, what it does and what the sentence about it says.
OF_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated file": (lambda out: os.truncate(shard(out), 99), "is truncated or was changed"),
    "an empty file": (lambda out: os.truncate(shard(out), 0), "it has 0 bytes"),
    "a flipped bit": (lambda out: flip(shard(out), -9), "its checksum is wrong"),
    "a length of 2^62": (header_is(bytes(7) + b"@"), "shard-00001.safetensors is truncated, dam"),
    "a zeroed page": (header_is(bytes(4096)), "is truncated, damaged or no"),
    "no header": (header_is(b"\x02" + bytes(7) + b"{}"), "is truncated, damaged or no"),
    "a removed file": (lambda out: shard(out).unlink(), "shard-00001.safetensors is missing"),
    "a foreign file": (lambda out: shutil.copy(shard(out), newest(out) / "shard-00009.safetensors"),
        "does not belong to this checkpoint"),
    "a link outside": (linked, "is a symbolic link"),
    "swapped files": (swapped, "its checksum is wrong"),
    "a removed manifest": (lambda out: (newest(out) / MANIFEST).unlink(), "is missing"),
    "a directory as manifest": (directory_as_manifest, "it is a folder, not a file"),
    "a pipe as manifest": (lambda out: piped(newest(out) / MANIFEST), "it is a pipe, not a file"),
    "a pipe": (lambda out: piped(shard(out)), "shard-00001.safetensors is missing"),
    "a key twice": (manifest_is(b'{"step": 4, "step": 5}'), "the key 'step' occurs twice"),
    "a truncated manifest": (lambda out: os.truncate(newest(out) / MANIFEST, 200),
        "is damaged or not a gridformer checkpoint's"),
    "a flipped bit in the manifest": (lambda out: flip(newest(out) / MANIFEST, 100),
        "is damaged or was edited (its checksum is wrong)"),
    "an empty manifest": (manifest_is(b""), "is damaged"),
    "a list": (manifest_is(b"[]"), "is damaged"),
    "binary": (manifest_is(b"\xff\x00\xfe" * 9), "is damaged"),
    "nested": (manifest_is(b"[" * 100_000), "nested too deep"),
    "an edited step": (edit(set_to(999, "step"), checked=True), "its checksum is wrong"),
    "step 999 of an older version": (edit(set_to(999, "step")),
        "holds step 999, which its name does not say: rename it to step-00000999"),
    "a negative step": (edit(set_to(-1, "step")), "step: Input should be greater than or equal"),
    "a text as tokens": (edit(set_to("many", "tokens")), "tokens: Input should be a valid integer"),
    "more skipped than done": (edit(set_to(5, "skipped")), "skipped is 5, and step only 4"),
    "an infinite scale": (edit(set_to(float("inf"), "loss_scale")), "loss_scale: Input should be"),
    "a later start of data": (edit(set_to(9, "data_start")), "data_start is 9"),
    "another model": (edit(set_to(2, "model", "n_layers")),
        "model and run.model are different models"),
    "positions that no file holds": (
        edit(lambda all: [one.update(max_seq_len=2**31 - 1) for one in models(all)]),
        "parameters or more, and files only",
    ),
    "a broken run": (edit(set_to(-4, "run", "train", "lr")), "train.lr: Input should be"),
    "a run without data": (edit(lambda all: all["run"].pop("data")), "data: Field required"),
    "an unknown key": (edit(set_to(1, "run", "train", "stepz")), "train.stepz: Extra inputs"),
    "a file outside": (edit(set_to({"bytes": 1, "crc32": 1}, "files", "../../mine.yaml")),
        "is not the plain name of a file"),
    "NUL": (edit(set_to({"bytes": 1, "crc32": 1}, "files", "a\0b")),
        "is not the plain name of a file"),
    "no files": (edit(set_to({}, "files")), "files: there are none"),
    "another file in the index": (edit(set_to([], "index", "files", "shard-00007.safetensors")),
        "files and index do not name the same files, see shard-00007"),
    "a list that is not there": (edit(lambda all: positions(all)[0].__setitem__(0, 99)),
        "index: shard-00001.safetensors has list 99"),
    "a negative offset": (
        edit(lambda all: positions(all)[0].__setitem__(1, [-1] * len(positions(all)[0][2]))),
        "has a block at (-1",
    ),
    "another offset": (
        edit(lambda all: positions(all)[0].__setitem__(1, [7] * len(positions(all)[0][2]))),
        "has other blocks than checkpoint.json says",
    ),
    "a renamed folder": (lambda out: newest(out).rename(out / "checkpoints" / "step-00000009"),
        "rename it to step-00000004"),
    "an empty folder": (lambda out: (out / "checkpoints" / "step-00000009").mkdir(),
        "checkpoint.json is missing"),
}  # fmt: skip
# What a run that resumes mends or does not need, so that only `verify` tells it.
OF_THE_REST: dict[str, tuple[Callable[[Path], object], str]] = {
    "the older checkpoint": (lambda out: flip(shard(out, BEFORE), -9), "its checksum is wrong"),
    "a step that is there twice": (
        lambda out: shutil.copytree(newest(out), out / "checkpoints" / "step-4"),
        "step-4 is no checkpoint's folder: move it away",
    ),
    "no config": (lambda out: (out / "config.yaml").unlink(), "config.yaml is missing"),
    "no YAML": (lambda out: (out / "config.yaml").write_text("{["), "config.yaml is damaged"),
    "an object in YAML": (
        lambda out: (out / "config.yaml").write_text("!!python/object/apply:os.getcwd []"),
        "config.yaml is damaged",
    ),
    "another config": (
        lambda out: (out / "config.yaml").write_text(
            (out / "config.yaml").read_text().replace("hidden_size: 16", "hidden_size: 32")
        ),
        "belongs to another run than step 4 does (model.hidden_size is 32, there 16)",
    ),
    "no metrics": (lambda out: (out / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "garbage": (metrics(lambda lines: lines.insert(2, "}")), "line 3 cannot be read"),
    "a gap": (metrics(lambda lines: lines.pop(2)), "after step 1 comes step 3"),
    "no first steps": (metrics(lambda lines: lines.__delitem__(slice(2))), "it begins at step 2"),
    "too few metrics": (metrics(lambda lines: lines.pop()), "it ends at step 3"),
    "metrics of any size": (lambda out: os.truncate(out / "metrics.jsonl", 1 << 36),
        "metrics.jsonl: cannot be read (it has more than 8 GiB"),
    "a pipe as lock": (lambda out: os.mkfifo(out / "lock"),
        "lock is no file, so no run can use it"),
    "no tokenizer": (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "a broken tokenizer": (lambda out: (out / "tokenizer.json").write_text("{}"),
        "is not a tokenizer.json"),
}  # fmt: skip
IN_SHORT = (
    "a flipped bit", "a length of 2^62", "a zeroed page", "a pipe as lock",
    "step 999 of an older version", "a link outside", "a gap", "positions that no file holds",
)  # fmt: skip


def test_an_intact_run_is_well(out: Path) -> None:
    """Also one with the leavings of a killed run, or with a checkpoint that was set aside."""
    (out / "checkpoints" / ".writing-step-00000006").mkdir()
    shutil.copytree(newest(out), out / "checkpoints" / f"damaged-{NEWEST}")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    with RunLock() as lock:
        lock.take(out)
        (told,) = (
            line
            for line in gridformer_here("verify", out).stdout.splitlines()
            if line.startswith("lock ")
        )
        assert told.split()[:5] == ["lock", "ok", "in", "use", "by"]
    done = gridformer_here("verify", out, "--finite", "--json")
    assert done.returncode == 0, done.stdout
    notes = {finding["what"]: finding["note"] for finding in json.loads(done.stdout)["findings"]}
    assert "all finite" in notes[NEWEST]
    assert "half a line" in notes["metrics.jsonl"]
    assert ".writing-step-00000006" in notes["leftovers"]
    assert "train.fallback" in notes[f"damaged-{NEWEST}"]
    assert gridformer_here("verify", newest(out)).returncode == 0
    nothing = gridformer_here("verify", out.parent)
    assert nothing.returncode == 2
    assert "is not a run directory" in nothing.stderr


@pytest.mark.parametrize("damage", full_unless(IN_SHORT.__contains__, OF_CHECKPOINTS))
def test_a_damaged_checkpoint(run_file: Path, out: Path, damage: str) -> None:
    function, told = OF_CHECKPOINTS[damage]
    function(out)
    found = gridformer_here("verify", out)
    assert found.returncode == 1, found.stdout + found.stderr
    assert any("BAD" in line and told in line for line in found.stdout.splitlines())
    train = ("train", run_file, "train.steps=5", "--out", out)
    refused = gridformer_here(*train)
    assert refused.returncode == 2
    (sentence,) = refused.stderr.strip().splitlines()[-1:]
    assert sentence.startswith("error: ")
    assert told in sentence
    assert "Traceback" not in refused.stdout + refused.stderr
    assert sorted(path.name for path in out.iterdir() if path.name == "lock") == []
    resumed = gridformer_here(*train, "train.fallback=true")
    if damage == "swapped files":
        assert resumed.returncode == 2
        assert "all 2 checkpoints of" in resumed.stderr
        return
    assert resumed.returncode == 0, resumed.stderr
    again = find.latest(out)
    assert again is not None
    assert again.name == "step-00000005"


READERS = {
    "generate": ["--prompt", "line", "--max-tokens", "1"],
    "evaluate": ["--tasks", "text:text.txt"],
    "export": ["--out", "exported"],
}


@pytest.mark.parametrize("size", [None, 9], ids=["flipped", "cut off"])
@pytest.mark.parametrize("command", READERS)
def test_who_only_reads_is_told_another_checkpoint(
    out: Path, command: str, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with that it works, while train.fallback is no setting of these commands."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("line 1 of 2\n")
    if size is None:
        flip(shard(out), -9)
    else:
        os.truncate(shard(out), size)
    done = gridformer_here(command, out, *READERS[command])
    assert done.returncode == 2
    assert "train.fallback" not in done.stderr
    before = out / "checkpoints" / BEFORE
    assert f"use the checkpoint before it, {before}" in done.stderr.replace("\n", "")
    done = gridformer_here(command, before, *READERS[command])
    assert done.returncode == 0, done.stderr


def test_who_only_reads_and_has_nothing_else(out: Path) -> None:
    flip(shard(out), -9)
    average = gridformer_here("average", out, "--last", "2", "--out", out.parent / "average")
    assert "train.fallback" not in average.stderr
    assert f"or move {newest(out)} elsewhere" in average.stderr
    flip(shard(out, BEFORE), -9)
    earlier = gridformer_here("generate", out / "checkpoints" / BEFORE, "--prompt", "x")
    assert f"use the checkpoint after it, {newest(out)}" in earlier.stderr
    shutil.rmtree(out / "checkpoints" / BEFORE)
    only = gridformer_here("generate", out, "--prompt", "x")
    assert "there is no other checkpoint, so restore it from a copy" in only.stderr


@pytest.mark.parametrize("damage", full_unless(IN_SHORT.__contains__, OF_THE_REST))
def test_what_else_is_damaged(out: Path, damage: str) -> None:
    function, told = OF_THE_REST[damage]
    function(out)
    found = gridformer_here("verify", out)
    assert found.returncode == 1, found.stdout + found.stderr
    assert any("BAD" in line and told in line for line in found.stdout.splitlines()), found.stdout


def test_changed_data_are_refused_and_moved_ones_are_not(
    run_file: Path, out: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(run_file.parent / "data", tmp_path / "moved")
    train = ("train", run_file, f"data.path={data}", "train.steps=5", "--out", out)
    flip(data / "val.bin", 0)
    refused = gridformer_here(*train)
    assert refused.returncode == 2
    assert "the contents of val.bin changed" in refused.stderr
    assert "data.restart=true" in refused.stderr
    flip(data / "val.bin", 0)
    resumed = gridformer_here(*train)
    assert resumed.returncode == 0, resumed.stderr
    assert "began anew" not in resumed.stdout
    flip(data / "train.bin", 0)
    found = gridformer_here("verify", out)
    assert found.returncode == 1
    assert "the contents of train.bin changed" in found.stdout
    later = gridformer_here(*train, "train.steps=6", "data.restart=true")
    assert later.returncode == 0, later.stderr
    assert "the order of samples began anew after step 5" in later.stdout


def test_other_data_may_not_have_another_tokenizer(
    run_file: Path, out: Path, tmp_path: Path
) -> None:
    """Its ids would be other tokens than those that the model has learned."""
    text, data = tmp_path / "text.txt", tmp_path / "other"
    text.write_text("another text, with other words in each of its lines\n" * 200)
    words = ("--vocab-size", "270", "--val-fraction", "0.1")
    assert gridformer_here("prepare", text, "--out", data, *words).returncode == 0
    train = ("train", run_file, f"data.path={data}", "train.steps=6", "--out", out)
    refused = gridformer_here(*train, "data.restart=true")
    assert refused.returncode == 2
    assert "the contents of tokenizer.json changed" in refused.stderr
    assert "data.restart" not in gridformer_here(*train).stderr, "which would not help"


def test_a_run_directory_in_use_is_refused(run_file: Path, out: Path) -> None:
    with RunLock() as lock:
        lock.take(out)
        refused = gridformer_here("train", run_file, "train.steps=5", "--out", out)
        assert refused.returncode == 2
        assert f"{out} is in use by process {os.getpid()} on " in refused.stderr
        assert gridformer_here("verify", out).returncode == 0
        words = ("generate", out, "--prompt", "line", "--max-tokens", "2")
        assert gridformer_here(*words).returncode == 0
        prepared = gridformer_here("prepare", run_file, "--out", out, "--overwrite")
        assert prepared.returncode == 2
