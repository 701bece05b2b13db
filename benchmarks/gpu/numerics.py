"""The schemes' numerics on one GPU that several processes share over gloo.

NCCL refuses two processes on one GPU; gloo copies GPU tensors through the host. So this says
nothing about speed; it shows that the schemes compute on a GPU what one device computes there. It
first tries, one by one, which collectives gloo supports for GPU tensors. Each layout has its own
processes, so if one fails, crashes or hangs, it is reported and the others continue.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.report import Report, phrase, table
from gridformer import comm
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes, Axis
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import shard_of
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words

N = 4  # processes
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}  # as in docs/concepts/exactness.md
GROUP_TIMEOUT_S = 60.0

LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron 1x4": {"scheme": "megatron", "cols": 4},
    "megatron 1x4, sequence parallel": {
        "scheme": "megatron",
        "cols": 4,
        "sequence_parallel": True,
    },
    "megatron_2d 2x2": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "optimus 2x2, gather": {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "gather"},
    "optimus 2x2, broadcast": {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast"},
    "optimus 2x2, pipelined": {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "pipelined"},
    "optimus 4x1": {"scheme": "optimus", "rows": 4},
    "subgraph, 4 branches": {"scheme": "subgraph", "branches": 4},
    "subgraph, 2 branches, cSub, dp=2": {
        "scheme": "subgraph",
        "branches": 2,
        "common": "first",
        "dp": 2,
    },
    "subgraph, 4 branches, projections outside": {
        "scheme": "subgraph",
        "branches": 4,
        "common": "first",
        "attention": "outside",
    },
    "single, dp=4": {"dp": 4},
    "single, dp=4, zero1": {"dp": 4, "dp_mode": "zero1"},
    "single, dp=4, fsdp": {"dp": 4, "dp_mode": "fsdp"},
    "single, pp=4": {"pp": 4},
    "megatron 1x2, pp=2": {"scheme": "megatron", "cols": 2, "pp": 2},
    "optimus 2x1, pp=2": {"scheme": "optimus", "rows": 2, "pp": 2},
}
QUICK = ("megatron 1x4, sequence parallel", "optimus 2x2, broadcast")


def model_of(quick: bool) -> ModelConfig:
    """Return a GPT-2 that all layouts divide, except for its vocabulary, which must be padded."""
    h, s = (32, 16) if quick else (512, 256)
    return ModelConfig(
        n_layers=4, hidden_size=h, n_heads=8, vocab_size=997, max_seq_len=s, dropout=0.1
    )


def measure(device: torch.device, quick: bool, report: Report, timeout_s: float = 240.0) -> bool:
    """Write both tables, and return whether every layout ran and stayed within its tolerance."""
    answers = run_ranks(N, try_collectives, (device.type,), timeout_s)
    report.progress("collectives tried")
    report.write(table(["collective", "float32", "started early"], _collective_rows(answers)))

    config, rows, good = model_of(quick), [], True
    for name in QUICK if quick else LAYOUTS:
        answers = run_ranks(N, compare, (device.type, LAYOUTS[name], config), timeout_s)
        report.progress(name)
        row, within = _layout_row(name, answers)
        rows.append(row)
        good = good and within
    columns = ["layout", *(f"{dtype} {what}" for dtype in TOLERANCE for what in COMPARED)]
    report.write("\n" + table([*columns, "verdict"], rows))
    tolerances = ", ".join(f"{dtype} {t:g}" for dtype, t in TOLERANCE.items())
    report.write(
        f"\nEach figure is the largest relative difference to one device on any of {N} processes, "
        f"for h={config.hidden_size}, s={config.max_seq_len}, N={config.n_layers}, "
        f"v={config.vocab_size}, dropout {config.dropout:g} and 3 AdamW steps of 2 micro-batches. "
        "Gradients and weights are relative to the largest element of a tensor. Tolerances: "
        f"{tolerances}; TF32 is off."
    )
    return good


# --------------------------------------------------------------------------- one rank's work

COMPARED = ("loss", "norm", "gradients", "weights")


def compare(device_type: str, layout: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the largest relative differences to one device, by number type and kind."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    layout = {"micro_batches": 2, **layout}
    return {dtype: differences(device_type, layout, config, dtype) for dtype in TOLERANCE}


def differences(
    device_type: str, layout: dict[str, Any], config: ModelConfig, dtype: Any, batch_size: int = 8
) -> dict[str, float]:
    """Return this rank's largest relative differences to one device, by kind (see COMPARED).

    All ranks of the default group call it together. Each of them also trains the whole model alone.
    """
    device, plan = torch.device(device_type), LayoutConfig(**layout)
    # Adam divides small gradients, and the rounding error in them, by their own size. The large
    # epsilon keeps weights about as close to each other as gradients are.
    train = TrainConfig(global_batch=batch_size, dtype=dtype, lr=1e-3, adam_eps=1e-2, clip_norm=0.0)
    axes = build_axes(plan, device_type)  # gloo's groups serve tensors of both devices
    whole = build_parallel(config, LayoutConfig(), Axes(), train.seed, device, dtype)
    cut = build_parallel(config, plan, axes, train.seed, device, dtype)
    reference = Stepper(whole, train, Axes())
    stepper = Stepper(cut, train, axes, plan)
    worst = dict.fromkeys(COMPARED, 0.0)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        shape = (train.global_batch, config.max_seq_len + 1)
        batch = torch.randint(0, config.vocab_size, shape, generator=generator)
        want = reference(step, lambda rows, batch=batch: next_words(batch[rows]))  # type: ignore[misc]
        got = stepper(step, lambda rows, batch=batch: next_words(batch[rows]))  # type: ignore[misc]
        worst["loss"] = _worst(worst["loss"], abs(got.loss / want.loss - 1))
        worst["norm"] = _worst(worst["norm"], abs(got.grad_norm / want.grad_norm - 1))
        worst["gradients"] = _worst(worst["gradients"], _distance(cut, whole, gradients=True))
    worst["weights"] = _distance(cut, whole, gradients=False)
    return worst


def _distance(cut: nn.Module, whole: nn.Module, gradients: bool) -> float:
    """Return the difference between local blocks and the whole, over its largest element."""
    worst, reference = 0.0, dict(whole.named_parameters())
    held = owned(cut) if gradients else [(n, stored(p)) for n, p in cut.named_parameters()]
    for name, parameter in held:  # the gradients of copies were added on their owner
        shard = shard_of(parameter)
        mine, other = parameter.detach(), reference[name].detach()
        if gradients:
            assert parameter.grad is not None, name
            assert reference[name].grad is not None, name
            mine, other = parameter.grad, reference[name].grad  # type: ignore[assignment]
        scale = float(other.abs().max())
        apart = (mine - shard.block_of(other, mine.shape)).abs()
        difference = float(apart.max()) if apart.numel() else 0.0
        worst = _worst(worst, difference / scale if scale else difference)
    return worst


def _worst(*differences: float) -> float:
    """Return the largest value, or NaN if one is NaN, which max() may overlook."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def try_collectives(device_type: str) -> dict[str, dict[str, str]]:
    """Try each collective of `gridformer.comm` in both forms: "right", "wrong" or the error."""
    device, rank = torch.device(device_type), dist.get_rank()
    axis = Axis("world", N, rank)
    ones = torch.ones(2 * N, 3, device=device)
    total = N * (N + 1) / 2
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Tensor]] = {
        "all_reduce": (comm.all_reduce, (axis,), total * ones),
        "all_reduce max": (comm.all_reduce, (axis, "max"), N * ones),
        "broadcast": (comm.broadcast, (axis, 1), 2 * ones),
        "reduce": (comm.reduce, (axis, 0), total * ones),
        "all_gather": (comm.all_gather, (axis, 0), torch.empty(0)),
        "reduce_scatter": (comm.reduce_scatter, (axis, 0), total * ones[:2]),
    }
    found: dict[str, dict[str, str]] = {}
    for name, (call, arguments, want) in calls.items():
        if name == "all_gather":
            want = torch.cat([(r + 1) * ones for r in range(N)])
        started = getattr(comm, f"start_{name.split()[0]}", None)
        forms = {"now": call, "early": started}
        found[name] = {}
        for form, function in forms.items():
            if function is None:
                found[name][form] = "-"
                continue
            try:
                got = function((rank + 1) * ones, *arguments)
                got = got.wait() if form == "early" else got
                right = (name == "reduce" and rank != 0) or torch.equal(got, want)
                found[name][form] = "right" if right else "WRONG"
            except Exception as error:
                found[name][form] = phrase(error)
    return found


