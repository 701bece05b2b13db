"""From a layout to a named device mesh, and all that must hold before one is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig, any_of, divisors
from gridformer.parallel.offers import Broken, Changes, Problem, Way, with_offers
from gridformer.parallel.registry import SPECS, describe, spec_of
from gridformer.parallel.scheme import HEADS_WIDTH, LayoutAxis
from gridformer.utils.errors import ConfigError
from gridformer.utils.units import as_yaml

if TYPE_CHECKING:
    pass

AXES: tuple[LayoutAxis, ...] = ("rows", "cols", "branches")


def check(run: RunConfig) -> None:
    """Raise ConfigError with every reason why this model and batch cannot run under this layout."""
    found = problems(run)
    if found:
        raise ConfigError([str(problem) for problem in found])


def problems(run: RunConfig) -> list[Problem]:
    """Every reason why a run cannot be, each with changes that mend it and break nothing else."""
    return with_offers(run, broken_rules)


def broken_rules(run: RunConfig) -> list[Broken]:
    """Every rule that a run breaks, with changes that may mend it."""
    return [broken for rule in _RULES for broken in rule(run)]


# --------------------------------------------------------------------------- the layout by itself


def _axes(run: RunConfig) -> Iterator[Broken]:
    layout, spec = run.layout, spec_of(run.layout)
    wrong = [axis for axis in AXES if axis not in spec.axes and getattr(layout, axis) > 1]
    if not wrong:
        return
    alone: Changes = {f"layout.{axis}": 1 for axis in wrong}
    ways = [Way(lambda: [alone])]
    if len(spec.axes) == 1:  # as many devices
        (own,) = spec.axes
        devices = layout.rows * layout.cols * layout.branches
        sizes = [n for n in range(devices, 0, -1) if n != getattr(layout, own)]
        ways.insert(0, Way(lambda: [alone | {f"layout.{own}": n} for n in sizes]))
    others = [
        {"layout.scheme": other.name}
        | {f"layout.{axis}": 1 for axis in AXES if _idle(layout, axis, other.axes)}
        for other in SPECS.values()
        if {*wrong} <= {*other.axes}
    ]
    ways.append(Way(lambda: others, at_most=len(SPECS)))
    over = " and ".join(f"layout.{axis}" for axis in spec.axes) or "nothing"
    sizes_said = " and ".join(f"layout.{axis}={getattr(layout, axis)}" for axis in wrong)
    text = f"layout.scheme={spec.name} cuts over {over}, and not over {sizes_said}"
    yield Broken("axes", text, ways)


def _idle(layout: LayoutConfig, axis: LayoutAxis, axes: Iterable[LayoutAxis]) -> bool:
    return axis not in axes and getattr(layout, axis) > 1


def _keys(run: RunConfig) -> Iterator[Broken]:
    """Keys that mean something under other schemes alone; `auto` fits every scheme."""
    layout, spec, plain = run.layout, spec_of(run.layout), LayoutConfig()
    for key in dict.fromkeys(key for other in SPECS.values() for key in other.keys):
        value, default = getattr(layout, key), getattr(plain, key)
        if key in spec.keys or value == default:
            continue
        owners = any_of(other.name for other in SPECS.values() if key in other.keys)
        text = f"layout.{key}={as_yaml(value)} belongs to scheme={owners}, not {spec.name}"
        yield Broken(f"key {key}", text, [_one(f"layout.{key}", [default])])


def _kept(run: RunConfig) -> Iterator[Broken]:
    layout = run.layout
    gathers = {"auto", *spec_of(layout).gathers(layout)}
    if layout.keep_gathered in gathers:
        return
    name = spec_of(layout).describe(layout)
    if layout.schedule != "auto":
        name += f" with schedule={layout.schedule}"
    text = f"layout.keep_gathered={layout.keep_gathered}: {name} gathers no such thing"
    yield Broken("keep_gathered", text, [_one("layout.keep_gathered", sorted(gathers), 4)])


def _replicas(run: RunConfig) -> Iterator[Broken]:
    layout = run.layout
    if layout.dp_mode == "replicate" or spec_of(layout).replicas(layout) > 1:
        return
    text = (
        f"layout.dp_mode={layout.dp_mode} shares out what replicas hold, and layout.dp=1 is one "
        "replica"
    )
    yield Broken("dp_mode", text, [_one("layout.dp_mode", ["replicate"])])


def _nodes(run: RunConfig) -> Iterator[Broken]:
    """A block exists for every number that divides the devices: give each axis what it shares with
    the number, one axis after the other. Fewer devices than one node holds are no problem."""
    layout = run.layout
    n, k = layout.n_processes, layout.devices_per_node
    if k == 0 or k >= n or n % k == 0:
        return
    grid = " x ".join(spec_of(layout).axes) or "1"
    text = f"layout.devices_per_node={k} does not divide {grid} x dp x pp={n}"
    nearest = sorted(divisors(n), key=lambda d: abs(d - k))
    yield Broken("devices_per_node", text, [_one("layout.devices_per_node", nearest, 3)])


# --------------------------------------------------------------------------- pipelines


def _pipeline(run: RunConfig) -> Iterator[Broken]:
    """What stages, their order and micro-batches ask of each other."""
    layout, n_links = run.layout, run.model.n_links
    m, k, pp, order = (
        layout.micro_batches,
        layout.stages_per_rank,
        layout.pp,
        layout.pipeline,
    )
    fewest: Changes = {"layout.stages_per_rank": 1, "layout.pipeline": "auto"}
    no_order, one_stage = _one("layout.pipeline", ["auto"]), _one("layout.stages_per_rank", [1])
    most = max(2 * pp, 2 * m)
    if pp == 1:
        if k > 1:
            text = f"layout.stages_per_rank={k} belongs to pipelines, and layout.pp=1 has none"
            yield Broken("no pipeline", text, [one_stage])
        if order != "auto":
            text = f"layout.pipeline={order} belongs to pipelines, and layout.pp=1 has none"
            yield Broken("no order", text, [no_order])
        return
    if pp * k > n_links:
        ranks: list[Changes] = [{"layout.pp": n} for n in range(min(pp - 1, n_links // k), 0, -1)]
        text = (
            f"layout.pp={pp} x layout.stages_per_rank={k}: more stages than the model has layers, "
            f"embeddings and heads to cut between ({n_links})"
        )
        ways = [
            Way(lambda: [*ranks, {"layout.pp": 1, **fewest}]),
            _one("layout.stages_per_rank", range(k - 1, 0, -1)),
        ]
        yield Broken("stages", text, ways)
    if k > 1 and order in ("gpipe", "1f1b"):
        text = f"layout.pipeline={order} has one stage a rank, not layout.stages_per_rank={k}"
        in_turns = Way(lambda: [{"layout.pipeline": "auto"}, fewest])
        yield Broken("one stage", text, [in_turns, one_stage])
    if k == 1 and order == "interleaved":
        text = (
            "layout.pipeline=interleaved takes turns with several stages a rank, not "
            "layout.stages_per_rank=1"
        )
        yield Broken("several stages", text, [no_order, _one("layout.stages_per_rank", [2])])
    if k == 1 and order == "1f1b" and m < pp:
        text = (
            f"layout.pipeline=1f1b fills layout.pp={pp} stages with as many micro-batches, and "
            f"layout.micro_batches={m} are fewer"
        )
        yield Broken("1f1b", text, [no_order, _one("layout.micro_batches", range(pp, most + 1))])
    if k > 1 and order in ("auto", "interleaved") and m % max(1, m // pp) != 0:
        text = (
            f"layout.micro_batches={m} does not make equal rounds of at least layout.pp={pp} for "
            "interleaved stages"
        )
        equal = _one("layout.micro_batches", sorted(range(1, most + 1), key=lambda n: abs(n - m)))
        yield Broken("rounds", text, [equal, Way(lambda: [{"layout.stages_per_rank": 1}, fewest])])


# --------------------------------------------------------------------------- model and batch


def _divides(run: RunConfig) -> Iterator[Broken]:
    for axis, cut in spec_of(run.layout).cuts(run).items():
        size = getattr(run.layout, axis)
        for key, value in cut.items():
            if value % size:
                text = f"{key}={value} does not divide over layout.{axis}={size}"
                yield Broken(f"{axis} cuts {key}", text, _dividing(run, axis, key, value))


def _dividing(run: RunConfig, axis: LayoutAxis, key: str, value: int) -> list[Way]:
    """Sizes of the axis that divide what it cuts, and values near that divide over all axes."""
    layout, model = run.layout, run.model
    cut = spec_of(layout).cuts(run)[axis]
    largest = max(16, 2 * getattr(layout, axis))
    sizes = [n for n in divisors(math.gcd(*cut.values())) if n <= largest]
    ways = [_one(f"layout.{axis}", sizes, len(sizes))]
    over = partial(_pieces, run)
    if key in ("model.n_heads", HEADS_WIDTH) and model.head_dim:
        width = over(HEADS_WIDTH)  # of all heads, which head_dim is a part of
        factor = math.lcm(over("model.n_heads"), width // math.gcd(width, model.head_dim))
        ways.append(_one("model.n_heads", _multiples_near(model.n_heads, factor), 2))
        if key == HEADS_WIDTH:
            factor = width // math.gcd(width, model.n_heads)
            ways.append(_one("model.head_dim", _multiples_near(model.head_dim, factor), 2))
    elif key == "model.n_heads":  # which must also divide hidden_size
        heads = [n for n in divisors(model.hidden_size) if n % over(key) == 0]
        ways.append(_one(key, sorted(heads, key=lambda n: abs(n - value)), 2))
    elif key == "model.hidden_size":
        factor = over(key) if model.head_dim else math.lcm(over(key), model.n_heads)
        ways.append(_one(key, _multiples_near(value, factor), 2))
    else:
        ways.append(_one(key, _multiples_near(value, over(key)), 2))
    return ways


def _pieces(run: RunConfig, key: str) -> int:
    """What the value of a key must be a multiple of, to divide over every axis that cuts it."""
    cuts = spec_of(run.layout).cuts(run)
    return math.lcm(*(getattr(run.layout, axis) for axis, cut in cuts.items() if key in cut))


def _batch(run: RunConfig) -> Iterator[Broken]:
    layout, batch = run.layout, run.train.global_batch
    axis = spec_of(layout).samples_over(layout)
    factors = {"layout.dp": layout.dp}
    if axis:
        factors |= {f"layout.{axis}": getattr(layout, axis)}
    factors |= {"layout.micro_batches": layout.micro_batches}
    parts = math.prod(factors.values())
    if batch % parts == 0:
        return
    names = " x ".join(f"{name} ({size})" for name, size in factors.items() if size > 1)
    text = f"train.global_batch={batch} does not divide over {names}"
    yield Broken("batch", text, [_one("train.global_batch", _multiples_near(batch, parts), 2)])


def _length(run: RunConfig) -> Iterator[Broken]:
    longest = run.model.max_seq_len
    if run.seq_len <= longest or run.model.two_stacks:  # whose positions are no table
        return
    text = f"data.seq_len={run.seq_len} is longer than model.max_seq_len={longest}"
    step = _pieces(run, "data.seq_len")
    shorter = _one("data.seq_len", range(longest // step * step, 0, -step))
    yield Broken("length", text, [shorter, _one("model.max_seq_len", [run.seq_len])])


# --------------------------------------------------------------------------- torch.compile


def _compile(run: RunConfig) -> Iterator[Broken]:
    """What `train.compile` asks of a layout; gridformer.train.compile says what of a machine."""
    if not run.train.compile:
        return
    layout, off = run.layout, _one("train.compile", [False])
    devices = layout.rows * layout.cols * layout.branches
    if devices > 1:
        text = (
            "train.compile=true belongs to layouts whose blocks do not communicate, and "
            f"{describe(layout)} cuts each block over {devices} devices"
        )
        ones: Changes = {f"layout.{a}": 1 for a in AXES if getattr(layout, a) > 1}
        replicas = ones | {"layout.scheme": "single", "layout.dp": layout.dp * devices}
        yield Broken("compiled blocks", text, [Way(lambda: [replicas, ones]), off])
    if layout.dp_mode == "fsdp":
        text = (
            "train.compile=true compiles blocks with parameters that stay in memory, and "
            "layout.dp_mode=fsdp gathers them block by block"
        )
        modes = _one("layout.dp_mode", ["zero1", "replicate"], 2)
        yield Broken("compiled parameters", text, [modes, off])


_RULES: tuple[Callable[[RunConfig], Iterator[Broken]], ...] = (
    _axes,
    _keys,
    _kept,
    _replicas,
    _pipeline,
    _divides,
    _batch,
    _nodes,
    _length,
    _compile,
)


def _one(key: str, values: Iterable[Any], at_most: int = 1) -> Way:
    """A way that changes one key."""
    return Way(lambda: ({key: value} for value in values), at_most)


def _multiples_near(value: int, factor: int) -> list[int]:
    """Multiples of `factor`, the nearest to `value` first."""
    below = value // factor * factor
    found = [n for i in range(20) for n in (below - i * factor, below + (i + 1) * factor) if n > 0]
    return sorted(found, key=lambda n: abs(n - value))
