"""Shows the layouts that a search has found: as a table with reasons, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig, TrainConfig
from gridformer.plan.advice import Advice, seconds_of
from gridformer.plan.prediction import Prediction
from gridformer.plan.price import doubts, sureness
from gridformer.plan.search import REPLICAS, Found, Result, sharding
from gridformer.utils.units import format_setting

EXPLAINED = 3  # layouts whose reasons the command prints besides those that were asked for
ROWS_ALONE = (
    "Rows alone (r x 1): weights are sharded over the rows and gathered for each product, as FSDP "
    "does, but within one replica. Only 2-D grids shard weights in two dimensions."
)
# What a plan states of the section `train`, besides what differs from the defaults.
STATED = ("global_batch", "dtype", "recompute")


def print_result(
    run: RunConfig, result: Result, advice: Sequence[Advice], cluster: Cluster, console: Console
) -> None:
    """Prints the ranking, and the reasons for the first layouts.

    Args:
        run: The run that was asked for.
        result: What was found.
        advice: The advice for each layout that is listed.
        cluster: The machine.
        console: Where to print.
    """
    listed, n = result.listed, result.layouts[0].run.layout.n_processes
    fastest, n_traces = len(result.layouts[: result.top]), len(result.layouts + result.refused)
    traces = f"{n_traces} layouts that were traced" if n_traces > 1 else "1 layout that was traced"
    console.print(
        Text(
            f"{run.model.name} on {n} devices of {cluster.name}, {run.train.global_batch} "
            f"sequences of {run.seq_len} tokens a step, {run.train.dtype}: the "
            f"{f'{fastest} fastest' if fastest > 1 else 'fastest'} of {traces}, of "
            f"{result.n_arrangements} arrangements ({result.n_estimates} estimates, "
            f"{result.seconds:.1f} s of the processor)"
        )
    )
    _print_table(result, console)
    if any(sharding(one.run.layout) == "rows alone" for one in listed):
        console.print(Text(ROWS_ALONE))
    for sentence in unlisted(result):
        console.print(Text(sentence))
    console.print(Text(sureness(cluster, n)), soft_wrap=True)
    explained = [one for i, one in enumerate(listed) if i < EXPLAINED or one.asked]
    said = doubts(cluster, n, extrapolated=False)
    common = [one for one in common_warnings(explained) if one not in said]
    for found, why in [pair for pair in zip(listed, advice) if pair[0] in explained]:
        console.print(Text(f"\n{label(result, found)}", style="bold"))
        console.print(Text(f"   {settings_between(run, found.run)}"), soft_wrap=True)
        for sentence in reasons(result, found, why):
            console.print(Text(f"   {sentence}"), soft_wrap=True)
        for warning in layout_warnings(found):
            if warning not in (*common, *said):
                console.print(Text(f"   Warning: {warning}"), soft_wrap=True)
    if common:
        console.print(Text("\nFor all of these:", style="bold"))
    for warning in common:
        console.print(Text(f"   Warning: {warning}"), soft_wrap=True)


def place(result: Result, found: Found) -> int | None:
    """Returns the place of a layout among all that were traced; None if it does not fit."""
    return result.layouts.index(found) + 1 if found in result.layouts else None


def label(result: Result, found: Found) -> str:
    """Returns the place and the name of a layout."""
    number = place(result, found)
    return f"{number}. {found.name}" if number else f"-  {found.name}"


def words_of_kind(found: Found) -> str:
    """Returns the kind of a layout, and for a pipeline also that of its stages."""
    inner = sharding(found.run.layout)
    return found.kind if inner in (found.kind, REPLICAS) else f"{found.kind}, {inner}"


def reasons(result: Result, found: Found, why: Advice) -> list[str]:
    """Returns sentences that say why a layout stands where it does."""
    prediction = found.prediction
    assert prediction is not None, "only traced layouts are listed"
    if not prediction.fits:
        gib = f"{prediction.peak_gib:.1f} of {prediction.limit_gib:.1f} GiB"
        return [f"It does not fit: {gib}.", *why.sentences]
    best = result.layouts[0].prediction
    if not found.asked or best is None or best is prediction:
        return why.sentences
    less = seconds_of(best)
    more = sorted((less.get(kind, 0.0) - s, kind) for kind, s in seconds_of(prediction).items())
    where = ", ".join(f"{-s:+.3g} s {kind}" for s, kind in more[:3] if s < 0)
    slower = f"{found.step_s / best.step_s - 1:.1%} longer than the fastest"
    return [f"It takes {slower} ({where}).", *why.sentences]


def unlisted(result: Result) -> list[str]:
    """Returns sentences about the layouts that are not listed, and why not."""
    sentences, kinds = [], {one.kind for one in result.listed}
    first = {one.kind: one for one in reversed(result.layouts) if one.kind not in kinds}
    if first:
        others = sorted(first.values(), key=lambda one: one.step_s)
        text = "; ".join(f"{one.kind}: {label(result, one)} {one.step_s:.4g} s" for one in others)
        sentences.append(f"The fastest of other kinds that were traced: {text}.")
    if result.too_large:
        names = ", ".join(result.too_large)
        sentences.append(f"Kinds of which no layout fits by estimate: {names}.")
    for one in result.refused:
        if one.asked and result.layouts:  # it is listed
            continue
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
        some = "; ".join(one.name for one in result.untraced[:3])
        sentences.append(
            f"There was no time to trace {len(result.untraced)} more, so they are not ranked: "
            f"{some}{', ...' * (len(result.untraced) > 3)}. --seconds gives more time."
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
        layout, recompute = found.run.layout, found.run.train.recompute
        settings.append((words_of_kind(found), str(layout.micro_batches), recompute))
    step, tflops, gib, messages, hidden, bubbles = zip(*rows)
    kinds, micro_batches, recomputes = zip(*settings)
    return [
        _Column("\nkind", kinds, 3, "left"),
        _Column("s a\nstep", step, 9),
        _Column("TFLOP/s\na device", tflops, 5),
        _Column("\nGiB", gib, 8),
        _Column("s in\nmessages", messages, 4),
        _Column("\nhidden", hidden, 1),
        _Column("s in\nbubbles", bubbles, 2),
        _Column("micro-\nbatches", micro_batches, 7),
        _Column("\nrecompute", recomputes, 6, "left"),
    ]


def _print_table(result: Result, console: Console) -> None:
    """Prints the table with the columns that there is room for; a file has room for all.

    The names of layouts stay whole: they break at spaces if even the first column is too much.
    """
    columns = _columns(result.listed)
    labels = [label(result, found) for found in result.listed]
    left = sorted(columns, key=lambda column: column.leaves)
    name = max(len("layout"), *map(len, labels))
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
    for text, *cells in zip(labels, *(column.cells for column in shown)):
        table.add_row(Text(text), *cells)
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
        advice: The advice for each layout that is listed.
        remedies: Sentences on what would fit, if no layout does.
    """
    layouts: list[dict[str, Any]] = []
    for found, why in zip(result.listed, advice):
        assert found.prediction is not None, "only traced layouts are listed"
        layouts.append(
            found.prediction.to_json()
            | {
                "name": found.name,
                "kind": words_of_kind(found),
                "place": place(result, found),
                "asked": found.asked,
                "layout": layout_of(found.run),
                "train": train_of(found.run),
                "why": reasons(result, found, why),
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
        "traced": len(result.layouts) + len(result.refused),
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
