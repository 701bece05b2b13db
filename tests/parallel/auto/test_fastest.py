"""Choices by the seconds of a cluster: valid, within memory, never slower, other on slow links."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gridformer.cluster import file as cluster_file
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, parse_run, shipped_model
from gridformer.config.reading import configs_dir
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.decisions import decide_run, print_decisions
from gridformer.parallel.auto.fastest import GAIN, max_chunks
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError

SLOW, FAST = "frontera-rtx5000", "dgx-h100"
GRID = {"scheme": "optimus", "rows": 4, "cols": 4}


def run_of(layout: dict[str, Any], batch: int = 64, **model: Any) -> RunConfig:
    run = RunConfig.model_validate(
        {
            "model": {**shipped_model("gpt2-774m"), "vocab_size": 50304, "n_heads": 16, **model},
            "layout": layout,
            "data": {"path": "somewhere"},
            "train": {"global_batch": batch, "dtype": "float16", "device": "cuda"},
        }
    )
    check_layout(run)
    return run


def ways(choices: Choices) -> dict[str, tuple[Any, ...]]:
    return {
        name: (c.stationary, c.schedule, c.n_chunks, c.keep_input, c.keep_weight)
        for name, c in choices.products.items()
    }


def test_slow_links_choose_otherwise_than_fast_ones() -> None:
    slow, fast, rules = (
        decide_run(run_of({**GRID, "cluster": name})).choices for name in (SLOW, FAST, "")
    )
    assert ways(slow) != ways(fast)
    assert max(choice.n_chunks for choice in slow.products.values()) > 1  # hides what travels
    assert not rules.timed
    for choices in (slow, fast):
        for timed in choices.timed.values():
            assert timed.seconds <= timed.by_rules_s
            assert timed.by_rules == rules[timed.by_rules.product.name]


def test_explain_shows_what_seconds_and_what_volumes_choose() -> None:
    run = run_of({**GRID, "cluster": SLOW})
    decisions = decide_run(run)
    console = Console(width=100, record=True, file=io.StringIO())
    print_decisions(run, decisions, console)
    said = console.export_text()
    assert re.search(r"product +by seconds +ms +by volumes +ms", said)
    rows = [line for line in said.splitlines() if re.match(r"(qkv|down) .*gather.* \d", line)]
    assert any("the same" in row or "gather" in row.split("gather", 1)[1] for row in rows)
    total = sum(timed.seconds for timed in decisions.choices.timed.values())
    assert f"take {1e3 * total:.4g} ms of a step on {SLOW}" in " ".join(said.split())


def test_what_the_layout_sets_is_not_decided() -> None:
    fixed = {"schedule": "pipelined", "stationary": "output", "keep_gathered": "none"}
    choices = decide_run(run_of({**GRID, **fixed, "cluster": SLOW})).choices
    assert {choice[:2] for choice in ways(choices).values()} == {("output", "pipelined")}
    kept = decide_run(run_of({**GRID, "keep_gathered": "weights", "cluster": SLOW})).choices
    assert {choice[3:] for choice in ways(kept).values()} == {(False, True)}


def test_operands_are_kept_only_if_they_fit() -> None:
    run = run_of({**GRID, "cluster": SLOW}, batch=16)
    assert any(choice.keep_input for choice in decide_run(run).choices.products.values())
    train = run.train.model_copy(update={"memory_gib": 0.1})
    little = decide_run(run.model_copy(update={"train": train})).choices
    assert not any(choice.keep_input for choice in little.products.values())


def test_a_file_with_problems_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("device: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read: .*levels: is missing"):
        run_of({**GRID, "cluster": str(path)})


def test_placement_and_choices_agree() -> None:
    """The seconds are those of what nodes hold in the end."""
    run = run_of({**GRID, "devices_per_node": 4, "cluster": SLOW})
    decisions = decide_run(run)
    again = decide(run.model, run.layout, decisions.choices.work, decisions.block)
    assert ways(again) == ways(decisions.choices)


def test_panels_count_what_is_summed_up_panel_by_panel() -> None:
    """On fast links their sums in float32 take longer than the messages that they hide."""
    layout = {"scheme": "optimus", "rows": 4, "cols": 2, "dp": 4, "cluster": FAST}
    sections = {"model": "megatron-8.3b", "data": {"path": "somewhere"}, "layout": layout}
    run = parse_run(sections, ["train.global_batch=256", "train.dtype=bfloat16"])
    assert {choice.schedule for choice in decide_run(run).choices.products.values()} == {"gather"}


def test_chunks_of_tokens_hide_messages_while_the_host_keeps_ahead() -> None:
    """Those of a long sequence take longer than the launches that hide them."""
    layout = {"scheme": "megatron", "cols": 8, "sequence_parallel": True, "cluster": "gb200-nvl72"}
    sections = {"model": "llama-3.1-8b", "data": {"path": "somewhere"}, "layout": layout}
    more = ["data.seq_len=65536", "train.global_batch=1", "train.dtype=bfloat16"]
    chosen = decide_run(parse_run(sections, more)).choices
    assert min(chosen[name].n_chunks for name in ("up", "down")) > 1
    assert chosen["up"].whole_backward
    short = decide_run(parse_run(sections, [*more, "data.seq_len=1024"])).choices
    assert max(choice.n_chunks for choice in short.products.values()) == 1


CLUSTER = yaml.safe_load((configs_dir() / "clusters" / f"{SLOW}.yaml").read_text(encoding="utf-8"))


@settings(max_examples=25, deadline=None)
@given(
    inner=st.floats(0.1, 1000),
    outer=st.floats(0.01, 100),
    latency=st.floats(0.1, 1000),
    memory=st.floats(1, 200),
    node=st.sampled_from([1, 2, 4, 8]),
    grid=st.sampled_from([(2, 2), (1, 4), (4, 1), (4, 2), (4, 4)]),
    scheme=st.sampled_from(["optimus", "megatron_2d"]),
    batch=st.sampled_from([4, 16, 256]),
)
def test_choices_on_any_cluster_are_valid_and_equal_on_all_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    inner: float,
    outer: float,
    latency: float,
    memory: float,
    node: int,
    grid: tuple[int, int],
    scheme: str,
    batch: int,
) -> None:
    raw: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CLUSTER))
    for level, gbps in zip(raw["levels"], (inner, outer)):
        level["bandwidth_gbps"]["value"], level["latency_us"]["value"] = gbps, latency
    raw["levels"][0]["size"], raw["levels"][1]["shared_by"] = node, node
    raw["device"]["memory_gib"]["value"] = memory
    path = tmp_path_factory.mktemp("cluster") / "any.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    layout = {"scheme": scheme, "rows": grid[0], "cols": grid[1], "cluster": str(path)}
    run = run_of(layout, batch)
    choices = decide_run(run).choices
    for choice in choices.products.values():
        gathers = choice.schedule == "gather"
        assert 1 <= choice.n_chunks <= max(1, max_chunks(choices, run.layout, choice.product))
        assert choice.n_chunks == 1 or (gathers and not choice.keep_input)
        assert gathers or not (choice.keep_input or choice.keep_weight)
        assert not (choice.keep_input and choice.stationary == "input")
    # An operand that saves less than that is not kept, even if the rules keep it.
    assert all(GAIN * timed.seconds <= timed.by_rules_s for timed in choices.timed.values())
    # Another rank reads the file by itself, and knows nothing of this one.
    cluster_file._read.cache_clear()
    assert load_cluster(path).device.memory_gib.value == memory
    assert ways(decide_run(run).choices) == ways(choices)
