"""Starting on a large corpus reads no more than on a small one, and takes no more memory.

Token files are sparse, so 10^9 tokens take no room on the disk. What was read is counted in bytes,
of `read` and of pages of files that became part of this process, and memory by its allocations.
Neither depends on the speed of the machine.
"""

import json
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gridformer.config import RunConfig, load_run
from gridformer.data import Batches, RunData, Tokenizer, indexed, open_training, resolve
from gridformer.data.indexed import write_index
from gridformer.data.run_data import fingerprint
from gridformer.utils.units import MIB
from tests.support.data import sentences

SMALL, LARGE = 10**8, 10**9  # tokens of a run
BLOCK = 1 << 12  # documents that are compared at a time
DTYPE = np.dtype("<u2")
SHARES = {"large": 7, "small": 3}
SEQ_LEN, BATCH = 512, 64


def write_corpus(folder: Path, tokens: int, documents: int) -> Path:
    """Write two sources with 7/10 and 3/10 of the tokens, all of them 0, and a run file."""
    folder.mkdir()
    Tokenizer.train(sentences(50), 300).save(folder / "tokenizer.json")
    sources = []
    for name, share in SHARES.items():
        n = documents * share // 10
        lengths = np.full(n, tokens // documents, dtype=np.int32)
        write_index(folder / f"{name}.idx", DTYPE, lengths)
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(int(lengths.sum()) * DTYPE.itemsize)
        sources.append({"path": str(folder / name), "name": name, "weight": share / 10})
    model = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": SEQ_LEN}
    sections = {"model": model, "data": sources, "train": {"global_batch": BATCH}}
    (folder / "run.yaml").write_text(json.dumps(sections))
    return folder


def started(run: RunConfig) -> tuple[RunData, Batches]:
    """Do all that a run does with its data until it has its first batch."""
    data = RunData.open(run.data)
    run = resolve(run, data)
    fingerprint(data)
    batches = open_training(run, data)
    assert batches.batch(0)["tokens"].shape == (BATCH, SEQ_LEN)
    return data, batches


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that this process has touched."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):  # the first line of a mapping
            here = line.endswith(f" {path}")
        elif here and first == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def read_so_far() -> int:
    """Return the bytes that this process has read with system calls."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


class Cost(NamedTuple):
    """What it takes to start on a corpus, in bytes."""

    touched: int  # of the mapped files of tokens
    read: int  # with system calls
    peak: int  # the most that were allocated at a time
    later: int  # how many more were allocated after further batches


def cost(folder: Path) -> Cost:
    run = load_run(folder / "run.yaml")
    before = read_so_far()
    data, batches = started(run)
    read = read_so_far() - before
    touched = sum(resident(folder / f"{name}.bin") for name in SHARES)
    del data, batches
    tracemalloc.start()
    _, batches = started(run)
    now, peak = tracemalloc.get_traced_memory()
    for step in range(1, 40):
        batches.batch(step)
    later = tracemalloc.get_traced_memory()[0] - now
    tracemalloc.stop()
    return Cost(touched, read, peak, later)


def test_a_larger_corpus_costs_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_BLOCK", BLOCK)
    few = cost(write_corpus(tmp_path / "few", SMALL, 64 * BLOCK))
    many = cost(write_corpus(tmp_path / "many", LARGE, 192 * BLOCK))
    assert 0 < many.touched < 1.5 * few.touched
    assert many.touched < LARGE * DTYPE.itemsize // 20
    # Blocks of every file, and the tokenizers.
    assert 0 < many.read < 1.1 * few.read
    assert many.read < LARGE * DTYPE.itemsize // 100
    # A table of all documents would take 4 MB more, and one of all samples 14 MB.
    assert many.peak < few.peak + MIB // 2
    assert all(one.later < MIB // 4 for one in (few, many)), "memory grows with the steps"
