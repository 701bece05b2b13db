"""Random models, layouts and methods train together as one device; see tests/support/fuzz.

`make test` runs the cases of the first seeds. `make test-all` also runs as many cases with new
seeds as `--fuzz-cases` says. A failure prints the case on one line, and the command that runs it
again.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gridformer.config import FINE_TUNING, LayoutConfig, ModelConfig, RunConfig, TrainConfig
from gridformer.exactness import without_methods
from tests.support.fuzz import drawing, ranks
from tests.support.fuzz.case import QUICK, Case, case_of
from tests.support.fuzz.drawing import Chooser, refusals, values_of
from tests.support.fuzz.ranks import check_case
from tests.support.multirank.pool import WorkerPool

# Seconds after which a leg of a case counts as hung. It usually takes one, but with 16 processes on
# a shared machine a minute has been seen.
LONGEST = 240.0
FIRST = 54  # the cases of the seeds from here on show something of everything, see below
of_two_legs = pytest.mark.timeout(3 * LONGEST)


def by_size(seeds: list[int]) -> list[tuple[int, Case]]:
    """Sort seeds and cases by size: process groups are rebuilt whenever their size changes."""
    cases = [(seed, case_of(seed)) for seed in seeds]
    return sorted(cases, key=lambda named: named[1].n_processes)


@pytest.fixture(scope="module")
def quick() -> list[tuple[int, Case]]:
    return by_size([*range(FIRST, FIRST + QUICK)])


@pytest.fixture(scope="module")
def fresh(request: pytest.FixtureRequest) -> list[tuple[int, Case]]:
    """Return cases with other seeds each time, unless `--fuzz-seed` says where to begin."""
    first = request.config.getoption("--fuzz-seed")
    first = random.SystemRandom().randrange(10**6, 10**9) if first is None else first
    return by_size([first + i for i in range(request.config.getoption("--fuzz-cases"))])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fresh_number" in metafunc.fixturenames:
        n = metafunc.config.getoption("--fuzz-cases")
        metafunc.parametrize("fresh_number", range(n))


@of_two_legs
@pytest.mark.parametrize("number", range(QUICK))
def test_a_case_equals_one_device(
    pool: WorkerPool, quick: list[tuple[int, Case]], tmp_path: Path, number: int
) -> None:
    with pool.limit(LONGEST):
        check_case(pool, quick[number][1], tmp_path)


@pytest.mark.full
@of_two_legs
def test_a_fresh_case_equals_one_device(
    pool: WorkerPool, fresh: list[tuple[int, Case]], tmp_path: Path, fresh_number: int
) -> None:
    with pool.limit(LONGEST):
        check_case(pool, fresh[fresh_number][1], tmp_path)


def test_quick_cases_show_something_of_everything(quick: list[tuple[int, Case]]) -> None:
    """The cases contain each value of the most important settings, and runs that move.

    Some networks are so narrow that a device's shard has a width of one.
    """
    legs = [leg for _, case in quick for leg in case.legs]
    words: dict[str, tuple[type[Any], str]] = {
        "model": (ModelConfig, "family"),
        "layout": (LayoutConfig, "scheme dp_mode gradient_sync common attention feed_forward"),
        "train": (TrainConfig, "recompute update offload clip_by compile optimizer"),
    }
    for section, (schema, names) in words.items():
        for name in names.split():
            seen = {getattr(getattr(leg, section), name) for leg in legs}
            drawn_whole = {"network"} if name == "family" else set()
            every = values_of(f"{section}.{name}", schema.model_fields[name])
            assert seen == {*every, *drawn_whole}, name
    assert {leg.task for leg in legs} >= {*FINE_TUNING}
    assert {leg.layout.pp for leg in legs} >= {1, 2, 3}
    assert any(leg.layout.stages_per_rank > 1 for leg in legs)
    layouts = [leg.layout for leg in legs]
    over = {one.scheme for one in layouts if one.rows > 1 and one.rows_over == "sequence"}
    assert over == {"megatron_2d", "optimus"}
    assert any(one.rows > 1 and one.stationary == "weight" for one in layouts)
    assert any(one.sequence_parallel for one in layouts)
    mixtures = [leg for leg in legs if leg.model.n_experts]
    assert {bool(leg.layout.experts_over) for leg in mixtures} == {False, True}
    assert sum(case.stop > 0 for _, case in quick) >= 5
    assert sum(case.legs[0].train.dtype == "float64" for _, case in quick) >= 25
    assert any(leg.layout.cols == leg.model.ffn_size for leg in legs)


@pytest.fixture(scope="module")
def many() -> list[RunConfig]:
    return [leg for seed in range(400) for leg in case_of(seed).legs]


@pytest.mark.full
def test_every_value_of_every_setting_is_drawn(many: list[RunConfig]) -> None:
    """Values must also survive the changes that make runs valid."""
    missing = []
    for key, field in Chooser("any").keys.items():
        section, name = key.split(".")
        if key == "model.rope_scaling":
            kinds = {run.model.rope_scaling and run.model.rope_scaling.kind for run in many}
            assert kinds == {None, "linear", "llama3", "yarn"}
            continue
        seen = {getattr(getattr(run, section), name) for run in many}
        # values that are resolved to something else
        resolved = {0, "auto"} if section == "model" else set()
        values = {tuple(v) if isinstance(v, list) else v for v in values_of(key, field)}
        missing += [(key, v) for v in values - seen - resolved]
    assert not missing


def test_a_seed_always_gives_the_same_case(quick: list[tuple[int, Case]]) -> None:
    for seed in (FIRST + 3, FIRST + 7, FIRST + 31):
        case = dict(quick)[seed]
        assert case_of(seed).text() == case.text()
        assert Case.read(case.text()) == case
        assert "\n" not in case.text()
        assert not any(refusals(sections) for sections in (case.run, case.after))


def test_what_is_drawn_and_what_is_not_are_settings() -> None:
    """A renamed setting must be noticed."""
    for key in (*drawing.FIXED, *drawing.NUMBERS, *drawing.WORDS):
        section, name = key.split(".")
        assert name in drawing.SECTIONS[section].model_fields, key


TINY = {"n_layers": 1, "hidden_size": 4, "n_heads": 2, "vocab_size": 7, "max_seq_len": 3}
SMALL = Case(
    run={"model": TINY, "train": {"global_batch": 2, "dtype": "float64"}},
    batch={"padded": 0.0, "ignored": 0.0},
    steps=2,
    stop=0,
    moved={},
)


def with_a_faster_reference(text: str, folder: str) -> tuple[ranks.Found, ranks.Found]:
    """Return the results as they are, and with one device's learning rate higher by a millionth."""
    found = ranks.train(text, 0, folder)

    def faster(train: TrainConfig) -> TrainConfig:
        settings = without_methods(train)
        return settings.model_copy(update={"lr": settings.lr * (1 + 1e-6)})

    with patch.object(ranks, "without_methods", faster):
        other = replace(Case.read(text), steps=3)  # this case is not cached
        return found, ranks.train(other.text(), 0, folder)


def test_another_step_than_one_devices_is_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    """Parameters differ, and everything before the first update does not."""
    ((found, other),) = pool.run(1, with_a_faster_reference, SMALL.text(), str(tmp_path))
    limit = ranks.LIMIT
    assert all(value <= limit[name] for name, value in found.items())
    assert other["parameter"] > limit["parameter"]
    assert other["gradient"] <= limit["gradient"]
