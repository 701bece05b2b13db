"""Decides everything that the `auto` settings of a run leave open, before any process starts.

Every process decides from the run's config alone, so all of them agree. `gridformer train
--explain` prints the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.config import LayoutConfig, RunConfig
from gridformer.mesh import node_placement as nodes
from gridformer.mesh.node_placement import Candidate, NodeBlock
from gridformer.mesh.placement_table import explain, explain_racks
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.auto.work import ITEMSIZE, parameter_bytes, replica_work, resolved
from gridformer.parallel.pipeline.partition import link_names, stages_of
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.utils.units import MIB, three_digits

_TURNS = 3  # how often choices and placement are decided in turn
_WIDE = 100  # terminals with this many characters or more show the sizes of products


@dataclass(frozen=True)
class Decisions:
    """The decisions for a run.

    Attributes:
        choices: How each product is carried out.
        traffic: Bytes that one device receives over each axis in one step, with ring collectives:
            for products (`col`, `row`), for gradients and sharded parameters (`dp`) and between
            stages (`pp`). Where devices differ, it is that of the device that receives most, with
            pipeline stages taken as equal.
        candidates: The blocks of the grid that a node may hold, best first. Empty if the run does
            not give the number of devices per node.
        racks: The blocks of nodes that a rack may hold, best first. Empty if the run does not give
            the number of nodes per rack.
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
    """Decides what the `auto` settings of a validated run become."""
    work = replica_work(run)
    choices = choices_of(run)
    traffic = traffic_of(run, choices, work)
    if run.layout.pp > 1:
        choices.reasons.append(_why_these_stages(run, work))
    choices.reasons.extend(notes(run))
    return Decisions(choices, traffic, *placements(run.layout, traffic))


def choices_of(run: RunConfig) -> Choices:
    """Returns how each product of a run is carried out; see `decide_run`.

    On a cluster the choices depend on the placement on nodes, which depends on the traffic of the
    choices: both are decided in turn until the placement no longer changes.
    """
    layout, work, block = run.layout, replica_work(run), None
    for _ in range(_TURNS):
        choices = decide(run.model, layout, work, block)
        if not layout.cluster or not layout.devices_per_node:
            return choices
        before, traffic = block, traffic_of(run, choices, work)
        block = Decisions(choices, traffic, *placements(layout, traffic)).block
        if block == before:
            break
    return choices


def traffic_of(run: RunConfig, choices: Choices, work: Work) -> dict[str, float]:
    """Returns the bytes that one device receives over each axis in a step; see `Decisions`.

    Args:
        run: The run.
        choices: How each product is carried out.
        work: The work of one replica, as `replica_work(run)` returns it.

    Returns:
        Bytes by the name of the axis: `col`, `row` and `dp`, and with stages `pp`.
    """
    layout = run.layout
    steps = [choices.step(choice) for choice in choices.products.values()]
    spec, again = spec_of(layout), _times_over_replicas(resolved(run, choices))
    activations = sum(step.col for step in steps) + work.micro_batches * choices.inputs_again()
    over_boundary = activations * work.itemsize
    # Gradients of replicated heads are summed on their owner, which sends the updated values back.
    over_boundary += choices.copied_parameters * parameter_bytes(run)
    traffic = {
        "col": spec.boundary_bytes(choices, layout, over_boundary),
        "row": sum(step.row for step in steps) * work.itemsize,
        "dp": spec.replica_elements(choices, layout, again) * parameter_bytes(run),
    }
    if layout.pp > 1:
        traffic = {axis: n_bytes / layout.pp for axis, n_bytes in traffic.items()}
        traffic["pp"] = _between_stages(run, work)
    return traffic


