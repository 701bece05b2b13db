"""Decides everything that the `auto` settings of a run leave open, before any process starts.

Every process decides from the run's config alone, so all of them agree. `gridformer train
--explain` prints the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.config import LayoutConfig, RunConfig
from gridformer.mesh import node_placement as nodes
from gridformer.mesh.node_placement import Candidate, NodeBlock, explain, explain_racks
from gridformer.parallel.auto.cost import Choice, Choices, resolved
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import ITEMSIZE, Work, parameter_bytes, replica_work
from gridformer.parallel.pipeline.partition import link_names, stages_of
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.utils.units import MIB, three_digits

_TURNS = 3  # how often choices and placement are decided in turn
_WIDE = 100  # terminals with this many characters or more show the sizes of products


@dataclass(frozen=True)
class Decisions:
    """The decisions for a run.

    Attributes:
        traffic: Bytes that one device receives over each axis in one step, with ring collectives:
            for products (`col`, `row`), for gradients and sharded parameters (`dp`) and between
            stages (`pp`). Where devices differ, it is that of the device that receives most, with
            pipeline stages taken as equal.
        candidates: The blocks of the grid that a node may hold, best first; none if the run does
            not give the number of devices per node.
        racks: The blocks of nodes that a rack may hold, in the same way.
    """

    choices: Choices
    traffic: dict[str, float]
    candidates: list[Candidate]
    racks: list[Candidate] = field(default_factory=list)

    @property
    def block(self) -> NodeBlock | None:
        """The best block of the grid for a node, if any, with that of nodes for a rack."""
        block = self.candidates[0].block if self.candidates else None
        if block is None or not self.racks:
            return block
        return replace(block, rack=self.racks[0].block)


def decide_run(run: RunConfig) -> Decisions:
    """Decides what the `auto` settings of a validated run become, and says why."""
    decisions = decisions_of(run)
    if run.layout.pp > 1:
        decisions.choices.reasons.append(_why_these_stages(run, decisions.choices.work))
    decisions.choices.reasons.extend(notes(run))
    return decisions


def decisions_of(run: RunConfig) -> Decisions:
    """Returns the decisions for a run, with the reasons for products alone.

    On a cluster the choices depend on the placement on nodes, which depends on the traffic of the
    choices: both are decided in turn until the placement no longer changes.
    """
    layout, work, block = run.layout, replica_work(run), None
    for _ in range(_TURNS):
        choices = decide(run.model, layout, work, block)
        traffic = traffic_of(run, choices)
        decisions = Decisions(choices, traffic, *placements(layout, traffic))
        if not layout.cluster or decisions.block == block:
            break
        block = decisions.block
    return decisions


def traffic_of(run: RunConfig, choices: Choices) -> dict[str, float]:
    """Returns the bytes that one device receives over each axis in a step: `Decisions.traffic`."""
    layout, work = run.layout, choices.work
    steps = [choices.step(choice) for choice in choices.products.values()]
    spec, times = spec_of(layout), _times_over_replicas(resolved(run, choices))
    activations = sum(step.col for step in steps) + work.micro_batches * choices.inputs_again()
    over_boundary = activations * work.itemsize
    # Gradients of replicated heads are summed on their owner, which sends the updated values back.
    over_boundary += choices.copied_parameters * parameter_bytes(run)
    traffic = {
        "col": spec.boundary_bytes(choices, layout, over_boundary),
        "row": (sum(step.row for step in steps) + choices.received_keys()) * work.itemsize,
        "dp": spec.replica_elements(choices, layout, *times) * parameter_bytes(run),
    }
    if layout.pp > 1:
        traffic = {axis: n_bytes / layout.pp for axis, n_bytes in traffic.items()}
        traffic["pp"] = _between_stages(run, work)
    return traffic


def placements(
    layout: LayoutConfig, traffic: Mapping[str, float]
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns the blocks of devices that a node may hold, and of nodes that a rack may hold.

    The best come first. A list is empty if the layout does not give the number of devices per node,
    or of nodes per rack, or if the scheme has no blocks.
    """
    if not layout.devices_per_node or not spec_of(layout).node_blocks:
        return [], []
    sizes = nodes.sizes_of(layout)
    candidates = nodes.search_blocks(sizes, traffic, layout.devices_per_node)
    if not layout.nodes_per_rack:
        return candidates, []
    return candidates, nodes.search_racks(sizes, candidates[0], layout.nodes_per_rack)


