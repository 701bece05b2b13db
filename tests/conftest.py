"""Fixtures for all tests."""

import gc
import os
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# so that a failing assert there shows the values, too
pytest.register_assert_rewrite("tests.support")

from tests.support.fake_gpu import InProcess, own_process  # noqa: E402
from tests.support.launch.programs import Start, starting  # noqa: E402
from tests.support.multirank.pool import WorkerPool  # noqa: E402
from tests.support.server import prepare_server  # noqa: E402

# `make test` tries the same examples each time, so what passed once keeps passing; `make test-all`
# tries new ones. There are no deadlines, which would fail by chance on a busy machine.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("fresh", deadline=None, print_blob=True)


# torch's compiler takes code from its cache that was compiled for a processor of more abilities, as
# ATEN_CPU_CAPABILITY pretends them, and crashes.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}",
)


# What tests/multirank/test_architectures.py draws; the workers of a session inherit it.
os.environ.setdefault("GRIDFORMER_PAIRS", str(date.today()))


def pytest_collection_finish() -> None:
    """Imported objects stay alive, so the garbage collector can skip them, and run less often."""
    prepare_server()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_runtest_setup() -> None:
    """Use one thread: a second one would mostly spin while other tests have its core.

    A run that an earlier test has started in this process may have set another number.
    """
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--built", default="", help="Check the wheel and sdist in there.")
    parser.addoption("--exactness-table", default="", help="Write the exactness matrix there.")
    parser.addoption(
        "--fuzz-cases", type=int, default=200, help="Random cases that `make test-all` tries."
    )
    parser.addoption(
        "--fuzz-seed", type=int, default=None, help="The first of their seeds, else a fresh one."
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what has not been tested for want of GPUs, which a skip in quiet mode does not show."""
    for report in terminalreporter.stats.get("skipped", []):
        if report.nodeid.startswith("tests/gpu/"):
            terminalreporter.write_line(f"not tested: {report.longrepr[2]}")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Persistent worker processes: `pool.run(4, function, *args)`."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def gpu() -> Iterator[InProcess]:
    """A process with a fake GPU, which calls functions: `gpu(function, *args)`."""
    with own_process() as call:
        yield call


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a `start`; `start("steps", 2)` runs an entrypoint of support/launch/entrypoints.py.

    Its files are in `tmp_path`.
    """
    with starting(tmp_path) as started:
        yield started


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared corpus with a vocabulary of 301 words."""
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources

    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        text = "".join(f"line {i} of file {number}: {i * number} and {i}\n" for i in range(120))
        (folder / f"{number}.txt").write_text(text)
    out = folder / "tokens"
    prepare_corpus(open_sources([str(folder)]), out, vocab_size=301, val_fraction=0.2)
    return out