def placements(
    layout: LayoutConfig, traffic: Mapping[str, float]
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns the blocks that a node and a rack may hold, best first; see `Decisions`.

    Args:
        layout: The layout.
        traffic: What `traffic_of` returned.

    Returns:
        The blocks of devices that a node may hold, and the blocks of nodes that a rack may hold.
        A list is empty if the layout does not give the number of devices per node, or of nodes per
        rack, or if the scheme has no blocks.
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
    if run.train.update == "in_backward" and micro_batches > 1:
        return [
            "update=in_backward saves no memory here: gradients accumulate over "
            f"layout.micro_batches={micro_batches}, so those of all layers are held until the "
            "backward pass of the last micro-batch"
        ]
    return []


def _between_stages(run: RunConfig, work: Work) -> float:
    """Returns the bytes of activations and gradients that a device receives from other stages.

    A tensor that is replicated over several devices is sent to all of them together only once,
    unless `scatter_gather` is off. An encoder's output that is passed through the decoder counts.
    """
    layout = run.layout
    spec = spec_of(layout)
    lies = spec.boundary(layout).lies
    sent_whole = lies == "first" or (lies == "replicated" and not layout.scatter_gather)
    devices = 1 if sent_whole else math.prod(spec.grid(layout))
    border = (work.tokens + work.source) * run.model.hidden_size / devices * work.itemsize
    return 2 * layout.stages_per_rank * work.micro_batches * border


def _why_these_stages(run: RunConfig, work: Work) -> str:
    layout = run.layout
    model = run.model.model_copy(update={"vocab_size": max(1, run.model.vocab_size)})
    names = link_names(model)
    begins = [names[stage.start] for stage in stages_of(model, layout.n_stages, work)]
    idle = (layout.pp - 1) / (layout.stages_per_rank * layout.micro_batches)
    return (
        f"pipeline: {layout.pipeline_order} leaves each rank idle for {idle:.0%} of its compute "
        f"time if stages are equal; the stages begin at {', '.join(begins)}"
    )


def _times_over_replicas(run: RunConfig) -> float:
    """Returns how often a layer's parameters are sent per step: gathered, or as summed gradients.

    With fsdp gathered parameters have the dtype of the computation. Each of them counts as the
    fraction of a parameter that has as many bytes.
    """
    layout = run.layout
    if layout.dp_mode != "fsdp":
        return 2
    gathers = 2 * layout.micro_batches if layout.reshard != "step" else 1
    return gathers * ITEMSIZE[run.train.dtype] / parameter_bytes(run) + 1


def print_decisions(run: RunConfig, decisions: Decisions, console: Console) -> None:
    """Prints how each product is carried out, what travels, what is kept, and why.

    Args:
        run: The run.
        decisions: What `decide_run(run)` returned.
        console: Where it is printed.
    """
    choices, layout = decisions.choices, run.layout
    work = choices.work
    said = f"{run.model.name} on {describe_layout(layout)}: {work.tokens:,} tokens per micro-batch"
    m = work.micro_batches
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
        console.print(_products(choices, console.width))
        again = " and for its recomputation" if _computes_again(choices) else ""
        held = any(choice.keep_input or choice.keep_weight for choice in choices.products.values())
        copied = any(c.product.copied and not c.common for c in choices.products.values())
        console.print(
            "msgs, MiB: what a device receives for one such product in the forward and backward "
            f"pass of a micro-batch{again}. stays: the activation that is not sent."
            + (" held: memory for what all such products together keep." if held else "")
            + (" out + n: n more columns, which several devices hold." if copied else "")
        )
        if choices.timed:
            console.print(_seconds(choices))
            console.print(
                f"ms: what all such products of a step take on {layout.cluster} with the messages "
                "that they wait for."
            )
    total = {name: n_bytes for name, n_bytes in decisions.traffic.items() if n_bytes}
    if total:
        over_branches = spec_of(layout).boundary(layout).axis == "branch"
        along = "over branches" if over_branches else "along rows"
        replicas = "gradients" if layout.dp_mode == "replicate" else "gradients and parameters"
        axes = {"col": f"activations {along}", "row": "weights down columns", "dp": replicas}
        axes |= {"pp": "between stages"}
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


def _products(choices: Choices, width: int) -> Table:
    """Returns the table of choices and of one device's traffic, `width` characters wide at most."""
    passes = ["fwd", "bwd", *["again"] * _computes_again(choices)]
    keeps = any(choice.keep_input or choice.keep_weight for choice in choices.products.values())
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("\nproduct", no_wrap=True)
    if width >= _WIDE:
        table.add_column("\nin x out", no_wrap=True)
    for name in ("stays", "schedule"):
        table.add_column(f"\n{name}", no_wrap=True)
    for what in ("msgs", "MiB"):
        for number, name in enumerate(passes):
            table.add_column(f"{'' if number else what}\n{name}", justify="right", no_wrap=True)
    if keeps:
        table.add_column("\nkept", no_wrap=True)
        table.add_column("MiB\nheld", justify="right", no_wrap=True)
    for choice in choices.products.values():
        table.add_row(*_row(choices, choice, len(passes), keeps, width))
    return table


def _seconds(choices: Choices) -> Table:
    """Returns the table of what was chosen by seconds, and what by volumes and thresholds."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("product", "by seconds", "ms", "by volumes", "ms"):
        table.add_column(name, justify="right" if name == "ms" else "left", no_wrap=True)
    for name, timed in choices.timed.items():
        mine, rule = _named(choices[name]), _named(timed.by_rules)
        times = [three_digits(1e3 * s) for s in (timed.seconds, timed.by_rules_s)]
        table.add_row(name, mine, times[0], "the same" if mine == rule else rule, times[1])
    return table


def _named(choice: Choice) -> str:
    """Returns a choice in words, such as `input, gather in 4, keeps weight`."""
    found = f"{choice.stays}, {choice.schedule}"
    if choice.n_chunks > 1:
        found += f" in {choice.n_chunks}"
    kept = ["input"] * choice.keep_input + ["weight"] * choice.keep_weight
    return found + (f", keeps {'both' if len(kept) > 1 else kept[0]}" if kept else "")


def _computes_again(choices: Choices) -> bool:
    return choices.work.recompute == "full"


def _row(choices: Choices, choice: Choice, passes: int, keeps: bool, width: int) -> list[str]:
    product, mib = choice.product, choices.work.itemsize / MIB
    cells = [product.name + (f" x{product.count}" if product.count > 1 else "")]
    if width >= _WIDE:
        copied = f" + {product.copied}" if product.copied and not choice.common else ""
        cells.append(f"{product.n_in} x {product.n_out}{copied}")
    if choice.common:
        return [*cells, "-", "common", *"-" * (2 * passes + 2 * keeps)]
    found = [choices.forward(choice), choices.backward(choice), choices.again(choice)][:passes]
    cells += [choice.stays, choice.schedule, *(str(one.messages) for one in found)]
    cells += [three_digits((one.col + one.row) * mib) for one in found]
    if keeps:
        kept = ["input"] * choice.keep_input + ["weight"] * choice.keep_weight
        cells.append("both" if len(kept) > 1 else "".join(kept) or "-")
        cells.append(three_digits(choices.kept_bytes(choice) / MIB) if kept else "-")
    return cells
