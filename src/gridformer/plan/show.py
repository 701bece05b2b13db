"""Shows a prediction, and what a search has found: a table with reasons, JSON, a run file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.cluster.file import Cluster
from gridformer.config import NO_PATH, RunConfig, TrainConfig
from gridformer.parallel.registry import describe_layout
from gridformer.plan.advice import UNSURE, Advice, in_words, limit_of
from gridformer.plan.prediction import Prediction, doubts, sureness
from gridformer.plan.search import REPLICAS, PlannedLayout, Result, sharding
from gridformer.utils.files import write_text
from gridformer.utils.units import counted, three_digits

LEAST = 5e-4  # kinds that take less than this fraction of a step are not printed
EXPLAINED = 3  # layouts whose reasons the command prints besides those that were asked for
ROWS_ALONE = (
    "Rows alone (r x 1): weights are sharded over the rows and gathered for each product, as FSDP "
    "does, but within one replica. Only 2-D grids shard weights in two dimensions."
)
# What a plan states of the section `train`, besides what differs from the defaults.
STATED = ("global_batch", "dtype", "recompute", "recompute_layers")


def _recomputed(train: TrainConfig) -> str:
    """Returns what is recomputed, such as `full` or `full, 8 layers`."""
    layers = f", {train.recompute_layers} layers" if train.recompute_layers else ""
    return train.recompute.replace("_", " ") + layers


def print_prediction(
    run: RunConfig, cluster: Cluster, prediction: Prediction, console: Console
) -> None:
    """Prints how long a step takes, where the time goes, what limits it, and the warnings."""
    n, step_s = run.layout.n_processes, prediction.step_s
    devices = f"{counted(n, 'device')} of {cluster.name}"
    console.print(f"{describe_layout(run.layout)} on {devices}, in {run.train.dtype}")
    tokens = run.train.global_batch * run.seq_len / step_s if step_s else 0.0
    model = three_digits(prediction.model_tflops_per_device)
    whole = three_digits(prediction.hardware_tflops_per_device)
    console.print(
        f"A step takes {_time(step_s)}: forward {_time(prediction.forward_s)}, backward "
        f"{_time(prediction.backward_s)}, update {_time(prediction.update_s)}. That is "
        f"{tokens:,.0f} tokens/s and {model} model TFLOP/s per device"
        f"{f' ({whole} with what is recomputed)' * (whole != model)}."
    )
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("where the time goes")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for kind, value in sorted(prediction.seconds_by_kind().items(), key=lambda row: -row[1]):
        if value > LEAST * step_s:
            table.add_row(kind, _time(value), f"{100 * value / step_s:.1f}%")
    for kind, value in prediction.hidden_by_axis().items():
        if value > LEAST * step_s:
            table.add_row(f"({kind} behind computation)", _time(value), "")
    console.print(table)
    if step_s:
        console.print(limit_of(prediction), soft_wrap=True)
    if prediction.peak_gib is None:
        console.print("Memory is estimated for training steps alone.")
    else:
        fits = "It fits" if prediction.fits else "It does not fit"
        console.print(
            f"{fits}: a rank's tensors take {three_digits(prediction.peak_gib)} of the "
            f"{three_digits(prediction.limit_gib)} GiB that leave 5% to spare."
        )
    said = doubts(cluster, n, extrapolated=False)
    for warning in prediction.warnings:
        if warning not in said:
            console.print(f"Warning: {warning}.", soft_wrap=True)
    console.print(sureness(cluster, n), soft_wrap=True)


def _time(seconds: float) -> str:
    """Formats a time, such as `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# --------------------------------------------------------------------------- the ranking


def print_result(
    run: RunConfig,
    result: Result,
    advice: Sequence[Advice],
    cluster: Cluster,
    console: Console,
    everything: bool = False,
) -> None:
    """Prints the ranking, and the reasons for the first layouts.

    `run` is what was asked for, and `advice` that for each layout that is listed. With `everything`
    all layouts are explained, with all doubts.
    """
    listed, n = result.listed, result.layouts[0].run.layout.n_processes
    fastest, n_traces = len(result.layouts[: result.top]), len(result.layouts + result.refused)
    traces = f"{n_traces} layouts that were traced" if n_traces > 1 else "1 layout that was traced"
    head = (
        f"{run.model.name} on {counted(n, 'device')} of {cluster.name}, "
        f"{counted(run.train.global_batch, 'sequence')} of {run.seq_len} tokens a step, "
        f"{run.train.dtype}: the "
        f"{f'{fastest} fastest' if fastest > 1 else 'fastest'} of {traces}, of "
        f"{result.n_arrangements} arrangements ({result.n_estimates} estimates, "
        f"{result.seconds:.1f} s of the processor)"
    )
    console.print(Text(head))
    _print_table(result, console)
    rows_alone = any(sharding(one.run.layout) == "rows alone" for one in listed)
    for sentence in (*[ROWS_ALONE] * rows_alone, *unlisted(result)):
        console.print(Text(sentence))
    console.print(Text(sureness(cluster, n)), soft_wrap=True)
    best = result.layouts[0].step_s
    tied = sum(one.step_s < (1 + UNSURE) * best for one in result.layouts[: result.top])
    if tied > 1:
        near = f"Layouts 1 to {tied} are within {UNSURE:.0%} of the fastest"
        told = f"{near}, closer than predictions can tell apart: measure these."
        console.print(Text(told), soft_wrap=True)
    explained = [one for i, one in enumerate(listed) if everything or i < EXPLAINED or one.asked]
    said = [] if everything else doubts(cluster, n, extrapolated=False)
    shared = explained[0].traced.warnings
    shared = [one for one in shared if all(one in other.traced.warnings for other in explained)]
    shared = [one for one in shared if one not in said]
    for one, why in [pair for pair in zip(listed, advice) if pair[0] in explained]:
        console.print(Text(f"\n{label(result, one)}", style="bold"))
        lines = [settings_between(run, one.run), *reasons(result, one, why)]
        lines += [f"Warning: {w}" for w in one.traced.warnings if w not in (*shared, *said)]
        for line in lines:
            console.print(Text(f"   {line}"), soft_wrap=True)
    if shared:
        console.print(Text("\nFor all of these:", style="bold"))
    for warning in shared:
        console.print(Text(f"   Warning: {warning}"), soft_wrap=True)


def place(result: Result, one: PlannedLayout) -> int | None:
    """Returns the place of a layout among all that were traced; None if it does not fit."""
    return result.layouts.index(one) + 1 if one in result.layouts else None


def label(result: Result, one: PlannedLayout) -> str:
    """Returns the place and the name of a layout."""
    number = place(result, one)
    return f"{number}. {one.name}" if number else f"-  {one.name}"


def words_of_kind(one: PlannedLayout) -> str:
    """Returns the kind of a layout, and for a pipeline also that of its stages."""
    inner = sharding(one.run.layout)
    return one.kind if inner in (one.kind, REPLICAS) else f"{one.kind}, {inner}"


def reasons(result: Result, one: PlannedLayout, why: Advice) -> list[str]:
    """Returns sentences that say why a layout stands where it does."""
    prediction = one.traced
    if not prediction.fits:
        gib = f"{prediction.peak_gib:.1f} of {prediction.limit_gib:.1f} GiB"
        return [f"It does not fit: {gib}.", *why.sentences]
    best = result.layouts[0].prediction
    if not one.asked or best is None or best is prediction:
        return why.sentences
    less = best.seconds_by_kind()
    seconds = prediction.seconds_by_kind().items()
    more = sorted((less.get(kind, 0.0) - s, kind) for kind, s in seconds)
    where = ", ".join(f"{-s:+.3g} s {kind}" for s, kind in more[:3] if s < 0)
    slower = f"{one.step_s / best.step_s - 1:.1%} longer than the fastest"
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
    fitting = {one.key for one in result.layouts}
    sentences += [
        f"Left out: {one.name} does not fit when it is traced, with "
        f"{one.traced.peak_gib:.1f} of {one.traced.limit_gib:.1f} GiB."
        for one in result.refused
        # What was asked for is listed, and so may be the same layout with more micro-batches.
        if not (one.asked and result.layouts) and one.key not in fitting
    ]
    if result.passed_over:
        some = ", ".join(one.name for one in result.passed_over[:3])
        more = len(result.passed_over) - 3
        names = f"{some} and {more} more" if more > 0 else some
        text = "traces of their kind hold more than estimates, and they would not fit"
        sentences.append(f"Not traced, as {text}: {names}.")
    if result.untraced:
        some = "; ".join(one.name for one in result.untraced[:3])
        sentences.append(
            f"There was no time to trace {len(result.untraced)} more, so they are not ranked: "
            f"{some}{', ...' * (len(result.untraced) > 3)}. --seconds gives more time."
        )
    return sentences


# The columns of the ranking after that of the names, with headings of one or two lines. The last
# ones are left out on a narrow terminal.
COLUMNS: dict[str, Callable[[PlannedLayout, Prediction], str]] = {
    "s a\nstep": lambda _, p: f"{p.step_s:.4g}",
    "\nGiB": lambda _, p: f"{p.peak_gib:.1f}",
    "micro-\nbatches": lambda one, _: str(one.run.layout.micro_batches),
    "\nrecompute": lambda one, _: _recomputed(one.run.train),
    "TFLOP/s\na device": lambda _, p: three_digits(p.model_tflops_per_device),
    "s in\nmessages": lambda _, p: three_digits(p.exposed_communication_s),
    "\nkind": lambda one, _: words_of_kind(one),
    "s in\nbubbles": lambda _, p: three_digits(p.bubble_s),
    "\nhidden": lambda _, p: three_digits(sum(p.parts.hidden.values())),
}


def _print_table(result: Result, console: Console) -> None:
    """Prints the table with the columns that there is room for; a file has room for all.

    The names of layouts stay whole: they break at spaces if even the first column is too much.
    """
    names = [label(result, one) for one in result.listed]
    columns = {
        head: [cell(one, one.traced) for one in result.listed] for head, cell in COLUMNS.items()
    }
    widths = [max(map(len, (*head.split("\n"), *cells))) for head, cells in columns.items()]
    width, left_out = max(len("layout"), *map(len, names)) + sum(widths) + len(widths), []
    if console.is_terminal:
        while width > console.width and len(columns) > 1:
            left_out.append(" ".join(columns.popitem()[0].split()).replace("- ", "-"))
            width -= 1 + widths[len(columns)]
        width = min(width, console.width)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", width=width)
    table.add_column("\nlayout", overflow="fold")
    for head in columns:
        left = head in ("\nkind", "\nrecompute")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for name, *row in zip(names, *columns.values()):
        table.add_row(Text(name), *row)
    console.print(table, crop=False)
    if left_out:
        heads = ", ".join(reversed(left_out))
        console.print(Text(f"Left out for lack of room: {heads}. A wider terminal shows them."))


def settings_between(asked: RunConfig, other: RunConfig) -> str:
    """Returns the settings of a layout that differ from the run that was asked for, as overrides.

    Without any the run has this layout already, and the words say so.
    """
    changes: dict[str, Any] = {}
    for section in ("layout", "train"):
        before = getattr(asked, section).model_dump(mode="json")
        after = getattr(other, section).model_dump(mode="json")
        changes |= {f"{section}.{k}": value for k, value in after.items() if value != before[k]}
    return in_words(changes) or "This is the run's own layout."


# --------------------------------------------------------------------------- for other programs


def ranking_as_json(
    result: Result, advice: Sequence[Advice], remedies: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what `--json` prints, with the advice for each layout that is listed."""
    layouts = [
        one.traced.to_json()
        | _described(one)
        | {
            "kind": words_of_kind(one),
            "place": place(result, one),
            "asked": one.asked,
            "why": reasons(result, one, why),
            "where": why.shares,
            "hidden": why.hidden,
            "change": dict(why.best.settings) if why.best else None,
            "change_traced": why.best.traced if why.best else None,
        }
        for one, why in zip(result.listed, advice)
    ]
    return {
        "layouts": layouts,
        "remedies": list(remedies),
        "refused": [_unlisted(one) for one in result.refused],
        "passed_over": [_unlisted(one) for one in result.passed_over],
        "untraced": [_unlisted(one) for one in result.untraced],
        "traced": len(result.layouts) + len(result.refused),
        "arrangements": result.n_arrangements,
        "estimates": result.n_estimates,
    }


def _described(one: PlannedLayout) -> dict[str, Any]:
    """Returns a layout: its name, what it sets in a run, and its estimate."""
    layout = one.run.layout.model_dump(mode="json", exclude_defaults=True)
    train, plain = one.run.train.model_dump(mode="json"), TrainConfig().model_dump(mode="json")
    return {
        "name": one.name,
        "layout": {"scheme": one.run.layout.scheme} | layout,
        "train": {k: v for k, v in train.items() if k in STATED or v != plain[k]},
        "estimated_step_s": one.estimate.step_s,
    }


def _unlisted(one: PlannedLayout) -> dict[str, Any]:
    """Returns what is known of a layout that is not listed; None stands for what was not traced."""
    return _described(one) | {
        "estimated_peak_gib": one.estimate.peak_gib,
        "step_s": one.prediction and one.prediction.step_s,
        "peak_gib": one.prediction and one.prediction.peak_gib,
        "limit_gib": one.estimate.limit_gib,
    }


def write_run(one: PlannedLayout, path: Path, how: str) -> None:
    """Writes a layout as a run file that `gridformer train` accepts as it is.

    It holds what differs from the defaults, and comments: what was predicted, and the command that
    wrote it, quoted for the shell. The file's folder is created if needed.
    """
    run, prediction = one.run, one.prediction
    lines = [f"# {one.name}, written by: {how}".replace("\n", "\n# ")]
    if prediction is not None:
        lines.append(
            f"# Predicted: {prediction.step_s:.4g} s a step, {prediction.peak_gib:.1f} of "
            f"{prediction.limit_gib:.1f} GiB, {three_digits(prediction.model_tflops_per_device)} "
            "TFLOP/s a device."
        )
    values = run.model_dump(mode="json", exclude_defaults=True)
    if run.data.path == Path() and not run.data.sources:  # made from a model's name alone
        # The path of a run without data is the current folder, which has no tokens.
        values["data"] = {**values["data"], "path": NO_PATH}
        lines.append(f"# Set data.path={NO_PATH} to a folder that `gridformer prepare` wrote.")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"name": run.name, **values}, sort_keys=False)
    write_text(path, "\n".join(lines) + "\n" + text)
