"""The record of one rank: its messages, its waits, what it reads back, and the kernels it launches.

On a GPU a wait does not stop the host but the stream of the computation, and everything that is
launched after it. For the order of messages the two are the same: a message that is started after
a wait begins only when that wait is over.

Events are named tuples, because there are hundreds of thousands of them in deep pipelines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gridformer.utils.errors import UserError


class Place(NamedTuple):
    """Where in the code of gridformer something happens.

    Attributes:
        file: The file, such as `parallel/tensor/linear.py`.
        module: The module of the model that runs, such as `layers.3.attention`; it may be empty.
        backward: Whether it happens in a backward pass. The line may then be that of the operation
            whose backward pass it is.
    """

    file: str
    line: int
    function: str
    module: str = ""
    backward: bool = False

    def __str__(self) -> str:
        module = f", module {self.module}" if self.module else ""
        backward = ", backward pass" if self.backward else ""
        return f"{self.file}:{self.line} in {self.function}{module}{backward}"


class Part(NamedTuple):
    """One direction of a point-to-point message with the global rank at the other end."""

    what: Literal["send", "recv"]
    peer: int
    size: int
    dtype: str


class Start(NamedTuple):
    """A rank starts a message of a group.

    Attributes:
        number: Identifies the message on this rank.
        op: The collective, such as `all_reduce`, or `p2p`.
        group: The name of the group, which is the same on all its members.
        ranks: The global ranks of the group.
        label: The purpose of the message.
        size: For a collective, the number of elements of the tensor that this rank passes in; 0 for
            p2p.
        dtype: The type of these elements.
        how: What else must be equal on all members: the operation of a reduction, or the root.
        parts: For p2p, the messages that are posted together.
        pieces: For an all-to-all, the numbers of elements sent to each member, and received.
    """

    number: int
    op: str
    group: str
    ranks: tuple[int, ...]
    place: Place
    axis: str = ""
    label: str = ""
    size: int = 0
    dtype: str = ""
    how: str = ""
    parts: tuple[Part, ...] = ()
    pieces: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def numbered(self, number: int) -> Start:
        """Returns the same with another number, in half the time that `_replace` takes."""
        return tuple.__new__(Start, (number, *self[1:]))

    @property
    def like(self) -> tuple[object, ...]:
        """What is equal for messages that are waited for in the order of their starts."""
        return self[1:4] + self[5:]  # all but its number and where it happens


class Wait(NamedTuple):
    """A rank waits for the message that it has started with a number."""

    number: int
    place: Place


class Awaited(NamedTuple):
    """A wait for a message, in whatever step it occurs.

    Attributes:
        like: `Start.like` of the message.
        nth: How many like it have been started before it and are still waited for.
    """

    like: Hashable
    nth: int
    place: Place


class Held(NamedTuple):
    """Memory is allocated or freed.

    Attributes:
        n_bytes: By how many bytes the memory in use grows.
        kind: One of `gridformer.record.step.KINDS`; until the step is over, the tracker's entry.
        doing: What runs.
    """

    n_bytes: int
    kind: Any
    doing: str


class Read(NamedTuple):
    """The host reads something back from the device, for which it waits until all kernels are done.

    It copies a tensor to the host's memory, or reads a value. It may be `needed`, such as the sizes
    of messages that depend on the data.
    """

    place: Place
    copies: bool = False
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a GPU or NCCL refuses, which this rank's code alone shows.

    Attributes:
        kind: `device`, `contiguity`, `size`, `error`, or `untraced` if only a trace has the error.
        text: What is wrong.
        axis: The name of the axis of the message; empty if there is none.
    """

    kind: str
    text: str
    place: Place
    axis: str = ""


class Groups(NamedTuple):
    """Process groups that are created one after the other for the same purpose.

    Attributes:
        purpose: What they are for, such as the name of their axis.
        content: A number that differs if their ranks do.
    """

    purpose: str
    n: int
    content: int


class Member(NamedTuple):
    """A group of this rank: its name on all its members, its purpose, and its global ranks."""

    name: str
    purpose: str
    ranks: tuple[int, ...]


class Kernel(NamedTuple):
    """The work that one operator launches on the device.

    Attributes:
        op: The operator, such as `mm` or `gelu`.
        kind: `product`, `attention`, `copy` between the host and a GPU, or `memory`, which is
            everything else.
        shape: For a product (batch, m, n, k); for attention (batch, heads, queries, keys, width,
            hides), where hides is 0 without a mask, 1 if it is causal, and more if a query sees at
            most that many keys, of which its own is the last.
        dtype: The type of its factors, or of what it writes.
        flop: Its floating-point operations; 0 unless it is a product or attention.
        bytes: The bytes that it reads and writes, or copies.
        place: The module and the direction; the file is empty.
        order: For a product, `n` or `t` for each factor: whether its rows lie in memory one after
            the other or its columns do.
        update: Whether it belongs to the update after the backward passes.
    """

    op: str
    kind: Literal["product", "attention", "memory", "copy"]
    shape: tuple[int, ...]
    dtype: str
    flop: int
    bytes: int
    place: Place = Place("", 0, "")
    order: str = ""
    launches: int = 1
    update: bool = False


SingleEvent = Start | Wait | Kernel | Read


@dataclass(slots=True, eq=False)
class Passed:
    """A part of a step that occurs several times, such as a pass.

    Attributes:
        events: What happens. All occurrences share this object. The messages that it starts are
            numbered from 0 on, and others for which it waits from -1 downward.
        first: The number on this rank of the first message that it starts.
        others: The numbers on this rank of the others for which it waits.
        closed: Whether it waits for what it starts, and for nothing else.
    """

    events: tuple[SingleEvent, ...]
    first: int
    others: Sequence[int] = ()
    closed: bool = False

    def number(self, own: int) -> int:
        """Returns the number on this rank of a message that has a number in `events`."""
        return self.first + own if own >= 0 else self.others[~own]

    def unfolded(self) -> Iterator[SingleEvent]:
        """Yields its events with the numbers of this rank."""
        for event in self.events:
            if isinstance(event, Start):
                yield event.numbered(self.number(event.number))
            elif isinstance(event, Wait):
                yield Wait(self.number(event.number), event.place)
            else:
                yield event


Event = SingleEvent | Passed


@dataclass
class Trace:
    """The record of one rank in an optimizer step.

    Attributes:
        groups: The groups that are created, in order, including those of other ranks.
        own: The groups of this rank, in order.
        events: Messages and waits, in order. Where kernels are recorded, also these and the values
            that are read back, and parts that are repeated.
        reads: Values that are read back from the device.
        troubles: The actions that a GPU or NCCL would refuse. If the code raised an error, the last
            one says which.
        complete: Whether the step came to its end.
        update: The number of the event with which the update begins, after all passes.
    """

    rank: int
    groups: list[Groups] = field(default_factory=list)
    own: list[Member] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    complete: bool = False
    update: int = 0

    @property
    def failure(self) -> UserError:
        """The error to raise if the step did not come to its end."""
        return UserError(
            f"the step of rank {self.rank} fails: {self.troubles[-1].text}; "
            "`gridformer check` says more"
        )

    def unfolded(self, once: bool = False) -> Iterator[SingleEvent]:
        """Yields the events, also those of parts, one by one.

        Args:
            once: Whether a part that waits for all that it starts, and for nothing else, is left
                out when it occurs again.
        """
        seen: set[int] = set()
        for event in self.events:
            if not isinstance(event, Passed):
                yield event
            elif not (once and event.closed and id(event.events) in seen):
                seen.add(id(event.events))
                yield from event.unfolded()
