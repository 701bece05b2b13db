"""What ranks tell each other about a hang, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gridformer.comm.progress_file import Lane, Message, State, WaitingMessage
from gridformer.launch.boards import Report
from gridformer.launch.hang import Seen


def to_json(state: State) -> dict[str, Any]:
    """Returns a state as JSON."""
    wait = state.wait
    return {
        "pid": state.pid,
        "step": state.step,
        "wait": wait
        and {"lane": wait.lane.key, "number": wait.number, **asdict(wait.message)}
        | {"seconds": round(wait.seconds, 3)},
        "lanes": [_lane_to_json(lane) for lane in state.lanes.values()],
        "beat_s": round(state.beat_s, 3),
        "stack": state.stack.splitlines(),
        "stack_s": round(state.stack_s, 3),
    }


def from_json(data: Mapping[str, Any]) -> State:
    """Returns the state that `to_json` has written."""
    lanes = {lane.key: lane for lane in map(_lane_from_json, data["lanes"])}
    wait = None
    if (found := data["wait"]) is not None:
        lane = lanes[tuple(found["lane"])]
        wait = WaitingMessage(lane, found["number"], _message(found), found["seconds"])
    return State(
        pid=data["pid"],
        step=data["step"],
        wait=wait,
        lanes=lanes,
        beat_s=data["beat_s"],
        stack="\n".join(data["stack"]),
        stack_s=data["stack_s"],
    )


def ranks_of(reports: Mapping[int, Report], size: int) -> dict[int, Seen]:
    """Returns what is known of each rank, from what those that answered have told.

    Args:
        reports: The reports of the ranks that answered, by rank. They also tell of their neighbors.
        size: The number of ranks.
    """
    told: dict[int, tuple[str, dict[str, Any]]] = {}
    for report in reports.values():
        for rank, neighbor in report.get("neighbors", {}).items():
            told.setdefault(int(rank), (report["host"], neighbor))
    return {rank: _seen(rank, reports.get(rank), told.get(rank)) for rank in range(size)}


def _seen(rank: int, report: Report | None, told: tuple[str, dict[str, Any]] | None) -> Seen:
    if report is not None:
        return Seen(
            rank,
            "answers",
            from_json(report["state"]),
            report["host"],
            report["module"],
            report["moved"],
            report["cpu"],
            tuple(report["stack"]),
        )
    if told is None:
        return Seen(rank, "silent")
    host, neighbor = told
    state = from_json(neighbor["state"]) if neighbor["state"] else None
    stack = tuple(state.stack.splitlines()) if state else ()
    return Seen(rank, neighbor["status"], state, host, stack=stack)


def _lane_to_json(lane: Lane) -> dict[str, Any]:
    return {
        "group": lane.group,
        "kind": lane.kind,
        "peer": lane.peer,
        "ranks": lane.ranks,
        "started": lane.started,
        "ended": lane.ended,
        "recent": [{"number": n, **asdict(message)} for n, message in lane.recent.items()],
    }


def _lane_from_json(data: Mapping[str, Any]) -> Lane:
    return Lane(
        data["group"],
        data["kind"],
        data["peer"],
        tuple(data["ranks"]),
        data["started"],
        data["ended"],
        {found["number"]: _message(found) for found in data["recent"]},
    )


def _message(data: Mapping[str, Any]) -> Message:
    return Message(data["op"], data["axis"], data["label"], data["size"])
