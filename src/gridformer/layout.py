"""From a layout to a named device mesh, and all that must hold before one is built."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, any_of, divisors
from gridformer.errors import ConfigError
from gridformer.nodes import MESH_AXES, NodeBlock, rank_grid, sizes_of, sub_grids
from gridformer.nodes import problems as node_problems

if TYPE_CHECKING:
    from torch import Tensor

    from gridformer.comm import Axes


INNER = "model.n_heads x model.head_dim"  # all heads side by side
Change = dict[str, Any]  # of a layout


def build_axes(layout: LayoutConfig, device_type: str, block: NodeBlock | None = None) -> Axes:
    """The axes of this process. Needs a process group of layout.n_processes ranks, if more than 1.

    Ranks are numbered with `col` innermost and `pp` outermost (Narayanan et al. 2021), within a
    node's block if there is one, and the blocks likewise; sub-grids as `layout.order` says.
    """
    from gridformer.comm import Axes

    if layout.n_processes == 1:
        return Axes(device_type=device_type)
    ranks, branched = mesh_ranks(layout, block), layout.scheme == "subgraph"
    names = ("pp", "dp", "branch") if branched else MESH_AXES
    axes = Axes.of(ranks, names, device_type)
    if not branched:
        return replace(axes, batch=axes.row, alike=axes.col)
    if layout.common == "all":
        return replace(axes, batch=axes.branch)
    return replace(axes, alike=axes.branch)


def mesh_ranks(layout: LayoutConfig, block: NodeBlock | None = None) -> Tensor:
    """The rank at each place of a layout's mesh, int64: [pp, dp, row, col], or [pp, dp, branch]."""
    if layout.scheme == "subgraph":
        return sub_grids(layout.pp, layout.dp, layout.branches, layout.order)
    return rank_grid(sizes_of(layout), block)


def check(run: RunConfig) -> None:
    """Raise ConfigError with every reason why this model and batch cannot run under this layout.

    Each names values that would work, and taking one of them makes no new problem.
    """
    problems = _shape_problems(run)
    for axis in ("rows", "cols", "branches"):
        size = getattr(run.layout, axis)
        for key, value in _cut_over(axis, run).items():
            if value % size:
                problems.append(
                    f"{key}={value} does not divide over layout.{axis}={size}: use "
                    f"{_remedies(key, value, axis, run)}"
                )
    problems += _batch_problems(run)
    problems += node_problems(run.layout)
    problems += _length_problems(run)
    if problems:
        raise ConfigError(problems)


def _cut_over(axis: str, run: RunConfig) -> dict[str, int]:
    """What a scheme cuts over an axis of the grid: each of these must divide by its size."""
    model = run.model
    cut: dict[str, int] = {}
    if axis == "branches" and run.layout.scheme == "subgraph":
        cut |= {"model.n_heads": model.n_heads}
        if run.layout.feed_forward == "branched":
            cut |= {"model.ffn_size": model.ffn_size}
    if axis == "cols" and run.layout.scheme in ("megatron", "optimus"):
        cut |= {"model.n_heads": model.n_heads, "model.ffn_size": model.ffn_size}
    if axis in ("rows", "cols") and run.layout.scheme == "optimus":
        cut |= {"model.ffn_size": model.ffn_size, "model.hidden_size": model.hidden_size}
        if axis == "rows" and model.head_dim:
            cut |= {INNER: model.n_heads * model.head_width}
    if axis == "cols" and _cuts_sequence(run):
        cut |= {"data.seq_len": run.seq_len}
        if model.two_stacks:
            cut |= {"data.source_len": run.source_len}
    if axis == "cols" and run.layout.scheme == "megatron" and _has_pooler(model):
        cut |= {"model.hidden_size": model.hidden_size}
    return cut


def _has_pooler(model: ModelConfig) -> bool:
    return model.n_labels > 0 or (model.family == "bert" and model.sentence_pair)


