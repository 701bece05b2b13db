"""The rules that a run's layout must satisfy before anything is built, with suggested changes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

from gridformer.cluster.file import cluster_names, cluster_path, load_cluster
from gridformer.config import LayoutConfig, RunConfig, any_of, divisors
from gridformer.parallel.fixes import Changes, Fix, Refusal, Violation, with_fixes
from gridformer.parallel.registry import spec_of, specs
from gridformer.parallel.scheme import HEADS_WIDTH, MESH_AXIS, LayoutAxis, sequence_cuts
from gridformer.utils.errors import ConfigError
from gridformer.utils.units import format_value

AXES: tuple[LayoutAxis, ...] = ("rows", "cols", "branches")


def check_layout(run: RunConfig) -> RunConfig:
    """Raises an error if a run's model and batch do not fit its layout.

    Returns:
        The run; see `with_rows_over`.

    Raises:
        ConfigError: It lists every broken rule with changes that work.
    """
    refusals = problems(run)
    if refusals:
        raise ConfigError(*(str(problem) for problem in refusals))
    return with_rows_over(run)


def with_rows_over(run: RunConfig) -> RunConfig:
    """Returns the run with `layout.rows_over: sequence` where auto means that.

    That is where the rows cannot divide the sequences of a micro-batch, but the tokens of each.
    """
    layout, spec = run.layout, spec_of(run.layout)
    if layout.rows_over != "auto" or layout.rows == 1 or "rows_over" not in spec.keys_of(layout):
        return run
    sequences, rest = divmod(run.train.global_batch, layout.dp * layout.micro_batches)
    changed = run.model_copy(update={"layout": _over_sequence(layout)})
    possible = not rest and sequences % layout.rows and not [*_sequence_parts(changed)]
    return changed if possible else run


def _over_sequence(layout: LayoutConfig) -> LayoutConfig:
    return layout.model_copy(update={"rows_over": "sequence"})


def problems(run: RunConfig) -> list[Refusal]:
    """Returns every broken rule of a run, with changes that fix it and break no other rule."""
    return with_fixes(run, violations)


def violations(run: RunConfig) -> list[Violation]:
    """Returns every broken rule of a run, with changes that may fix it."""
    run = with_rows_over(run)
    return [broken for rule in _RULES for broken in rule(run)]


def layout_problems(layout: LayoutConfig) -> list[str]:
    """Returns what is wrong with a layout by itself, whatever runs on it."""
    run = RunConfig.model_construct(layout=layout)
    rules = (_axes, _keys, _kept, _replicas, _expert_axes, _nodes, _racks)
    return [broken.text for rule in rules for broken in rule(run)]


# --------------------------------------------------------------------------- the layout by itself


def _axes(run: RunConfig) -> Iterator[Violation]:
    layout, spec = run.layout, spec_of(run.layout)
    wrong = [axis for axis in AXES if axis not in spec.axes and getattr(layout, axis) > 1]
    if not wrong:
        return
    alone: Changes = {f"layout.{axis}": 1 for axis in wrong}
    devices = max(layout.rows * layout.cols, layout.branches)  # no scheme has a grid and branches
    kept = [
        alone | {f"layout.{k}": v for k, v in one.items() if v != getattr(layout, k)}
        for one in spec.arrangements(devices)
    ]
    fixes = [Fix(lambda: [*sorted(kept, key=len), alone])]
    others = [
        {"layout.scheme": other.name}
        | {f"layout.{axis}": 1 for axis in AXES if _idle(layout, axis, other.axes)}
        for other in specs().values()
        if {*wrong} <= {*other.axes}
    ]
    fixes.append(Fix(lambda: others, at_most=len(specs())))
    over = " and ".join(f"layout.{axis}" for axis in spec.axes) or "no grid"
    sizes_said = " and ".join(f"layout.{axis}={getattr(layout, axis)}" for axis in wrong)
    text = f"layout.scheme={spec.name} uses {over} and cannot use {sizes_said}"
    yield Violation("axes", text, fixes)


def _idle(layout: LayoutConfig, axis: LayoutAxis, axes: Iterable[LayoutAxis]) -> bool:
    return axis not in axes and getattr(layout, axis) > 1


def _keys(run: RunConfig) -> Iterator[Violation]:
    """Keys that apply only to other schemes must have their default value."""
    layout, spec, plain = run.layout, spec_of(run.layout), LayoutConfig()
    for key in dict.fromkeys(key for other in specs().values() for key in other.keys):
        value, default = getattr(layout, key), getattr(plain, key)
        if key in spec.keys_of(layout) or value == default:
            continue
        owners = any_of(other.name for other in specs().values() if key in other.keys)
        text = f"layout.{key}={format_value(value)} belongs to scheme={owners}, not {spec.name}"
        if key in spec.keys:
            text = (
                f"layout.{key}={format_value(value)} does not apply to {spec.name} with "
                f"stationary={layout.stationary}"
            )
        yield Violation(f"key {key}", text, [_one(f"layout.{key}", [default])])


def _kept(run: RunConfig) -> Iterator[Violation]:
    layout = run.layout
    gathers = {"auto", *spec_of(layout).gathers(layout)}
    if layout.keep_gathered in gathers:
        return
    name = spec_of(layout).describe(layout)
    if layout.schedule != "auto":
        name += f" with schedule={layout.schedule}"
    text = f"layout.keep_gathered={layout.keep_gathered} does not apply to {name}"
    yield Violation("keep_gathered", text, [_one("layout.keep_gathered", sorted(gathers), 4)])


def _replicas(run: RunConfig) -> Iterator[Violation]:
    layout = run.layout
    if layout.reshard == "step" and layout.dp_mode != "fsdp":
        text = (
            f"layout.reshard={layout.reshard} is for parameters that are gathered, but "
            f"layout.dp_mode={layout.dp_mode} gathers none"
        )
        fixes = [_one("layout.reshard", ["layer"]), _one("layout.dp_mode", ["fsdp"])]
        yield Violation("reshard", text, fixes)
    n = layout.shard_over
    if n and layout.dp_mode == "replicate":
        text = (
            f"layout.shard_over={n} is the number of replicas that shard, but "
            "layout.dp_mode=replicate shards nothing"
        )
        fixes = [_one("layout.shard_over", [0]), _one("layout.dp_mode", ["fsdp"])]
        yield Violation("shard_over", text, fixes)
    elif n and (n == 1 or layout.dp % n):
        text = f"layout.shard_over={n} does not divide layout.dp={layout.dp} into groups of several"
        nearest = sorted({*divisors(layout.dp)} - {1}, key=lambda d: abs(d - n))
        yield Violation("shard_over", text, [_one("layout.shard_over", [*nearest, 0], 3)])
    if layout.gradient_sync == "micro_batch" and layout.dp_mode == "replicate":
        text = (
            "layout.gradient_sync=micro_batch lets each replica keep its part of gradients, but "
            "layout.dp_mode=replicate has no parts"
        )
        fixes = [_one("layout.gradient_sync", ["step"]), _one("layout.dp_mode", ["zero1", "fsdp"])]
        yield Violation("gradient_sync", text, fixes)
    if layout.dp_mode == "replicate" or spec_of(layout).replicas(layout) > 1:
        return
    text = (
        f"layout.dp_mode={layout.dp_mode} shards state over replicas, but layout.dp=1 has only one"
    )
    replicate: Changes = {"layout.dp_mode": "replicate"}
    if layout.reshard == "step":
        replicate |= {"layout.reshard": "layer"}
    if layout.gradient_sync == "micro_batch":
        replicate |= {"layout.gradient_sync": "step"}
    if layout.shard_over:
        replicate |= {"layout.shard_over": 0}
    yield Violation("dp_mode", text, [Fix(lambda: [replicate])])


def _norms(run: RunConfig) -> Iterator[Violation]:
    if run.model.qk_norm and run.model.qk_norm_over == "all" and run.layout.stationary == "weight":
        text = (
            "model.qk_norm_over=all: heads are normalized together, which stationary=weight lacks"
        )
        yield Violation("norms", text, [_one("layout.stationary", ["auto"])])


def _whole_heads(run: RunConfig) -> Iterator[Violation]:
    """Muon finds each head on one column of devices, of which rows have whole heads."""
    if not run.train.muon_by_head:
        return
    heads, rows = run.model.n_heads, run.layout.rows
    text = ""
    if run.model.family == "network":
        text = "model.family=network, which does not say where heads lie"
    elif heads % rows and run.model.family != "llama":
        text = f"layout.rows={rows} may divide one of model.n_heads={heads} heads"
    if text:
        text = f"train.muon_by_head=true: {text}"
        yield Violation("whole heads", text, [_one("train.muon_by_head", [False])])


def _attention(run: RunConfig) -> Iterator[Violation]:
    """A kernel of attention that is named takes the run's tensors and masks."""
    model, train, name, width = run.model, run.train, run.train.attention, run.model.head_width
    if name in ("auto", "math"):
        return
    flash, single = name.startswith("flash"), train.dtype == "float32"
    masks = model.two_stacks or model.window or run.data.document_mask
    rows = run.layout.sequence_rows > 1 and model.family != "bert"
    whys = {
        "on train.device=cpu PyTorch chooses by itself": train.device == "cpu",
        f"it does not take train.dtype={train.dtype}": train.dtype == "float64"
        or (single and name != "efficient"),
        f"heads of {width} elements are wider than 256": flash and width > 256,
        f"heads of {width} elements are wider than 128 or no multiple of 8": name == "cudnn"
        and (width > 128 or width % 8 > 0),
        f"heads of {width} elements are no multiple of 16 bytes": name == "efficient"
        and width % (4 if single else 8) > 0,
        "several heads of queries share one of keys": name == "efficient"
        and model.kv_heads < model.n_heads,
        "layout.rows_over=sequence needs the last queries of causal attention": name == "cudnn"
        and rows,
        "it does not take the masks of train.kernels=torch": flash
        and train.kernels == "torch"
        and bool(masks),
        "its gradients differ from run to run, despite train.deterministic=true": name == "cudnn"
        and train.deterministic,
    }
    for why in [why for why, is_so in whys.items() if is_so][:1]:
        fix = _one("train.attention", ("flash", "cudnn", "efficient", "auto"))
        yield Violation("attention", f"train.attention={name}: {why}", [fix])