# --------------------------------------------------------------------------- processes


def run_ranks(
    size: int, job: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], timeout_s: float
) -> list[dict[str, Any]]:
    """Return what `job(*arguments)` returned on each rank of a new gloo group.

    A rank that raised, died or exceeded `timeout_s` seconds answers {"error": what happened}.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "gridformer.train.step"])
    with tempfile.TemporaryDirectory(prefix="gridformer-gpu-") as folder:
        processes = [
            context.Process(target=_rank, args=(rank, size, folder, job, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        answers = []
        for rank, process in enumerate(processes):
            answer, late = Path(folder) / f"{rank}.json", process.is_alive()
            if late:
                process.kill()
                process.join()
            if answer.exists():
                answers.append(json.loads(answer.read_text(encoding="utf-8")))
            else:
                answers.append({"error": _death(process.exitcode, late, timeout_s)})
        return answers


def _rank(
    rank: int, size: int, folder: str, job: Callable[..., dict[str, Any]], arguments: Any
) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        answer = job(*arguments)
    except Exception as error:
        answer = {"error": phrase(error)}
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(answer), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    if "error" not in answer:
        with contextlib.suppress(Exception):
            dist.barrier()  # a peer may still be reading what this rank has sent
    os._exit(0)  # destroying a group whose peers have failed may hang


def _death(code: int | None, late: bool, timeout_s: float) -> str:
    if late:
        return f"no answer within {timeout_s:.0f} s"
    how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
    return f"died ({how})"


# --------------------------------------------------------------------------- tables


def _error_of(answers: list[dict[str, Any]]) -> str:
    """Return the cause on the lowest rank, or else the effect of a peer's failure."""
    errors = [(r, a["error"]) for r, a in enumerate(answers) if "error" in a]
    effects = ("closed by peer", "reset by peer", "gloo/transport", "no answer", "Timed out")
    errors.sort(key=lambda e: any(sign in e[1] for sign in effects))
    return f"rank {errors[0][0]}: {errors[0][1]}" if errors else ""


def _collective_rows(answers: list[dict[str, Any]]) -> list[list[str]]:
    error = _error_of(answers)
    if error:
        return [["all", f"not run: {error}", "-"]]
    rows = []
    for name in answers[0]:
        row = [name]
        for form in ("now", "early"):
            said = [answer[name][form] for answer in answers]
            row.append(said[0] if len(set(said)) == 1 else "; ".join(sorted(set(said))))
        rows.append(row)
    return rows


def _layout_row(name: str, answers: list[dict[str, Any]]) -> tuple[list[str], bool]:
    error = _error_of(answers)
    if error:
        return [name, *["-"] * (len(TOLERANCE) * len(COMPARED)), f"not run: {error}"], False
    row, within = [name], True
    for dtype, tolerance in TOLERANCE.items():
        for what in COMPARED:
            worst = _worst(*(answer[dtype][what] for answer in answers))
            within = within and worst < tolerance  # also false for NaN
            row.append(f"{worst:.1e}")
    return [*row, "equal" if within else "TOO FAR APART"], within
