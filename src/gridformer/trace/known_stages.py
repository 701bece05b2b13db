"""The passes of stages that some ranks have run, for other ranks that have equal stages.

Most ranks of a pipeline have stages of a few kinds, in different combinations: the first rank has
the embedding and then the same stages as the second one. So what a rank records of a stage
(gridformer.trace.repeat) serves the ranks that are traced after it, too. This holds for passes that
wait for nothing but what they start themselves; the others run on each rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gridformer.trace.events import Event, Start, Trace, Wait
from gridformer.trace.recorded_pass import PassMessages, RecordedPass, plain
from gridformer.trace.shape import Shape
from gridformer.trace.translation import translation

# Numbers of the messages of known passes begin here, and each stage has as many. So they are none
# of the numbers that a rank gives its own messages.
_FIRST, _EACH = 1 << 40, 1 << 30


@dataclass(frozen=True)
class KnownStage:
    """The passes of a stage, recorded on some rank.

    Attributes:
        trace: The trace of that rank, whose groups the messages name.
        passes: The passes, by their direction and by `PassKind.which`.
        begun: The gradients that the first backward pass makes, by the number of the parameter.
    """

    trace: Trace
    passes: Mapping[tuple[str, str], RecordedPass]
    begun: Sequence[Shape | None]

    def on(self, trace: Trace) -> KnownStage | None:
        """Returns the same stage on another rank; None if the rank lacks a group."""
        events = [event for one in self.passes.values() for event in one.events]
        translated = translation(self.trace, trace, events)
        if translated is None:
            return None
        passes = {
            key: replace(one, events=translated(one.events)) for key, one in self.passes.items()
        }
        return KnownStage(trace, passes, self.begun)


@dataclass
class KnownStages:
    """The stages that ranks of a run have recorded so far, by their content.

    Use one object only for ranks at the same place in their stages, because ranks at other places
    may send other messages.
    """

    _stages: dict[Hashable, KnownStage] = field(default_factory=dict)

    def on(self, content: Hashable, trace: Trace) -> KnownStage | None:
        """Returns the stage with some content on another rank, if it is known.

        Args:
            content: The content, see `gridformer.trace.which_passes`.
            trace: The trace of the rank, which has all its groups.
        """
        found = self._stages.get(content)
        return None if found is None else found.on(trace)

    def add(self, content: Hashable, stage: KnownStage) -> None:
        """Adds a stage, unless it is known or a pass waits for what others start."""
        messages = [PassMessages.of(plain(one.events)) for one in stage.passes.values()]
        if content in self._stages or any(one.before or one.after for one in messages):
            return
        first = _FIRST + len(self._stages) * _EACH
        passes = {
            key: replace(one, events=_numbered_from(first, one.events))
            for key, one in stage.passes.items()
        }
        self._stages[content] = replace(stage, passes=passes)


def _numbered_from(first: int, events: Sequence[Event]) -> tuple[Event, ...]:
    return tuple(
        event._replace(number=first + event.number) if isinstance(event, Start | Wait) else event
        for event in events
    )