def _expert_axes(run: RunConfig) -> Iterator[Violation]:
    """Experts lie over axes that there are."""
    layout, spec = run.layout, spec_of(run.layout)
    over, n = layout.experts_over, layout.experts_dp
    none = _one("layout.experts_over", [()])
    if strange := [key for key in over if key not in (*spec.axes, "dp")]:
        text = f"layout.experts_over={format_value(over)}: scheme={spec.name} has no {strange[0]}"
        yield Violation("experts axes", text, [_one("layout.experts_over", [(*spec.axes, "dp")])])
    if n and ("dp" not in over or layout.dp % n):
        text = f"layout.experts_dp={n} does not divide layout.dp={layout.dp} into equal groups"
        if "dp" not in over:
            text = f"layout.experts_dp={n} needs dp in layout.experts_over"
        nearest = sorted(divisors(layout.dp), key=lambda d: abs(d - n)) if "dp" in over else [0]
        yield Violation("experts_dp", text, [_one("layout.experts_dp", nearest, 2)])
    if layout.shard_over and "dp" in over:
        text = f"layout.shard_over={layout.shard_over} and dp in layout.experts_over"
        yield Violation(
            "experts shard_over",
            f"{text} both divide the replicas into groups",
            [_one("layout.shard_over", [0]), none],
        )


