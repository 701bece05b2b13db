"""ZeRO-3 as DeepSpeed of 2021 ran it, simulated on the record of gridformer's `dp_mode: fsdp`.

What DeepSpeed did then is known from its issue 1069 and its pull request 1188: a layer's parameters
were gathered by one all-gather each, and a `torch.cuda.synchronize()` before each of them let no
message travel beside a computation. It summed gradients in 16 bits. gridformer gathers a layer in
one message, while the layer before it computes, and sums float16's gradients in float32.
"""

from __future__ import annotations

from dataclasses import replace

from gridformer.plan.recorded import Recorded
from gridformer.trace.events import Event, Start, Trace, Wait

# The parameters of a layer of GPT-2 in units of h, as (units of h squared, units of h): the norms,
# then weights and biases of QKV, the output projection and the two products of the feed-forward.
_LAYER = (
    *((0, 1), (0, 1), (0, 1), (0, 1)),
    *((3, 0), (0, 3), (1, 0), (0, 1)),
    *((4, 0), (0, 4), (4, 0), (0, 1)),
)


def as_deepspeed(recorded: Recorded) -> Recorded:
    """Returns the record of a step with FSDP as DeepSpeed of 2021 would have sent its messages."""
    model = recorded.run.model
    traces, shorter = (
        [of_deepspeed(trace, model.hidden_size) for trace in some]
        for some in (recorded.traces, recorded.shorter)
    )
    earlier = as_deepspeed(recorded.earlier) if recorded.earlier else None
    return replace(recorded, traces=traces, shorter=shorter, earlier=earlier)


def of_deepspeed(trace: Trace, hidden: int) -> Trace:
    """Returns a trace whose messages over `dp` end where they begin, one for each parameter."""
    events: list[Event] = []
    update, ended = trace.update, set[int]()
    fresh = 1 + max((one.number for one in trace.unfolded() if isinstance(one, Start)), default=0)
    for number, event in enumerate(trace.events):
        if number == trace.update:
            update = len(events)
        if isinstance(event, Wait) and event.number in ended:
            continue
        if not isinstance(event, Start) or event.axis != "dp":
            events.append(event)
            continue
        ended.add(event.number)
        for part in _parts(event, hidden, fresh):
            events += [part, Wait(part.number, part.place)]
            fresh = max(fresh, part.number + 1)
    return replace(trace, events=events, update=update)


def _parts(start: Start, hidden: int, fresh: int) -> list[Start]:
    if start.op == "reduce_scatter":
        return [replace(start, dtype="float16")]
    sizes = [a * hidden**2 + b * hidden for a, b in _LAYER]
    n = len(start.ranks)
    # A layer's message carries its parameters, but for a bias or two, and some padding.
    off = abs(start.size * n - sum(sizes))
    is_layer = start.label == "parameters" and off < sum(sizes) / 100
    if not is_layer:
        return [start]
    shares = [-(-size // n) for size in sizes]
    return [
        replace(start, number=fresh + number, size=share) for number, share in enumerate(shares)
    ]
