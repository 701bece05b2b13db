"""How many tokens each expert gets in a record, whose tensors have no values.

It is stated: every expert gets as many, or shares that a run has measured (`--routing FILE`).
Estimates are those of the device with the most tokens, for which the others wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from gridformer.config import RunConfig
from gridformer.utils.errors import ConfigError
from gridformer.utils.files import UnreadableError, read_text
from gridformer.utils.units import GIB

METRICS = "metrics.jsonl"


class Routing(NamedTuple):
    """The share of all tokens of each expert; none if they are equal."""

    shares: tuple[float, ...] = ()
    source: str = "as many tokens for every expert"
    file: str = ""

    def sizes(self, rows: int, experts: int, devices: int) -> list[int]:
        """Returns how many of a device's rows go to each device, and how many come from each.

        All devices send as many, and this one has the experts with the most tokens.

        Raises:
            ConfigError: The shares are those of another number of experts.
        """
        shares = self.shares or (1 / experts,) * experts
        if len(shares) != experts:
            raise ConfigError(
                f"--routing {self.file}: it has shares of {len(shares)} experts, and the model "
                f"has n_experts={experts}"
            )
        each = -(-experts // devices)
        ends = [0, *accumulate(sum(shares[i * each : (i + 1) * each]) for i in range(devices))]
        sends = [round(rows * b) - round(rows * a) for a, b in pairwise(ends)]
        return sends + [max(sends)] * devices


BALANCED = Routing()
# What the records of a command assume.
stated: ContextVar[Routing] = ContextVar("routing", default=BALANCED)


def measured_routing(path: Path) -> Routing:
    """Returns the shares in the last line of a run's metrics that has any, of its typical layer.

    That is the layer whose fullest expert is nearest to the mean of all layers' fullest ones.

    Args:
        path: The run directory, or the file metrics.jsonl in it.

    Raises:
        ConfigError: There are none.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        lines = read_text(file, GIB).splitlines()
    except UnreadableError as error:
        raise ConfigError(f"--routing {path}: {error}") from None
    for line in reversed(lines):
        layers = _shares_in(line)
        if layers:
            fullest = [max(layer) for layer in layers]
            mean = sum(fullest) / len(fullest)
            number = min(range(len(layers)), key=lambda i: abs(fullest[i] - mean))
            total = sum(layers[number])
            said = f"shares that {path} has measured, on the device with the most tokens"
            return Routing(tuple(one / total for one in layers[number]), said, str(path))
    raise ConfigError(f"--routing {path}: no line of it has shares of experts")


def _shares_in(line: str) -> Sequence[Sequence[float]]:
    """Returns the shares of experts of each layer in a line; none if it has none."""
    try:
        layers = json.loads(line).get("experts")
        each = [[float(share) for share in layer] for layer in layers or ()]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return []
    sound = all(layer and min(layer) >= 0 and 0 < sum(layer) < 2 for layer in each)
    return each if sound and len({len(layer) for layer in each}) == 1 else []


def routing_notes(run: RunConfig) -> list[str]:
    """Returns a sentence that says what the estimates of a run assume, if it has experts."""
    if not run.model.n_experts:
        return []
    return [f"routing: {stated.get().source}"]