def _experts(run: RunConfig) -> Iterator[Violation]:
    """Axes over which no experts lie shard their inner width."""
    layout, model, spec = run.layout, run.model, spec_of(run.layout)
    over, none = layout.experts_over, _one("layout.experts_over", [()])
    if over and not model.n_experts and model.family != "network":
        text = f"layout.experts_over={format_value(over)}: the model has no experts"
        yield Violation("no experts", text, [none])
    if not model.n_experts:
        return
    boundary = spec.boundary(layout)
    mesh = boundary.h_over or boundary.axis
    key = next((key for key in spec.axes if MESH_AXIS[key] == mesh), None)
    if key is None or key in over:
        return
    if layout.feed_forward == "common" and key == "branches":
        if "dp" in over:
            text = "layout.experts_over=dp needs layout.feed_forward=branched, or branches as well"
            fixes = [_one("layout.feed_forward", ["branched"]), none]
            yield Violation("experts common", text, fixes)
        return
    if model.expert_size % getattr(layout, key):
        text = (
            f"model.expert_size={model.expert_size} does not divide over layout.{key}="
            f"{getattr(layout, key)}"
        )
        fixes = [
            _one("layout.experts_over", [(*over, key)]),
            _one("model.expert_size", _multiples_near(model.expert_size, getattr(layout, key)), 2),
        ]
        yield Violation("expert_size", text, fixes)


