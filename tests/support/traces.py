"""Traces in a form in which those of a composed and of a complete step can be compared."""

from gridformer.record import Start, Trace, Wait
from gridformer.record.events import Kernel, Read

Single = Start | Wait | Kernel | Read


def comparable(trace: Trace) -> list[Single]:
    """Return the events with messages numbered in order, without names of modules and groups."""
    assert trace.complete, trace.troubles
    purposes = {member.name: member.purpose for member in trace.own}
    numbers: dict[int, int] = {}

    def plain(event: Single) -> Single:
        event = event._replace(place=event.place._replace(module=""))
        if isinstance(event, Start):
            numbers[event.number] = len(numbers)
            group = purposes.get(event.group, event.group.partition(" [")[0])
            event = event._replace(group=group)
        if isinstance(event, Start | Wait):
            event = event._replace(number=numbers[event.number])
        return event

    return [plain(event) for event in trace.unfolded()]
