"""`gridformer prove`: whether a network, or each family on a scheme, trains as in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gridformer.cli.shared import AsJson, Overrides
from gridformer.utils.errors import ConfigError

_NOT_EQUAL = 1


def prove(
    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK|SCHEME",
            help="A folder of Hugging Face, package.module:function, or the name of a scheme.",
        ),
    ],
    overrides: Overrides = None,
    plan: Path | None = None,
    batch: Annotated[int, typer.Option(min=1, max=4096)] = 8,
    seq_len: Annotated[int, typer.Option(min=1, max=65536)] = 16,
    full: bool = False,
    as_json: AsJson = False,
) -> None:
    """Prove that a network trains on a layout as in one process.

    It runs the network, unchanged in one process and sharded on CPU processes, in float64, and
    compares the loss, every gradient, and the weights after three steps of AdamW. A folder of
    Hugging Face gives the architecture, and none of its code is run. A function of yours is
    imported, and returns a module, or a module, its inputs and its plan.

    With the name of a scheme, a small model of each of gridformer's families is trained on one of
    its layouts, with stages, replicas, dropout or methods that save memory.

    The exit code is 0 if all are equal to 1e-9, 1 if not, and 2 if the layout cannot run it.

    Try: gridformer prove examples.own_model:network layout.scheme=megatron layout.cols=2

    Or: gridformer prove megatron layout.cols=2

    Args:
        plan: A YAML file of roles by patterns of names, such as `layers.*.attn.q: opening`.
        batch: Samples of a batch, where the inputs are made.
        seq_len: Tokens of a sequence, where the inputs are made.
        full: Of a scheme, prove all combinations of models, stages and replicas.
    """
    from gridformer.config import schemes
    from gridformer.config.reading import parse_layout, read_yaml
    from gridformer.parallel.registry import describe_layout
    from gridformer.prove import NetworkSource, Proof, not_placed
    from gridformer.prove import prove as measure

    if network in schemes() and not Path(network).exists():
        _prove_scheme([f"layout.scheme={network}", *(overrides or [])], full, as_json)
        return
    layout = parse_layout(overrides or [])
    patterns = None if plan is None else read_yaml(plan, "patterns of names")
    source = NetworkSource(network, batch, seq_len)
    try:
        proof = measure(source, layout, patterns)
    except ConfigError:
        if as_json:
            nothing = Proof(False, None, None, describe_layout(layout))
            typer.echo(replace(nothing, not_placed=not_placed(source, patterns)).as_json())
        raise
    if as_json:
        typer.echo(proof.as_json())
    else:
        for note in proof.notes:
            typer.echo(note)
        assert proof.worst is not None
        name, off = proof.worst["name"], proof.worst["relative"]
        word = "equal" if proof.equal else "NOT EQUAL"
        typer.echo(f"{proof.layout}: {word} to one process, loss {proof.loss:.9g}")
        typer.echo(f"the largest difference is in {name}: {off:.1e} relative")
    if not proof.equal:
        raise typer.Exit(_NOT_EQUAL)


def _prove_scheme(overrides: list[str], full: bool, as_json: bool) -> None:
    """Prints a line for each cell of the exactness matrix of a scheme."""
    from gridformer.config import LayoutConfig
    from gridformer.config.reading import parse_layout
    from gridformer.exactness import cells_of, measure
    from gridformer.parallel.registry import describe_layout

    results: list[dict[str, object]] = []
    for cell, word, what, relative in measure(
        cells_of(parse_layout(overrides).model_dump(exclude_unset=True), full)
    ):
        layout = describe_layout(LayoutConfig(**cell.layout))
        how = ", ".join(filter(None, ("dropout" * cell.dropout, cell.method)))
        results.append({"model": cell.model, "layout": layout, "how": how, "result": word})
        results[-1] |= {"what": what, "relative": relative}
        if not as_json:
            off = "" if relative is None else f"{relative:.0e} "
            typer.echo(f"{word:8}{cell.model:19}{layout}{how and f' ({how})'}: {off}{what}")
    if as_json:
        typer.echo(json.dumps(results))
    words = {result["result"] for result in results}
    if words != {"equal"}:
        raise typer.Exit(_NOT_EQUAL if "wrong" in words else 0 if "equal" in words else 2)