def _nodes(run: RunConfig) -> Iterator[Violation]:
    """The number of devices per node must divide the number of processes, unless it is larger."""
    layout = run.layout
    n, k = layout.n_processes, layout.devices_per_node
    if k == 0 or k >= n or n % k == 0:
        return
    grid = " x ".join(spec_of(layout).axes) or "1"
    text = f"layout.devices_per_node={k} does not divide {grid} x dp x pp={n}"
    nearest = sorted(divisors(n), key=lambda d: abs(d - k))
    yield Violation("devices_per_node", text, [_one("layout.devices_per_node", nearest, 3)])


def _racks(run: RunConfig) -> Iterator[Violation]:
    """The number of nodes per rack must divide the number of nodes, unless it is larger."""
    layout = run.layout
    n, k, in_rack = layout.n_processes, layout.devices_per_node, layout.nodes_per_rack
    if not in_rack:
        return
    none = _one("layout.nodes_per_rack", [0])
    if not k:
        text = f"layout.nodes_per_rack={in_rack} needs layout.devices_per_node, which is 0"
        yield Violation("nodes_per_rack", text, [none])
    elif k < n and n % k == 0 and in_rack < n // k and (n // k) % in_rack:
        text = f"layout.nodes_per_rack={in_rack} does not divide the number of nodes, {n // k}"
        nearest = sorted(divisors(n // k), key=lambda d: abs(d - in_rack))
        yield Violation("nodes_per_rack", text, [_one("layout.nodes_per_rack", nearest, 3), none])


def _cluster(run: RunConfig) -> Iterator[Violation]:
    """The cluster that decides must be a shipped one, or a file without problems."""
    name = run.layout.cluster
    if not name:
        return
    names = cluster_names()
    if cluster_path(name) is None:
        text = f"layout.cluster={name} is not a shipped cluster, and there is no such file"
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        yield Violation("cluster", text, [_one("layout.cluster", near or names, len(names))])
        return
    try:
        load_cluster(name)
    except ConfigError as error:
        text = f"layout.cluster={name} cannot be read: {'; '.join(error.problems)}"
        yield Violation("cluster file", text, [_one("layout.cluster", names, len(names))])


# --------------------------------------------------------------------------- pipelines


def _pipeline(run: RunConfig) -> Iterator[Violation]:
    """Stages, their schedule and the micro-batches must fit each other."""
    layout, n_links = run.layout, run.model.n_links
    m, k, pp, order = layout.micro_batches, layout.stages_per_rank, layout.pp, layout.pipeline
    fewest: Changes = {"layout.stages_per_rank": 1, "layout.pipeline": "auto"}
    no_order, one_stage = _one("layout.pipeline", ["auto"]), _one("layout.stages_per_rank", [1])
    if pp == 1:
        if k > 1:
            text = f"layout.stages_per_rank={k} needs a pipeline, but layout.pp=1 has none"
            yield Violation("no pipeline", text, [one_stage])
        if order != "auto":
            text = f"layout.pipeline={order} needs a pipeline, but layout.pp=1 has none"
            yield Violation("no order", text, [no_order])
        return
    if pp * k > n_links:
        ranks: list[Changes] = [{"layout.pp": n} for n in range(min(pp - 1, n_links // k), 0, -1)]
        text = (
            f"layout.pp={pp} x layout.stages_per_rank={k}: more stages than layers, embeddings "
            f"and heads ({n_links})"
        )
        fewer = Fix(lambda: [*ranks, {"layout.pp": 1, **fewest}])
        yield Violation(
            "stages", text, [fewer, _one("layout.stages_per_rank", range(k - 1, 0, -1))]
        )
    several, most = k > 1, max(2 * pp, 2 * m)
    if order == "zbv" and k != 2:
        text = f"layout.pipeline=zbv has two stages per rank, not layout.stages_per_rank={k}"
        yield Violation("two stages", text, [no_order, _one("layout.stages_per_rank", [2])])
    if several and order not in ("auto", "interleaved", "zbv"):
        text = f"layout.pipeline={order} has one stage per rank, not layout.stages_per_rank={k}"
        in_turns = Fix(lambda: [{"layout.pipeline": "auto"}, fewest])
        yield Violation("one stage", text, [in_turns, one_stage])
    if not several and order == "interleaved":
        text = (
            f"layout.pipeline={order} needs several stages per rank, not layout.stages_per_rank=1"
        )
        yield Violation("several stages", text, [no_order, _one("layout.stages_per_rank", [2])])
    if m < pp and (order == "zbv" or (not several and order in ("1f1b", "zb_h1"))):
        text = (
            f"layout.pipeline={order} needs at least as many micro-batches as layout.pp={pp} "
            f"stages, not layout.micro_batches={m}"
        )
        yield Violation("1f1b", text, [no_order, _one("layout.micro_batches", range(pp, most + 1))])
    if layout.splits_backward and run.train.update == "in_backward":
        text = (
            f"layout.pipeline={order} computes gradients of weights after their backward pass, "
            "which does not work with train.update=in_backward"
        )
        yield Violation("late update", text, [no_order, _one("train.update", ["after_backward"])])
    if several and order in ("auto", "interleaved") and m % max(1, m // pp) != 0:
        text = (
            f"layout.micro_batches={m} cannot form equal rounds of at least layout.pp={pp} "
            "micro-batches, which interleaved stages need"
        )
        near = sorted(range(1, most + 1), key=lambda n: abs(n - m))
        one = Fix(lambda: [{"layout.stages_per_rank": 1}, fewest])
        yield Violation("rounds", text, [_one("layout.micro_batches", near), one])


# --------------------------------------------------------------------------- model and batch


def _divides(run: RunConfig) -> Iterator[Violation]:
    for axis, cut in spec_of(run.layout).cuts(run).items():
        size, over = _size(run.layout, axis), (axis,) if axis != "grid" else ("rows", "cols")
        said = " x ".join(f"layout.{one}={getattr(run.layout, one)}" for one in over)
        for key, value in cut.items():
            if value % size:
                text = f"{key}={value} does not divide over {said}"
                yield Violation(f"{axis} cuts {key}", text, _dividing(run, axis, key, value))


def _size(layout: LayoutConfig, axis: LayoutAxis | Literal["grid"]) -> int:
    return layout.rows * layout.cols if axis == "grid" else int(getattr(layout, axis))


def _dividing(
    run: RunConfig, axis: LayoutAxis | Literal["grid"], key: str, value: int
) -> list[Fix]:
    """Suggests sizes of the axis that divide what it shards, and nearby divisible values."""
    layout, model = run.layout, run.model
    cut = spec_of(layout).cuts(run)[axis]
    largest = max(16, 2 * _size(layout, axis))
    sizes = [n for n in divisors(math.gcd(*cut.values())) if n <= largest]
    own = (
        [axis] if axis != "grid" else [one for one in ("rows", "cols") if getattr(layout, one) > 1]
    )
    fixes = [_one(f"layout.{one}", sizes, len(sizes)) for one in own]
    over = partial(_pieces, run)
    if key in ("model.n_heads", HEADS_WIDTH) and model.head_dim:
        width = over(HEADS_WIDTH)  # the factor of the width of all heads
        factor = math.lcm(over("model.n_heads"), width // math.gcd(width, model.head_dim))
        factor = math.lcm(factor, model.n_kv_heads or 1)
        fixes.append(_one("model.n_heads", _multiples_near(model.n_heads, factor), 2))
        if key == HEADS_WIDTH:
            factor = width // math.gcd(width, model.n_heads)
            fixes.append(_one("model.head_dim", _multiples_near(model.head_dim, factor), 2))
    elif key == "model.n_heads":  # which must also divide hidden_size
        each = math.lcm(over(key), model.n_kv_heads or 1)
        heads = [n for n in divisors(model.hidden_size) if n % each == 0]
        fixes.append(_one(key, sorted(heads, key=lambda n: abs(n - value)), 2))
    elif key == "model.hidden_size":
        factor = over(key) if model.head_dim else math.lcm(over(key), model.n_heads)
        fixes.append(_one(key, _multiples_near(value, factor), 2))
    else:
        fixes.append(_one(key, _multiples_near(value, over(key)), 2))
    return fixes


def _pieces(run: RunConfig, key: str) -> int:
    """Returns the number that must divide a key's value, for all axes that shard it."""
    cuts = spec_of(run.layout).cuts(run)
    return math.lcm(*(_size(run.layout, axis) for axis, cut in cuts.items() if key in cut))


def _batch(run: RunConfig) -> Iterator[Violation]:
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
    fixes = [_one("train.global_batch", _multiples_near(batch, parts), 2)]
    if axis and "sequence_parallel" in spec_of(layout).keys_of(layout):
        fixes.append(_one("layout.sequence_parallel", [True]))
    if axis == "rows":  # or the rows divide each sequence
        over = run.model_copy(update={"layout": _over_sequence(layout)})
        fixes += [_one("layout.rows_over", ["sequence"]), Fix(lambda: [_nearest_lengths(over)])]
    yield Violation("batch", text, fixes)


def _sequence_parts(run: RunConfig) -> Iterator[Violation]:
    """Rows that divide each sequence have two chunks of it each, which columns may divide, too."""
    layout = run.layout
    parts = spec_of(layout).sequence_parts(layout)
    for key, value in sequence_cuts(run).items() if layout.sequence_rows > 1 else ():
        if value % parts:
            text = (
                f"{key}={value} does not divide into the {parts} parts of "
                f"layout.rows_over=sequence on {spec_of(layout).describe(layout)}"
            )
            fixes = [Fix(lambda: [_nearest_lengths(run)]), _one("layout.rows_over", ["batch"])]
            yield Violation(f"rows over {key}", text, fixes)


def _nearest_lengths(run: RunConfig) -> Changes:
    """Returns the nearest lengths of sequences that a layout can divide."""
    parts = spec_of(run.layout).sequence_parts(run.layout)
    return {key: _multiples_near(value, parts)[0] for key, value in sequence_cuts(run).items()}


def _length(run: RunConfig) -> Iterator[Violation]:
    longest = run.model.max_seq_len
    if run.seq_len <= longest or run.model.two_stacks:  # which have no position table
        return
    text = f"data.seq_len={run.seq_len} is longer than model.max_seq_len={longest}"
    step = spec_of(run.layout).sequence_parts(run.layout)
    shorter = _one("data.seq_len", range(longest // step * step, 0, -step))
    yield Violation("length", text, [shorter, _one("model.max_seq_len", [run.seq_len])])


def _network(run: RunConfig) -> Iterator[Violation]:
    if run.model.family == "network":
        from gridformer.parallel.network.refusals import run_problems

        for text in run_problems(run):
            yield Violation("network", text, [])


_RULES: tuple[Callable[[RunConfig], Iterator[Violation]], ...] = (
    _axes,
    _keys,
    _kept,
    _replicas,
    _pipeline,
    _divides,
    _batch,
    _sequence_parts,
    _norms,
    _whole_heads,
    _attention,
    _expert_axes,
    _experts,
    _nodes,
    _racks,
    _cluster,
    _length,
    _network,
)


def _one(key: str, values: Iterable[Any], at_most: int = 1) -> Fix:
    """Returns a way that changes one key to one of some values."""
    return Fix(lambda: ({key: value} for value in values), at_most)


def _multiples_near(value: int, factor: int) -> list[int]:
    """Returns multiples of `factor`, the nearest to `value` first."""
    below = value // factor * factor
    multiples = [
        n for i in range(20) for n in (below - i * factor, below + (i + 1) * factor) if n > 0
    ]
    return sorted(multiples, key=lambda n: abs(n - value))