def _remedies(key: str, value: int, axis: str, run: RunConfig) -> str:
    """Sizes of the axis, and values of the key, that fit everything else as it is."""
    layout, model = run.layout, run.model
    over_axis = list(_cut_over(axis, run).values())
    replica_batch = run.train.global_batch // (layout.dp * layout.micro_batches)
    cuts_samples = axis == "rows" or (axis == "branches" and layout.common == "all")
    if cuts_samples and replica_batch:
        over_axis.append(replica_batch)
    largest = max(16, 2 * getattr(layout, axis))
    fitting = [size for size in divisors(math.gcd(*over_axis)) if size <= largest]
    alone = [size for size in fitting if not _beside(layout, **{axis: size})]
    if alone:
        remedies = [f"layout.{axis}={any_of(alone)}"]
    else:
        beside = _beside(layout, **{axis: fitting[-1]})
        remedies = [f"layout.{axis}={fitting[-1]}{beside}"]

    across = layout.branches if layout.scheme == "subgraph" else layout.cols
    rows = layout.rows if layout.scheme == "optimus" else 1
    grid = math.lcm(rows, across)
    if key == "model.n_heads" and model.head_dim:  # all heads' width divides over rows, too
        factor = math.lcm(across, rows // math.gcd(rows, model.head_dim))
        nearest = _multiples_around(value, factor)
    elif key == "model.n_heads":  # must also divide hidden_size
        heads = [n for n in divisors(model.hidden_size) if n % across == 0]
        nearest = sorted(sorted(heads, key=lambda n: abs(n - value))[:2])
    elif key == "model.hidden_size":
        nearest = _multiples_around(value, math.lcm(grid, model.n_heads))
    elif key == "model.ffn_size":
        nearest = _multiples_around(value, grid)
    elif key == INNER:  # two values, of which either may change
        nearest = []
    else:
        longest = math.inf if model.two_stacks else model.max_seq_len
        nearest = [s for s in _multiples_around(value, grid) if s <= longest]
    if nearest:
        remedies.append(f"{key}={any_of(nearest)}")
    return ", or ".join(remedies)


def _beside(layout: LayoutConfig, **changes: Any) -> str:
    """What else to set so that nodes and replicas still fit with these changes: the end of a
    remedy."""
    changed, beside = layout.model_copy(update=changes), ""
    if node_problems(changed) and not node_problems(layout):
        beside += " and devices_per_node=0"
    if _replica_problems(changed) and not _replica_problems(layout):
        beside += " and dp_mode=replicate"
    return beside


def _multiples_around(value: int, factor: int) -> list[int]:
    below = value // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple]


def _cuts_sequence(run: RunConfig) -> bool:
    return run.layout.scheme == "megatron" and run.layout.sequence_parallel


def _shape_problems(run: RunConfig) -> list[str]:
    layout, problems = run.layout, []
    if layout.scheme == "single" and (layout.rows, layout.cols) != (1, 1):
        problems.append(
            f"layout.scheme=single is a 1x1 grid, not {layout.rows}x{layout.cols}: use rows=1 and "
            f"cols=1{_beside(layout, rows=1, cols=1)} (dp adds replicas), or scheme=megatron or "
            "scheme=optimus"
        )
    problems += _sub_graph_problems(layout)
    if layout.scheme == "megatron" and layout.rows != 1:
        widths = divisors(math.gcd(*_cut_over("cols", run).values()))
        width = max(width for width in widths if width <= layout.rows * layout.cols)
        problems.append(
            f"layout.rows={layout.rows}: megatron cuts one way; use rows=1 and cols={width}"
            f"{_beside(layout, rows=1, cols=width)}, or scheme=optimus"
        )
    if layout.sequence_parallel and layout.scheme != "megatron":
        problems.append(
            f"layout.sequence_parallel belongs to scheme=megatron, not {layout.scheme}: use "
            "sequence_parallel=false"
        )
    problems += _replica_problems(layout) + _schedule_problems(layout)
    return problems + _pipeline_problems(run)


def _replica_problems(layout: LayoutConfig) -> list[str]:
    common = layout.scheme == "subgraph" and layout.common == "all"  # layers on all sub-grids
    if layout.dp_mode == "replicate" or layout.dp * (layout.branches if common else 1) > 1:
        return []
    return [
        f"layout.dp_mode={layout.dp_mode} shares out what replicas hold, and layout.dp=1 is one "
        "replica: use layout.dp_mode=replicate"
    ]


def _sub_graph_problems(layout: LayoutConfig) -> list[str]:
    problems = []
    if layout.scheme != "subgraph":
        plain = LayoutConfig()
        for key in ("branches", "common", "attention", "feed_forward", "order"):
            if getattr(layout, key) != getattr(plain, key):
                problems.append(
                    f"layout.{key}={getattr(layout, key)} belongs to scheme=subgraph, not "
                    f"{layout.scheme}: use layout.{key}={getattr(plain, key)}"
                    + (_beside(layout, branches=1) if key == "branches" else "")
                )
    elif (layout.rows, layout.cols) != (1, 1):
        problems.append(
            f"layout.scheme=subgraph has branches in the place of a grid, not "
            f"{layout.rows}x{layout.cols}: use rows=1 and cols=1"
            f"{_beside(layout, rows=1, cols=1)}, or scheme=optimus"
        )
    return problems


def _schedule_problems(layout: LayoutConfig) -> list[str]:
    """Wishes about products that a scheme does not have; `auto` fits every scheme."""
    problems = []
    for key in ("schedule", "stationary"):
        wish = getattr(layout, key)
        if wish != "auto" and layout.scheme != "optimus":
            problems.append(
                f"layout.{key}={wish} belongs to scheme=optimus, not {layout.scheme}: use "
                f"layout.{key}=auto"
            )
    wish, gathers = layout.keep_gathered, {"auto", "none"}
    if (layout.scheme == "megatron" and layout.sequence_parallel) or layout.scheme == "subgraph":
        gathers |= {"inputs"}
    if layout.scheme == "optimus" and layout.schedule in ("auto", "gather"):
        gathers |= {"inputs", "weights", "all"}
    if wish not in gathers:
        name: str = layout.scheme
        if layout.scheme == "megatron":
            name += ", sequence parallel" if layout.sequence_parallel else ""
        if layout.scheme == "optimus":
            name += f" with schedule={layout.schedule}"
        problems.append(
            f"layout.keep_gathered={wish}: {name} gathers no such thing: use "
            f"layout.keep_gathered={any_of(sorted(gathers))}"
        )
    return problems


def _pipeline_problems(run: RunConfig) -> list[str]:
    """What stages, their order and micro-batches ask of each other. No remedy breaks another."""
    layout, n_links = run.layout, run.model.n_links
    m, k = layout.micro_batches, layout.stages_per_rank
    broken = _broken_rules(layout, n_links)
    divides = not _batch_problems(run)
    problems = []
    for rule in sorted(broken):
        offers: list[str] = []
        for choice in _pipeline_offers(rule, layout, run):
            for change in choice:
                changed = layout.model_copy(update=change)
                after = run.model_copy(update={"layout": changed})
                if not _broken_rules(changed, n_links) <= broken - {rule}:
                    continue
                if divides and _batch_problems(after):
                    continue
                words = " and ".join(f"{key}={value}" for key, value in change.items())
                beside = _beside(layout, **change) if "pp" in change else ""
                offers.append(f"layout.{words}{beside}")
                break
        what = {
            "stages": f"layout.pp={layout.pp} x layout.stages_per_rank={k}: more stages than the "
            f"model has layers, embeddings and heads to cut between ({n_links})",
            "no pipeline": f"layout.stages_per_rank={k} belongs to pipelines, and layout.pp=1 has "
            "none",
            "no order": f"layout.pipeline={layout.pipeline} belongs to pipelines, and layout.pp=1 "
            "has none",
            "one stage": f"layout.pipeline={layout.pipeline} has one stage a rank, not "
            f"layout.stages_per_rank={k}",
            "several stages": "layout.pipeline=interleaved takes turns with several stages a rank, "
            "not layout.stages_per_rank=1",
            "1f1b": f"layout.pipeline=1f1b fills layout.pp={layout.pp} stages with as many "
            f"micro-batches, and layout.micro_batches={m} are fewer",
            "rounds": f"layout.micro_batches={m} does not make equal rounds of at least "
            f"layout.pp={layout.pp} for interleaved stages",
        }[rule]
        problems.append(f"{what}: use {', or '.join(offers)}")
    return problems


def _broken_rules(layout: LayoutConfig, n_links: int) -> set[str]:
    m, k, pp, order = layout.micro_batches, layout.stages_per_rank, layout.pp, layout.pipeline
    if pp == 1:
        rules = {"no pipeline": k > 1, "no order": order != "auto"}
    else:
        rules = {
            "stages": pp * k > n_links,
            "one stage": k > 1 and order in ("gpipe", "1f1b"),
            "several stages": k == 1 and order == "interleaved",
            "1f1b": k == 1 and order == "1f1b" and m < pp,
            "rounds": k > 1 and order in ("auto", "interleaved") and m % max(1, m // pp) != 0,
        }
    return {rule for rule, broken in rules.items() if broken}


def _pipeline_offers(rule: str, layout: LayoutConfig, run: RunConfig) -> list[list[Change]]:
    """Ways to mend a rule, each a list of changes of which the first that fits is offered."""
    m, k, pp = layout.micro_batches, layout.stages_per_rank, layout.pp
    fewest: Change = {"stages_per_rank": 1, "pipeline": "auto"}
    batches = range(1, max(2 * pp, 2 * m) + 1)
    nearest: list[Change] = [
        {"micro_batches": count} for count in sorted(batches, key=lambda n: abs(n - m))
    ]
    match rule:
        case "stages":
            ranks: list[Change] = [
                {"pp": n} for n in range(min(pp - 1, run.model.n_links // k), 0, -1)
            ]
            each: list[Change] = [{"stages_per_rank": n} for n in range(k - 1, 0, -1)]
            return [[*ranks, {"pp": 1, **fewest}], [*each, *[fewest] * (k > 1)]]
        case "no pipeline":
            return [[{"stages_per_rank": 1}]]
        case "no order":
            return [[{"pipeline": "auto"}]]
        case "one stage":
            return [[{"pipeline": "auto"}, fewest], [{"stages_per_rank": 1}]]
        case "several stages":
            return [[{"pipeline": "auto"}], [{"stages_per_rank": 2}]]
        case "1f1b":
            return [[{"pipeline": "auto"}], nearest]
        case _:
            return [nearest, [{"stages_per_rank": 1}, fewest]]


def _batch_problems(run: RunConfig) -> list[str]:
    layout, train = run.layout, run.train
    rows = layout.rows if layout.scheme == "optimus" else 1
    branches = 1
    if layout.scheme == "subgraph" and layout.common == "all":
        branches = layout.branches
    parts = layout.dp * rows * branches * layout.micro_batches
    if train.global_batch % parts == 0:
        return []
    factors = {
        "layout.dp": layout.dp,
        "layout.rows": rows,
        "layout.branches": branches,
        "layout.micro_batches": layout.micro_batches,
    }
    names = " x ".join(f"{name} ({size})" for name, size in factors.items() if size > 1)
    return [
        f"train.global_batch={train.global_batch} does not divide over {names}: use "
        f"train.global_batch={any_of(_multiples_around(train.global_batch, parts))}"
    ]


def _length_problems(run: RunConfig) -> list[str]:
    longest = run.model.max_seq_len
    if run.seq_len <= longest or run.model.two_stacks:  # whose positions are no table
        return []
    fitting = longest // run.layout.cols * run.layout.cols if _cuts_sequence(run) else longest
    shorter = f"data.seq_len={fitting}, or " if fitting else ""
    return [
        f"data.seq_len={run.seq_len} is longer than model.max_seq_len={longest}: use {shorter}"
        f"model.max_seq_len={run.seq_len}"
    ]