def notes(run: RunConfig) -> list[str]:
    """Returns sentences about settings of a run that do not have the effect one might expect."""
    micro_batches = run.layout.micro_batches
    if run.train.update != "in_backward" or micro_batches == 1:
        return []
    return [
        "update=in_backward saves no memory here: gradients accumulate over "
        f"layout.micro_batches={micro_batches}, so those of all layers are held until the "
        "backward pass of the last micro-batch"
    ]


def _between_stages(run: RunConfig, work: Work) -> float:
    """Returns the bytes of activations and gradients that a device receives from other stages.

    A tensor that is replicated over several devices is sent to all of them together only once,
    unless `scatter_gather` is off. An encoder's output that is passed through the decoder counts.
    """
    layout = run.layout
    spec = spec_of(layout)
    between = spec.boundary(layout).activation_layout
    sent_whole = between == "first" or (between == "replicated" and not layout.scatter_gather)
    devices = 1 if sent_whole else math.prod(spec.grid(layout))
    border = (work.tokens + work.source) * run.model.hidden_size / devices * work.itemsize
    return 2 * layout.stages_per_rank * work.micro_batches * border


def _why_these_stages(run: RunConfig, work: Work) -> str:
    layout = run.layout
    model = run.model.model_copy(update={"vocab_size": max(1, run.model.vocab_size)})
    names = link_names(model)
    begins = [names[stage.start] for stage in stages_of(model, layout.n_stages, work)]
    return (
        f"pipeline: {layout.pipeline_order} leaves each rank idle for {layout.ideal_idle:.0%} of "
        f"its compute time if stages are equal; the stages begin at {', '.join(begins)}"
    )


def _times_over_replicas(run: RunConfig) -> tuple[float, float]:
    """Returns how often a layer's parameters are sent per step: gathered, or as summed gradients.

    With fsdp gathered parameters have the dtype of the computation. Each of them counts as the
    fraction of a parameter that has as many bytes. The second number is that of other parameters.
    """
    layout = run.layout
    sums = layout.micro_batches if layout.gradient_sync == "micro_batch" else 1
    if layout.dp_mode != "fsdp":
        return 1 + sums, 1 + sums
    gathers = 2 * layout.micro_batches if layout.reshard != "step" else 1
    return gathers * ITEMSIZE[run.train.dtype] / parameter_bytes(run) + sums, 1 + sums


# --------------------------------------------------------------------------- train --explain


def print_decisions(run: RunConfig, decisions: Decisions, console: Console) -> None:
    """Prints how each product is carried out, what travels, what is kept, and why."""
    choices, layout = decisions.choices, run.layout
    tokens, m = choices.work.tokens, choices.work.micro_batches
    said = f"{run.model.name} on {describe_layout(layout)}: {tokens:,} tokens per micro-batch"
    per_step = f"{m} micro-batch{'es' * (m > 1)} per step"
    console.print(Text(f"{said}, {per_step}, {run.train.dtype}"))
    if choices.rows * choices.cols == 1:
        whole = "a whole pipeline stage" if layout.pp > 1 else "the whole model"
        if layout.dp_mode == "fsdp":
            said = f"One device computes {whole}, but gathers each layer's parameters before it"
        else:
            said = f"One device holds {whole}"
        console.print(Text(f"{said}: no product sends anything."))
    else:
        _print_products(choices, layout, console)
    total = {name: n_bytes for name, n_bytes in decisions.traffic.items() if n_bytes}
    if total:
        over_branches = spec_of(layout).boundary(layout).axis == "branch"
        along = "over branches" if over_branches else "along rows"
        replicas = "gradients" if layout.dp_mode == "replicate" else "gradients and parameters"
        down = "activations" if choices.holds_weights else "weights"
        axes = {"col": f"activations {along}", "row": f"{down} down columns", "dp": replicas}
        axes |= {"pp": "between stages"}
        if choices.sequence_rows > 1:
            axes["row"] = "weights, keys and values down columns"
        parts = [f"{axes[name]} {n_bytes / MIB:,.1f} MiB" for name, n_bytes in total.items()]
        console.print(Text(f"A device receives in a step, at most: {', '.join(parts)}."))
    for reason in choices.reasons:
        console.print(Text(f"- {reason}"))
    if decisions.candidates:
        sizes = nodes.sizes_of(layout)
        console.print(Text(explain(decisions.candidates, sizes, layout.devices_per_node)))
        if decisions.racks and (node := decisions.candidates[0].block):
            said = explain_racks(decisions.racks, node, sizes, layout.nodes_per_rack)
            console.print(Text(said))
        console.print(Text("Bytes assume ring collectives."))


