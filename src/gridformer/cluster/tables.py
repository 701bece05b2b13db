"""Times that `gridformer calibrate` measured, interpolated between them and extrapolated beyond.

Rows hold microseconds. `processes` is the number of processes that computed at the same time: on a
CPU they share the cores, so each of them is slower the more there are.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
_NEAREST = 6  # rows from which the rate of a shape is interpolated


class ProductRow(NamedTuple):
    """A matrix product [batch, m, k] x [batch, k, n].

    `order` says how the operands lie in memory: `nn` as written, `nt` with the second one
    transposed (a gradient of an input), `tn` with the first one transposed (of a weight).
    """

    dtype: str
    processes: Count
    batch: Count
    m: Count
    n: Count
    k: Count
    order: Literal["nn", "nt", "tn"]
    us: Positive


class AttentionRow(NamedTuple):
    """Fused attention: `op` is `sdpa` (PyTorch's) or `gridformer` (its own, with dropout)."""

    op: str
    dtype: str
    processes: Count
    batch: Count
    heads: Count
    queries: Count
    keys: Count
    width: Count
    causal: bool
    backward: bool
    us: Positive


class MemoryRow(NamedTuple):
    """A memory-bound kernel, by the name of torch's operator; `bytes` are read and written."""

    op: str
    dtype: str
    processes: Count
    bytes: Positive
    us: Positive


class MessageRow(NamedTuple):
    """A message, while all groups of the same kind send theirs (`messages.MessageWork`).

    `nodes` is the number of nodes that a group spans, and `sharers` the number of groups that share
    a link.
    """

    op: str
    processes: Count
    members: Annotated[int, Field(ge=2)]
    nodes: Count
    sharers: Count
    bytes: Positive
    us: Positive


class HostRow(NamedTuple):
    """The time that Python adds to each operator of a training step, and to each step."""

    processes: Count
    launch_us: Positive
    step_us: Positive


class Tables(BaseModel):
    """Measurements; a table without rows says nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = ""  # the command, the date, the device and the version of torch
    products: tuple[ProductRow, ...] = ()
    attention: tuple[AttentionRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    messages: tuple[MessageRow, ...] = ()
    host: tuple[HostRow, ...] = ()

    @cached_property
    def _fields(self) -> dict[tuple[object, ...], _Field]:
        """The times of each kind of work."""
        fields: dict[tuple[object, ...], _Field] = defaultdict(_Field)
        for p in self.products:
            place = p.batch, p.m, p.n, p.k
            fields["product", p.dtype, p.order].add(p.processes, place, p.us)
        for a in self.attention:
            kind, place = (a.op, a.dtype, a.causal), (a.batch * a.heads, a.queries, a.keys, a.width)
            fields["attention", *kind, a.backward].add(a.processes, place, a.us)
        for m in self.memory:
            fields["memory", m.op, m.dtype].add(m.processes, (m.bytes,), m.us)
        return dict(fields)

    def product_s(
        self, processes: int, dtype: str, shape: Sequence[int], order: str = ""
    ) -> float | None:
        """Returns the seconds of a product (batch, m, n, k), or None without rows of its data type.

        Without an order, or if there are no rows of it, that is the mean over all orders.
        """
        known = {o: self._fields.get(("product", dtype, o)) for o in ("nn", "nt", "tn")}
        fields = [known[order]] if known.get(order) else [*known.values()]
        times = [field.at_a_rate(processes, shape) for field in fields if field]
        return sum(times) / len(times) if times else None

    def attention_s(
        self, processes: int, dtype: str, shape: Sequence[int], backward: bool, op: str = "sdpa"
    ) -> float | None:
        """Returns the seconds of fused attention, or None if there are no such rows.

        The shape is (batch, heads, queries, keys, width, hides), as in `costs.KernelWork`.
        """
        batch, heads, *rest, hides = shape
        kinds = (("attention", one, dtype, bool(hides), backward) for one in (op, "sdpa"))
        field = next((self._fields[kind] for kind in kinds if kind in self._fields), None)
        return field.at_a_rate(processes, (batch * heads, *rest)) if field else None

    def memory_s(self, processes: int, op: str, n_bytes: float, dtype: str = "") -> float | None:
        """Returns the seconds of a memory-bound kernel, or None if there are no rows.

        An operator that was not measured takes the time of `add`, and a data type any other.
        """
        measured = [kind for kind in self._fields if kind[0] == "memory"]
        kinds = [kind for kind in measured if kind[1] == op]
        kinds = kinds or [kind for kind in measured if kind[1] == "add"] or measured
        if not kinds:
            return None
        kind = next((one for one in kinds if one[2] == dtype), kinds[0])
        size = max(n_bytes, 1.0)  # an empty tensor takes a call, too

        def at(times: Times) -> float:
            return _along(size, {place[0]: us for place, us in times.items()}, floor=0.5)

        return self._fields[kind].seconds(processes, (size,), at)

    def message_s(
        self, processes: int, op: str, members: int, nodes: int, sharers: int, n_bytes: float
    ) -> float | None:
        """Returns the seconds of a message, as in `MessageRow`, or None if none was measured."""
        times: dict[int, dict[int, dict[float, float]]] = {}  # by processes, members and bytes
        for r in self.messages:
            if r.op == op and r.nodes == nodes and (nodes == 1 or r.sharers == sharers):
                times.setdefault(r.processes, {}).setdefault(r.members, {})[r.bytes] = r.us
        if not times:
            return None
        by_processes = {
            n: _along(members, {m: _along(n_bytes, us, floor=1.0) for m, us in some.items()})
            for n, some in times.items()
        }
        return _along(processes, by_processes) / 1e6

    def host_s(self, processes: int) -> tuple[float, float] | None:
        """Returns the host's seconds per operator and per step, or None if there are no rows."""
        if not self.host:
            return None
        launch = {row.processes: row.launch_us for row in self.host}
        step = {row.processes: row.step_us for row in self.host}
        return _along(processes, launch) / 1e6, _along(processes, step) / 1e6


Times = dict[tuple[float, ...], float]  # microseconds by place


class _Field:
    """Times at measured places, interpolated between them.

    Where many processes share the cores, only some places were measured. Their slowdown, relative
    to the number of processes with which most places were measured, is interpolated, too.
    """

    def __init__(self) -> None:
        self.by_count: dict[int, Times] = {}

    def add(self, processes: int, place: tuple[float, ...], us: float) -> None:
        self.by_count.setdefault(processes, {})[place] = us

    def at_a_rate(self, processes: int, place: Sequence[float]) -> float:
        """Returns the seconds of work whose amount is the product of its sizes."""
        work = math.prod(place)

        def at(times: Times) -> float:
            rates = {where: math.prod(where) / us for where, us in times.items()}
            return work / _nearest(tuple(place), rates)

        return self.seconds(processes, tuple(place), at) if work else 0.0

    def seconds(
        self, processes: int, place: tuple[float, ...], at: Callable[[Times], float]
    ) -> float:
        """Returns the seconds at a place.

        `at` returns the microseconds there from the times with one number of processes.
        """
        most, by_count = max(map(len, self.by_count.values())), {}
        for count, times in self.by_count.items():
            whole = [c for c, t in self.by_count.items() if c < count and len(t) == most]
            base = self.by_count[max(whole)] if whole and len(times) < most else {}
            slowdown = {where: times[where] / base[where] for where in times if where in base}
            by_count[count] = at(base) * _nearest(place, slowdown) if slowdown else at(times)
        return _along(processes, by_count) / 1e6


def _nearest(place: tuple[float, ...], values: dict[tuple[float, ...], float]) -> float:
    """Interpolates positive values between the nearest places, all on logarithmic scales."""
    distances = {  # squared
        where: sum(math.log(x / y) ** 2 for x, y in zip(place, where)) for where in values
    }
    near = sorted((distance, values[where]) for where, distance in distances.items())[:_NEAREST]
    if near[0][0] < 1e-9:
        return near[0][1]
    weights = [1.0 / distance**2 for distance, _ in near]
    mean = sum(w * math.log(value) for w, (_, value) in zip(weights, near)) / sum(weights)
    return math.exp(mean)


def _along(x: float, points: dict[Any, float], floor: float | None = None) -> float:
    """Interpolates positive values along one positive number, on logarithmic scales.

    Below the first point the value shrinks no further than to `floor` of it, or not at all. Beyond
    the last point it grows in proportion.
    """
    known = sorted(points.items())
    first, last = known[0], known[-1]
    if x <= first[0]:
        return first[1] if floor is None else first[1] * max(floor, x / first[0])
    if x >= last[0]:
        return last[1] * x / last[0]
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
    raise AssertionError("unreachable")
