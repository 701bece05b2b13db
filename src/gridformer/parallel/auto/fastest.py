"""Chooses how each product is carried out by the seconds that a cluster needs for it.

It tries every operand that may stay in place, schedule, number of chunks and kept operand that a
layout leaves open, takes the fastest that fits into the memory of a device, and prefers what the
rules of gridformer.parallel.auto.heuristics choose if that is about as fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from gridformer.cluster import load_cluster
from gridformer.cluster.costs import Costs
from gridformer.config import LayoutConfig
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel.auto.cost import Choice, Choices, ScheduleName, Stays, Timed
from gridformer.parallel.auto.loads import ProductTimes
from gridformer.parallel.auto.products import Product
from gridformer.parallel.registry import spec_of
from gridformer.utils.units import GIB, format_bytes

SMALL_BYTES = 64 << 20  # operands below this size may always be gathered at once
MOST_CHUNKS = 32  # keeps products large and messages few
MEMORY_SHARE = 0.8  # of a device, for what `Choices.held_bytes` estimates and what is gathered
GAIN = 0.99  # an option is only preferred to that of the rules if it takes less than this part
_RULES = ("stationary:", "schedule:", "chunks:", "keep_gathered:")  # begin their reasons
_SCHEDULES: tuple[ScheduleName, ...] = ("gather", "pipelined", "broadcast")


def fastest_choices(
    by_rules: Choices, layout: LayoutConfig, block: NodeBlock | None = None
) -> Choices:
    """Returns the fastest choices on the cluster of a layout.

    Args:
        by_rules: The choices of the rules.
        layout: The layout, whose `cluster` is set.
        block: The block of the mesh on each node, or None if ranks are placed in order.
    """
    cluster = load_cluster(layout.cluster).for_processes(layout.n_processes)
    times = ProductTimes(by_rules, layout, block, Costs(cluster))
    # What a device has left for operands that are gathered or kept.
    held, limit = by_rules.held_bytes, by_rules.work.memory_gib or cluster.limit_gib
    room = max(MEMORY_SHARE * limit * GIB - held, held * spec_of(layout).keep_share)
    best = {
        c.product.name: _best(c, by_rules, layout, times, room) for c in by_rules.products.values()
    }
    fastest = replace(by_rules, products=_keep(best, by_rules, layout, times, room))
    timed = {
        name: Timed(times.step_s(choice), by_rules[name], times.step_s(by_rules[name]))
        for name, choice in fastest.products.items()
        if not choice.common
    }
    reasons = [said for said in by_rules.reasons if not said.startswith(_RULES)]
    return replace(fastest, timed=timed, reasons=[*reasons, _why(layout, timed, room)])


def max_chunks(choices: Choices, layout: LayoutConfig, product: Product) -> int:
    """Returns the most chunks into which the activation of a product can be cut."""
    work, lies = choices.work, spec_of(layout).boundary(layout).lies
    if lies == "s":  # chunks of whole sequences
        return work.sequences // choices.rows
    if lies == "b":  # chunks of all sequences
        return work.rows_of(product) // max(1, work.sequences)
    return work.rows_of(product) // choices.rows


def _best(
    rule: Choice, choices: Choices, layout: LayoutConfig, times: ProductTimes, room: float
) -> Choice:
    """Returns the fastest way to carry out a product that keeps nothing it may choose to keep."""
    if rule.common:
        return rule
    plain = choices.keeping(rule, False, False) if layout.keep_gathered == "auto" else rule
    fitting = [
        option
        for option in _options(rule, choices, layout)
        if choices.gathered_bytes(option) <= max(room, SMALL_BYTES)
    ]
    option = min(fitting, key=times.step_s, default=plain)
    return option if times.step_s(option) < GAIN * times.step_s(plain) else plain


def _options(rule: Choice, choices: Choices, layout: LayoutConfig) -> Iterator[Choice]:
    """Yields the ways to carry out a product that a layout leaves open."""
    spec, product = spec_of(layout), rule.product
    stays: tuple[Stays, ...] = (rule.stays,)
    # A head shares its table with the embedding, and the parts of a joined weight lie by columns.
    turns = product.section != "head" and not product.parts
    if "stationary" in spec.keys and layout.stationary == "auto" and turns:
        stays = ("output", "input")
    schedules: tuple[ScheduleName, ...] = (rule.schedule,)
    if "schedule" in spec.keys and layout.schedule == "auto":
        schedules = _SCHEDULES
    most = min(MOST_CHUNKS, max_chunks(choices, layout, product))
    counts = [2**i for i in range(1, most.bit_length()) if 2**i <= most]
    for one, schedule in itertools.product(stays, schedules):
        option, wish = replace(rule, stays=one, schedule=schedule, n_chunks=1), layout.keep_gathered
        inputs, weights = wish in ("inputs", "all"), wish in ("weights", "all")
        yield (option := choices.keeping(option, inputs, weights))
        if schedule != "gather" or option.keep_input or product.section == "head":
            continue
        if choices.activation_bytes(option) > 0:
            yield from (replace(option, n_chunks=n) for n in counts)


def _keep(
    best: dict[str, Choice],
    choices: Choices,
    layout: LayoutConfig,
    times: ProductTimes,
    room: float,
) -> dict[str, Choice]:
    """Keeps the gathered operands that save most seconds for each byte, as long as they fit."""
    if layout.keep_gathered != "auto":
        return best
    offers = []
    for name, choice in best.items():
        for inputs, weights in ((True, False), (False, True), (True, True)):
            option = choices.keeping(choice, inputs, weights)
            price, saved = choices.kept_bytes(option), times.step_s(choice) - times.step_s(option)
            if price > 0 and saved > (1 - GAIN) * times.step_s(choice):
                offers.append((saved / price, name, option, price))
    offers.sort(key=lambda offer: (-offer[0], offer[1]))
    chosen, paid = dict(best), dict.fromkeys(best, 0.0)
    for _, name, option, price in offers:
        if times.step_s(option) < times.step_s(chosen[name]) and price - paid[name] <= room:
            room -= price - paid[name]
            chosen[name], paid[name] = option, price
    return chosen


def _why(layout: LayoutConfig, timed: dict[str, Timed], room: float) -> str:
    now, before = sum(t.seconds for t in timed.values()), sum(t.by_rules_s for t in timed.values())
    return (
        f"cluster: products with their messages take {1e3 * now:.4g} ms of a step on "
        f"{layout.cluster}, and {1e3 * before:.4g} ms as volumes and thresholds would choose; "
        f"{format_bytes(room)} are free for operands that are gathered or kept"
    )
