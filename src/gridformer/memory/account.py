"""What one rank of a run holds, by running the real code for it: on fake tensors, which have shapes
and no memory, in a process group that sends nothing (`foretell`), or on real ones (`measure`).

    parameters, gradients, optimizer    states
    activations                         kept from a forward pass for its backward pass, by kind
    recomputed                          computed again in a backward pass
    workspace                           all else: what lives within one pass, and messages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gridformer.memory.ledger import Entry, Ledger
from gridformer.models import Model, blocks
from gridformer.parallel import norms as grid_norms
from gridformer.parallel.sharding import part_of
from gridformer.train.step import Stepper

STATES = ("parameters", "gradients", "optimizer")
# Of modules, what is made in them; of several around each other, the innermost's counts.
KINDS: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("attention", (blocks.Attention, blocks.CrossAttention)),
    ("feed-forward", (blocks.FeedForward,)),
    ("norms", (blocks.LayerNorm, blocks.RMSNorm, grid_norms.GridLayerNorm, grid_norms.GridRMSNorm)),
    ("residuals", (blocks.Layer,)),
)
OUTSIDE = "embedding, head and loss"


@dataclass(frozen=True)
class Account:
    """Bytes of one rank over one optimizer step. by_kind: at the peak. moment: what was going on
    then. states: between steps. curve: (time, bytes), a point a change."""

    rank: int
    peak: int
    moment: str
    by_kind: dict[str, int]
    states: dict[str, int]
    curve: list[tuple[int, int]] = field(repr=False)
    places: list[tuple[int, str]] = field(repr=False)

    @property
    def activations(self) -> int:
        return sum(n for kind, n in self.by_kind.items() if kind.startswith("activations"))


@contextmanager
def watching(model: Model, ledger: Ledger) -> Iterator[None]:
    """Tell the ledger which module is run, forward and backward, and what is a gradient."""
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []
    handles: list[Any] = []

    def enters(kind: str, name: str) -> Callable[..., None]:
        def before(*_: Any) -> None:
            stack.append(ledger.place)
            ledger.at(f"{kind}|{name}")

        return before

    def leaves(is_layer: bool, name: str) -> Callable[..., None]:
        def after(_: nn.Module, __: Any, out: Any) -> None:
            ledger.at(stack.pop())
            if is_layer and isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda _: ledger.at(f"|backward of {name}"))

        return after

    def marked(owner: nn.Parameter) -> None:
        if owner.grad is not None:
            ledger.mark([owner.grad], "gradients")

    for module, name in names.items():
        for kind, types in KINDS:
            if isinstance(module, types):
                handles.append(module.register_forward_pre_hook(enters(kind, name), prepend=True))
                is_layer = isinstance(module, blocks.Layer)
                after = leaves(is_layer, name)
                handles.append(module.register_forward_hook(after, always_call=True))
                break
    for parameter in model.parameters():
        handles.append(parameter.register_post_accumulate_grad_hook(marked))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def take_account(stepper: Stepper, rank: int, step: Callable[[], None]) -> Account:
    """Watch one optimizer step: `step` runs it, after the states exist."""
    ledger = Ledger()
    model, updates = stepper.model, stepper.updates
    held = {id(p): p for p in model.parameters()}
    for parameter in model.parameters():
        part = part_of(parameter)
        if part is not None:
            held[id(part)] = part
    ledger.mark(held.values(), "parameters")
    moments = [t for state in updates.state.values() for t in state.values()]
    ledger.mark(moments, "optimizer")
    with watching(model, ledger), ledger:
        ledger.at("|between steps")
        start = ledger.now
        step()
        ledger.at("|between steps")
    when, peak = ledger.peak()
    at_peak = Counter[str]()
    for entry in ledger.alive_at(when):
        at_peak[_kind(entry)] += entry.n_bytes
    states = Counter[str]()
    for entry in ledger.alive_at(start):
        states[_kind(entry)] += entry.n_bytes
    moment = ledger.place_at(when).split("|")
    return Account(
        rank,
        peak,
        " ".join(part for part in reversed(moment) if part),
        dict(at_peak),
        dict(states),
        ledger.curve(),
        ledger.places,
    )


def _kind(entry: Entry) -> str:
    if entry.kind:
        return entry.kind
    made_in = entry.place.split("|")[0]
    if entry.until_backward or (entry.died is None and made_in):
        return f"activations: {made_in or OUTSIDE}"
    if entry.in_backward and made_in:
        return "recomputed"
    return "workspace"
