"""Compares one device's training step with Hugging Face's: tokens/s and share of the ceiling.

All sides stay on the device and take turns, so that anything else that slows the machine down
slows all. They see the same batches and start from the same weights, so their losses must agree.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, SupportsFloat

import torch

from benchmarks.gpu.report import Report, median, phrase, seconds_of, synchronize
from benchmarks.gpu.sides import Gridformer, HFCompile, HuggingFace, Side
from benchmarks.gpu.torchtitan_side import Torchtitan, torchtitan_runs
from gridformer.config import ModelConfig, TrainConfig
from gridformer.train.attention import attending

Attention = Literal["auto", "flash", "cudnn", "efficient"]
Mode = Literal["eager", "compiled"]

N_BATCHES = 4  # the batches repeat, so that the loss falls and the sides' falls can be compared


@dataclass(frozen=True)
class Settings:
    """The settings of one comparison.

    Attributes:
        batches: Numbers of sequences to try; the first that fits is used.
        dtype: The type of the computation.
    """

    config: ModelConfig
    batches: tuple[int, ...]
    s: int
    steps: int = 10
    rounds: int = 3
    modes: tuple[Mode, ...] = ("eager", "compiled")
    hf_compile: HFCompile = "blocks"
    attention: Attention = "auto"
    backend: str = "inductor"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    limit_s: float = 540.0


@dataclass
class Result:
    """Results of one side in one mode.

    Attributes:
        warm_up_s: Seconds of the warm-up.
        seconds: Seconds per step in each turn.
        cpu_seconds: Seconds per step of this process on all cores, in each turn. They say more than
            `seconds` about a CPU that others use, too.
        peak_bytes: The most memory on a GPU.
    """

    side: str
    mode: Mode
    warm_up_s: float
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass
class Comparison:
    """Results of all sides.

    Attributes:
        b: Sequences per step.
        losses: Losses of every step, by side.
        first_norm: The first gradient norm, by side.
        failures: What a side raised in a mode instead of running, by side and mode.
    """

    settings: Settings
    b: int
    results: list[Result]
    losses: dict[str, list[float]]
    first_norm: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.b * self.settings.s

    def result(self, side: str, mode: Mode) -> Result | None:
        matching = (r for r in self.results if (r.side, r.mode) == (side, mode) and r.seconds)
        return next(matching, None)


# --------------------------------------------------------------------------- measuring


def compare(
    settings: Settings, device: torch.device, report: Report, profile: bool = False
) -> tuple[Comparison, dict[str, str]]:
    """Find the largest batch that all sides can hold, then let them take turns.

    Returns:
        The comparison, and a table of kernels for each side and mode if `profile` is set.

    Raises:
        ValueError: No batch fits into the device's memory.
        RuntimeError: No side runs in any mode.
    """
    with attending(settings.attention):
        for b in settings.batches:
            arena = _try(settings, b, device, report)
            if arena is not None:
                return arena.run(), arena.profiles() if profile else {}
    raise ValueError(f"not even a batch of {settings.batches[-1]} fits into the device's memory")


def _try(settings: Settings, b: int, device: torch.device, report: Report) -> Arena | None:
    """Build all sides and warm them up in every mode; return None if memory does not suffice."""
    arena: Arena | None = None
    try:
        arena = Arena(settings, b, device, report)
        arena.warm_up()
        return arena
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    report.progress(f"{settings.config.name}: a batch of {b} does not fit")
    del arena
    torch.compiler.reset()
    _release(device)
    return None


def out_of_memory(error: BaseException) -> bool:
    """Recognize out-of-memory errors, including a library's and those wrapped by the compiler."""
    signs = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def _release(device: torch.device) -> None:
    """Return unused cached memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Arena:
    """All sides on one device, with the batches of which they take turns."""

    def __init__(self, settings: Settings, b: int, device: torch.device, report: Report) -> None:
        self.settings, self.b, self.device, self.report = settings, b, device, report
        # otherwise graphs compiled for other sizes would count as recompilations
        torch.compiler.reset()
        config = settings.config
        train = TrainConfig(
            global_batch=b, steps=100_000, lr=1e-4, dtype=settings.dtype, clip_norm=1.0
        )
        generator = torch.Generator().manual_seed(0)
        shape = (N_BATCHES, b, settings.s + 1)
        self.batches = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
        ours = Gridformer(config, train, device, settings.backend)
        self.sides: list[Side] = [ours]
        if find_spec("transformers"):
            theirs = HuggingFace(config, train, device, settings.backend, settings.hf_compile)
            theirs.take_weights(ours.model, config)
            self.sides.append(theirs)
        else:
            report.progress("transformers is missing: gridformer is measured without it")
        if torchtitan_runs(config):
            titan = Torchtitan(config, train, device, settings.backend)
            titan.take_weights(ours.model, config)
            self.sides.append(titan)
        self.results: dict[tuple[str, Mode], Result] = {}
        self.failures: dict[str, str] = {}
        self.losses: dict[str, list[SupportsFloat]] = {side.name: [] for side in self.sides}
        self.norms: dict[str, list[SupportsFloat]] = {side.name: [] for side in self.sides}

    def warm_up(self) -> None:
        """Run two steps of each side in each mode, which includes compilation.

        A side and mode that fails is reported and left out of the rounds, so that the rest is still
        measured. So is one that needs too much memory, if there is no smaller batch to try.
        """
        for mode, side in itertools.product(self.settings.modes, self.sides):
            began = self.report.seconds
            try:
                with self._turn(side, mode):
                    self._steps(side, 2)
            except Exception as error:
                if out_of_memory(error) and len(self.settings.batches) > 1:
                    raise
                self.failures[f"{side.name} {mode}"] = phrase(error)
                self.report.progress(f"{side.name} {mode} FAILED: {phrase(error)}")
                side.rest()
                continue
            took = self.report.seconds - began
            self.results[side.name, mode] = Result(side.name, mode, took)
            self.report.progress(
                f"{self.settings.config.name}, batch {self.b}: {side.name} {mode} is warm after "
                f"{took:.1f} s"
            )

    def run(self) -> Comparison:
        """Run the rounds while there is time; the sides take turns in going first.

        Raises:
            RuntimeError: Nothing runs.
        """
        if not self.results:
            raise RuntimeError(f"nothing runs: {self.failures}")
        for number in range(self.settings.rounds):
            if number and self.report.seconds > self.settings.limit_s:
                self.report.progress(f"time is up after {number} of {self.settings.rounds} rounds")
                break
            order = self.sides if number % 2 == 0 else self.sides[::-1]
            for mode, side in itertools.product(self.settings.modes, order):
                if (side.name, mode) in self.results:
                    self._measure(side, mode)
        losses = {name: [float(loss) for loss in all] for name, all in self.losses.items()}
        norms = {name: float(all[0]) for name, all in self.norms.items() if all}
        results = list(self.results.values())
        return Comparison(self.settings, self.b, results, losses, norms, self.failures)

    def profiles(self, n_rows: int = 18) -> dict[str, str]:
        """Profile one step of each side and mode, kernel by kernel."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        tables = {}
        for mode, side in itertools.product(self.settings.modes, self.sides):
            if (side.name, mode) not in self.results:
                continue
            with self._turn(side, mode):
                self._steps(side, 1)
                synchronize(self.device)
                with profile(activities=[activity]) as profiler:
                    self._steps(side, 1)
                    synchronize(self.device)
            averages = profiler.key_averages()
            tables[f"{side.name} {mode}"] = averages.table(
                sort_by=key, row_limit=n_rows, max_name_column_width=60
            )
        return tables

    def _measure(self, side: Side, mode: Mode) -> None:
        result, steps = self.results[side.name, mode], self.settings.steps
        with self._turn(side, mode):
            self._steps(side, 1)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            began = time.process_time()
            (seconds,) = seconds_of(lambda: self._steps(side, steps), self.device, 1)
            result.seconds.append(seconds / steps)
            result.cpu_seconds.append((time.process_time() - began) / steps)
            if self.device.type == "cuda":
                others = sum(other.held_bytes() for other in self.sides if other is not side)
                peak = torch.cuda.max_memory_allocated(self.device) - others
                result.peak_bytes = max(result.peak_bytes, peak)
        tokens = self.b * self.settings.s * steps / seconds
        self.report.progress(f"{side.name} {mode}: {tokens:,.0f} tokens/s")

    @contextlib.contextmanager
    def _turn(self, side: Side, mode: Mode) -> Iterator[None]:
        with torch.compiler.set_stance("force_eager" if mode == "eager" else "default"):
            yield
        synchronize(self.device)
        side.rest()
        _release(self.device)  # the other side allocates blocks of other sizes

    def _steps(self, side: Side, n: int) -> None:
        losses, norms = self.losses[side.name], self.norms[side.name]
        for _ in range(n):
            number = len(losses)
            loss, norm = side.step(number, self.batches[number % N_BATCHES])
            losses.append(loss)
            norms.append(norm)