def _print_products(choices: Choices, layout: LayoutConfig, console: Console) -> None:
    """Prints the table of choices and of one device's traffic, and that of their seconds."""
    again = choices.work.recomputed > 0
    every, wide = choices.products.values(), console.width >= _WIDE
    keeps = any(choice.kept for choice in every)
    copied = any(choice.product.copied and not choice.common for choice in every)
    passes = ["fwd", "bwd", *["again"] * again]
    heads = ["\nproduct", *["\nin x out"] * wide, "\nstationary", "\nschedule"]
    for what in ("msgs", "MiB"):
        heads += [f"{'' if i else what}\n{name}" for i, name in enumerate(passes)]
    table = _table([*heads, *["\nkept", "MiB\nheld"] * keeps], ("msgs", "MiB", *passes))
    for choice in every:
        table.add_row(*_row(choices, choice, len(passes), keeps, wide))
    console.print(table)
    console.print(
        "msgs, MiB: what a device receives for one such product in the forward and backward "
        f"pass of a micro-batch{' and for its recomputation' * again}. stationary: the "
        "matrix that is not sent."
        + (" held: memory for what all such products together keep." if keeps else "")
        + (" out + n: n more columns, which several devices hold." if copied else "")
    )
    if choices.timed:
        table = _table(["product", "by seconds", "ms", "by volumes", "ms"], ("ms",))
        for name, timed in choices.timed.items():
            mine, rule = _named(choices[name]), _named(timed.by_rules)
            times = [three_digits(1e3 * s) for s in (timed.seconds, timed.by_rules_s)]
            table.add_row(name, mine, times[0], "the same" if mine == rule else rule, times[1])
        console.print(table)
        console.print(
            f"ms: what all such products of a step take on {layout.cluster} with the messages "
            "that they wait for."
        )


def _table(heads: Sequence[str], numbers: Sequence[str]) -> Table:
    """Returns an empty table, in which columns with a number's name in their heading are right."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for head in heads:
        right = any(word in numbers for word in head.split())
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    return table


def _named(choice: Choice) -> str:
    """Returns a choice in words, such as `input, gather in 4, keeps weight`."""
    chunks = f" in {choice.n_chunks}" if choice.n_chunks > 1 else ""
    keeps = f", keeps {choice.kept}" if choice.kept else ""
    return f"{choice.stationary}, {choice.schedule}{chunks}{keeps}"


def _row(choices: Choices, choice: Choice, passes: int, keeps: bool, wide: bool) -> list[str]:
    product, mib = choice.product, choices.work.itemsize / MIB
    cells = [product.name + (f" x{product.count}" if product.count > 1 else "")]
    if wide:
        copied = f" + {product.copied}" if product.copied and not choice.common else ""
        cells.append(f"{product.n_in} x {product.n_out}{copied}")
    if choice.common:
        return [*cells, "-", "common", *"-" * (2 * passes + 2 * keeps)]
    traffic = [choices.forward(choice), choices.backward(choice), choices.again(choice)][:passes]
    cells += [choice.stationary, choice.schedule, *(str(one.messages) for one in traffic)]
    cells += [three_digits((one.col + one.row) * mib) for one in traffic]
    if keeps:
        held = three_digits(choices.kept_bytes(choice) / MIB) if choice.kept else "-"
        cells += [choice.kept or "-", held]
    return cells
