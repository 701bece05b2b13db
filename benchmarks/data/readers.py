"""Compares prepare's readers of text and JSON lines, and its worker processes, with `datasets`.

    python -m benchmarks.data.readers --out docs/results/readers.md

It writes files of this Python's standard library to a temporary folder. Each way reads, or
tokenizes, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common.machine import describe_machine
from benchmarks.common.page import write_page
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.units import MIB

CHARS = 4000  # of a record
WAYS = ("gridformer", "datasets")
WHAT = {
    "records.jsonl": "JSON lines of 4,000 characters",
    "text.txt": "a text file",
    "long.jsonl": "JSON lines, of which one is as long as the text file",
    "damaged.jsonl": "JSON lines, of which line 5,001 is cut off",
    "tokens": "the first file tokenized by 2 processes into a token folder",
}


GROWING = ("records.jsonl", "text.txt")
TIMES = (1, 4, 16)  # of the size of these files


def write_files(folder: Path, size: int) -> None:
    """Writes the files of WHAT, of about `size` bytes each, and a tokenizer."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text("utf-8", "replace") for path in sorted(root.glob("*.py"))]
    draw, whole = random.Random(0), "".join(texts)
    whole = (whole * (1 + size // len(whole)))[:size]
    lines = []
    for number in range(size // CHARS):
        text = draw.choice(texts)
        begin = draw.randrange(len(text))
        lines.append(json.dumps({"text": text[begin : begin + CHARS] or "none", "id": number}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "text.txt").write_text(whole, "utf-8")
    (folder / "long.jsonl").write_text("\n".join([lines[0], json.dumps({"text": whole})]), "utf-8")
    lines[5000] = lines[5000][:100]
    (folder / "damaged.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    Tokenizer.train(texts[:20], 1000).save(folder / "tokenizer.json")


def read(way: str, file: Path) -> None:
    """Reads all chunks of a file, or makes a token folder, in one of WAYS."""
    from gridformer.data.prepare.records import Fields, file_items

    if file.name == "tokens":
        (tokenized if way == "gridformer" else mapped)(file.with_name("records.jsonl"))
        return
    if way == "gridformer":
        texts = file_items(file, Fields(), Counter())
    else:
        import datasets

        from gridformer.data.prepare.reading import Cursor
        from gridformer.data.prepare.records import table_items

        kind = "json" if file.suffix == ".jsonl" else "text"
        more = {} if kind == "json" else {"sample_by": "document"}
        table = datasets.load_dataset(
            kind, data_files=[str(file)], split="train", streaming=True, **more
        )
        texts = table_items(str(file), table, Fields(), Counter(), Cursor())
    for _ in texts:
        pass


def tokenized(file: Path) -> None:
    """Prepares a token folder as `gridformer prepare --workers 2` does."""
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources

    tokenizer = Tokenizer.load(file.with_name("tokenizer.json"))
    out = file.with_name("prepared")
    prepare_corpus(open_sources([str(file)]), out, tokenizer=tokenizer, workers=2)


def mapped(file: Path) -> None:
    """Tokenizes with `Dataset.map`, and copies the tokens of its cache to a file."""
    import datasets
    import numpy as np

    table: Any = datasets.load_dataset("json", data_files=[str(file)], split="train")
    tokenizer = str(file.with_name("tokenizer.json"))
    found = table.map(
        Mapping(tokenizer), batched=True, num_proc=2, remove_columns=table.column_names
    )
    with file.with_name("mapped.bin").open("wb") as out:
        for batch in found.with_format("numpy").iter(1000):
            for ids in batch["ids"]:
                out.write(np.asarray(ids, dtype="<u2").tobytes())


class Mapping:
    """What `Dataset.map` calls in its processes."""

    def __init__(self, tokenizer: str) -> None:
        self.file = tokenizer
        self.loaded: Tokenizer | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.loaded = self.loaded or Tokenizer.load(self.file)
        return {"ids": self.loaded.encode_batch(batch["text"])}


def measured(way: str, file: Path) -> dict[str, Any]:
    """Returns processor seconds, the most memory of a process, bytes on disk, and an error."""
    with tempfile.TemporaryDirectory(dir=file.parent) as cache:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.data.readers", "--read", way, str(file)],
            env={**os.environ, "HF_HOME": cache, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        n_bytes = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "with_start_s": used, "cached": n_bytes}


def read_here(way: str, file: Path) -> None:
    """Reads a file in this process and prints JSON."""
    if way == "datasets":
        import datasets  # noqa: F401 (its import is not counted)
    error, began = "", time.process_time()
    try:
        read(way, file)
    except Exception as problem:
        error = " ".join(str(problem).replace(str(file), file.name).split())[:120]
    used = time.process_time() - began
    status = Path("/proc/self/status").read_text("utf-8")  # the system's own figure is inherited
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / MIB
    print(json.dumps({"used_s": used, "peak_mib": peak, "error": error}))


def by_size(sizes: list[int], found: dict[tuple[int, str, str], dict[str, Any]]) -> str:
    """Returns the table of how time and memory grow with a file."""
    heads = [*(f"{size / 1e6:,.0f} MB" for size in sizes), "start", "100 MB more"]
    rows = []
    for name in GROWING:
        for way in WAYS:
            cells = [found[size, name, way] for size in sizes]
            shown = [f"{one['used_s']:.2f} s, {one['peak_mib']:,.0f} MiB" for one in cells]
            least, most = cells[0]["used_s"], cells[-1]["used_s"]
            a_byte = (most - least) / (sizes[-1] - sizes[0])
            line = [f"{least - a_byte * sizes[0]:.2f} s", f"{1e8 * a_byte:.2f} s"]
            rows.append(f"| {WHAT[name]} | {way} | {' | '.join([*shown, *line])} |")
    return "\n".join([f"| | by | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads), *rows])


def page(
    found: dict[tuple[str, str], dict[str, Any]],
    size: int,
    larger: dict[tuple[int, str, str], dict[str, Any]],
) -> list[str]:
    machine = describe_machine("benchmarks.data.readers")
    rows = []
    for name, what in WHAT.items():
        for way in WAYS:
            one = found[name, way]
            used = one["with_start_s"] if name == "tokens" else one["used_s"]
            told = one["error"] or (
                f"{one['cached'] / 1e6:,.0f} MB in its cache" if one["cached"] > 1e5 else ""
            )
            rows.append(f"| {what} | {way} | {used:.2f} | {one['peak_mib']:,.0f} | {told} |")
    return [
        "# Readers of prepare, and those of `datasets`",
        "\n".join(
            [
                f"Files of about {size / 1e6:,.0f} MB. Processor seconds are without the import of",
                "libraries, and memory is the most that the reading process held. The last two",
                "rows count all processes with their start: prepare with `--workers 2`, and",
                "`Dataset.map` with `num_proc=2`, whose cache is then copied to a file of tokens.",
            ]
        ),
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}; "
        f"{machine['date']}, commit {machine['commit']}",
        f"`{machine['command']}`",
        "\n".join(
            [
                "| what is read | by | processor s | MiB | |",
                "|---|---|---:|---:|---|",
                *rows,
            ]
        ),
        "\n".join(
            [
                "Larger files. The last two columns are of a straight line through the times of",
                "the smallest and the largest: what reading takes before the first byte, and what",
                "it takes for each 100 MB.",
            ]
        ),
        by_size([size * times for times in TIMES], larger),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=60, help="of each file")
    parser.add_argument("--out", type=Path, help="the page; by default it is printed")
    parser.add_argument(
        "--read", nargs=2, metavar=("WAY", "FILE"), help="read one file here, and print JSON"
    )
    options = parser.parse_args()
    if options.read:
        read_here(options.read[0], Path(options.read[1]))
        return
    if options.megabytes < 25:
        parser.error("use --megabytes of at least 25")
    size = options.megabytes * 10**6
    with tempfile.TemporaryDirectory(prefix="benchmark-readers-") as name:
        folder = Path(name)
        write_files(folder, size)
        found = {(what, way): measured(way, folder / what) for what in WHAT for way in WAYS}
        larger: dict[tuple[int, str, str], dict[str, Any]] = {}
        for n in (size * times for times in TIMES):
            write_files(folder, n)
            for what in GROWING:
                larger |= {(n, what, way): measured(way, folder / what) for way in WAYS}
    write_page(page(found, size, larger), options.out)


if __name__ == "__main__":
    main()
