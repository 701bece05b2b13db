"""Shows the layouts that a search has found: as a table with reasons, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.config import LayoutConfig, RunConfig, TrainConfig
from gridformer.plan.advice import Advice
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Found, Result
from gridformer.utils.units import format_setting

EXPLAINED = 3  # layouts whose reasons the command prints; --json has those of all
# What a plan states of the section `train`, besides what differs from the defaults.
STATED = ("global_batch", "dtype", "recompute")


def print_result(
    run: RunConfig, result: Result, advice: Sequence[Advice], cluster: str, console: Console
) -> None:
    """Prints the ranking, and the reasons for the first layouts.

    Args:
        run: The run that was asked for.
        result: What was found.
        advice: The advice for each layout.
        cluster: The cluster's name.
        console: Where to print.
    """
    n, listed = result.layouts[0].run.layout.n_processes, len(result.layouts)
    n_traces = listed + len(result.refused)
    traces = f"{n_traces} traces" if n_traces > 1 else "1 trace"
    console.print(
        Text(
            f"{run.model.name} on {n} devices of {cluster}, {run.train.global_batch} sequences of "
            f"{run.seq_len} tokens a step, {run.train.dtype}: the "
            f"{f'{listed} fastest' if listed > 1 else 'fastest'} of {result.n_arrangements} "
            f"arrangements ({result.n_estimates} estimates, {traces}, {result.seconds:.1f} s)"
        )
    )
    _print_table(result.layouts, console)
    for sentence in unlisted(result):
        console.print(Text(sentence))
    explained = result.layouts[:EXPLAINED]
    common = common_warnings(explained)
    for number, (found, why) in enumerate(zip(explained, advice), start=1):
        console.print(Text(f"\n{number}. {found.name}", style="bold"))
        console.print(Text(f"   {settings_between(run, found.run)}"), soft_wrap=True)
        for sentence in why.sentences:
            console.print(Text(f"   {sentence}"), soft_wrap=True)
        for warning in layout_warnings(found):
            if warning not in common:
                console.print(Text(f"   Warning: {warning}"), soft_wrap=True)
    if common:
        console.print(Text("\nFor all of these:", style="bold"))
    for warning in common:
        console.print(Text(f"   Warning: {warning}"), soft_wrap=True)


def unlisted(result: Result) -> list[str]:
    """Returns sentences about the layouts that are not listed, and why not."""
    sentences = []
    for one in result.refused:
        assert one.prediction is not None, "its trace has shown that it does not fit"
        sentences.append(
            f"Left out: {one.name} does not fit when it is traced, with "
            f"{one.prediction.peak_gib:.1f} of {one.prediction.limit_gib:.1f} GiB."
        )
    if result.passed_over:
        some = ", ".join(one.name for one in result.passed_over[:3])
        more = len(result.passed_over) - 3
        names = f"{some} and {more} more" if more > 0 else some
        sentences.append(f"Not traced, because by the same factor these would not fit: {names}.")
    if result.untraced:
        text = "; ".join(f"{one.name} {one.step_s:.4g} s" for one in result.untraced)
        sentences.append(
            f"There was no time to trace these, by estimate: {text}. --seconds gives more time."
        )
    return sentences


def layout_warnings(found: Found) -> list[str]:
    """Returns what makes the prediction of a layout less certain."""
    return found.prediction.warnings if found.prediction else []


def common_warnings(layouts: Sequence[Found]) -> list[str]:
    """Returns the warnings that all of some layouts have."""
    of_all = set.intersection(*(set(layout_warnings(found)) for found in layouts))
    return [warning for warning in layout_warnings(layouts[0]) if warning in of_all]


@dataclass(frozen=True)
class _Column:
    """A column of the table after that of the layouts, of which the first one always stays.

    Attributes:
        head: Its two lines of heading.
        cells: A text for each layout.
        leaves: Which columns leave first where there is no room for all: those of small numbers.
        justify: How the texts are aligned.
    """

    head: str
    cells: tuple[str, ...]
    leaves: int
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """The width, with the space before it."""
        return 1 + max(map(len, (*self.head.split("\n"), *self.cells)))


def _columns(layouts: Sequence[Found]) -> list[_Column]:
    rows, settings = [], []
    for found in layouts:
        prediction = found.prediction
        assert prediction is not None, "only traced layouts are listed"
        row = (
            f"{prediction.step_s:.4g}",
            f"{prediction.model_tflops_per_device:.3g}",
            f"{prediction.peak_gib:.1f}",
            f"{prediction.exposed_communication_s:.3g}",
            f"{hidden_s(prediction):.3g}",
            f"{prediction.bubble_s:.3g}",
        )
        rows.append(row)
        settings.append((str(found.run.layout.micro_batches), found.run.train.recompute))
    step, tflops, gib, messages, hidden, bubbles = zip(*rows)
    micro_batches, recompute = zip(*settings)
    return [
        _Column("s a\nstep", step, 8),
        _Column("TFLOP/s\na device", tflops, 4),
        _Column("\nGiB", gib, 7),
        _Column("s in\nmessages", messages, 3),
        _Column("\nhidden", hidden, 1),
        _Column("s in\nbubbles", bubbles, 2),
        _Column("micro-\nbatches", micro_batches, 6),
        _Column("\nrecompute", recompute, 5, "left"),
    ]


def _print_table(layouts: Sequence[Found], console: Console) -> None:
    """Prints the table with the columns that there is room for; a file has room for all.

    The names of layouts stay whole: they break at spaces if even the first column is too much.
    """
    columns = _columns(layouts)
    left = sorted(columns, key=lambda column: column.leaves)
    name = max(len("layout"), *(len(found.name) for found in layouts))
    if console.is_terminal:
        while len(left) > 1 and name + sum(column.width for column in left) > console.width:
            left.pop(0)
    shown = [column for column in columns if column in left]
    width = name + sum(column.width for column in shown)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.width = min(width, console.width) if console.is_terminal else width
    table.add_column("\nlayout", overflow="fold")
    for column in shown:
        table.add_column(column.head, justify=column.justify, no_wrap=True)
    for found, *cells in zip(layouts, *(column.cells for column in shown)):
        table.add_row(Text(found.name), *cells)
    console.print(table, crop=False)
    if heads := [column.head for column in columns if column not in shown]:
        names = ", ".join(" ".join(head.split()).replace("- ", "-") for head in heads)
        console.print(Text(f"Left out for lack of room: {names}. A wider terminal shows them."))


def hidden_s(prediction: Prediction) -> float:
    """Returns the seconds in which messages of the slowest rank travel while it computes."""
    return sum(prediction.parts.hidden.values())


def layout_of(run: RunConfig) -> dict[str, Any]:
    """Returns the section `layout` of a run without values that are defaults."""
    return {"scheme": run.layout.scheme} | run.layout.model_dump(mode="json", exclude_defaults=True)


def train_of(run: RunConfig) -> dict[str, Any]:
    """Returns what a plan sets in the section `train` of a run."""
    values = run.train.model_dump(mode="json")
    plain = TrainConfig().model_dump(mode="json")
    return {key: v for key, v in values.items() if key in STATED or v != plain[key]}


def settings_of(run: RunConfig) -> str:
    """Returns the layout and training settings of a run as command-line overrides."""
    plain = LayoutConfig().model_dump(mode="json")
    layout = {key: value for key, value in layout_of(run).items() if value != plain[key]}
    sections = {"layout": layout or {"scheme": "single"}, "train": train_of(run)}
    return " ".join(
        format_setting(f"{section}.{key}", value)
        for section, values in sections.items()
        for key, value in values.items()
    )


def settings_between(asked: RunConfig, found: RunConfig) -> str:
    """Returns the settings of a layout that differ from the run that was asked for, as overrides.

    Without any the run has this layout already, and the words say so.
    """
    changes = []
    for section in ("layout", "train"):
        before = getattr(asked, section).model_dump(mode="json")
        after = getattr(found, section).model_dump(mode="json")
        changes += [
            format_setting(f"{section}.{key}", value)
            for key, value in after.items()
            if value != before[key]
        ]
    return " ".join(changes) or "This is the run's own layout."


def ranking_as_json(
    result: Result, advice: Sequence[Advice], remedies: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what `--json` prints.

    Args:
        result: The result of the search.
        advice: The advice for each of its layouts.
        remedies: Sentences on what would fit, if no layout does.
    """
    layouts: list[dict[str, Any]] = []
    for found, why in zip(result.layouts, advice):
        assert found.prediction is not None, "only traced layouts are listed"
        layouts.append(
            found.prediction.to_json()
            | {
                "name": found.name,
                "layout": layout_of(found.run),
                "train": train_of(found.run),
                "why": why.sentences,
                "where": why.shares,
                "hidden": why.hidden,
                "change": dict(why.best.settings) if why.best else None,
                "change_traced": why.best.traced if why.best else None,
                "estimated_step_s": found.estimate.step_s,
            }
        )
    return {
        "layouts": layouts,
        "remedies": list(remedies),
        "refused": [_unlisted(found) for found in result.refused],
        "passed_over": [_unlisted(found) for found in result.passed_over],
        "untraced": [_unlisted(found) for found in result.untraced],
        "arrangements": result.n_arrangements,
        "estimates": result.n_estimates,
    }


def _unlisted(found: Found) -> dict[str, Any]:
    """Returns what is known of a layout that is not listed; None stands for what was not traced."""
    prediction, estimate = found.prediction, found.estimate
    return {
        "name": found.name,
        "layout": layout_of(found.run),
        "train": train_of(found.run),
        "estimated_step_s": estimate.step_s,
        "estimated_peak_gib": estimate.peak_gib,
        "step_s": prediction.step_s if prediction else None,
        "peak_gib": prediction.peak_gib if prediction else None,
        "limit_gib": estimate.limit_gib,
    }
