"""What a rank does until its first step is over, with more and more ranks.

    python -m benchmarks.startup --processes 4 16 64        # real processes, over gloo
    python -m benchmarks.startup --fake 64 512 4096         # one rank of many, on fake groups

Real processes train one step of a tiny model on a grid. For each number of them it prints the
seconds until the process group and the first step were there, and, for the rank that did most of
it, how many groups it took part in creating, what it asked of the rendezvous's store, and how many
files it opened. Rank 0 alone collects what all others say, so it is listed apart.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.startup.rank import counted_run
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.launch import launch
from gridformer.launch.plan import plan_checked, read_run
from gridformer.launch.processes import warm_up

MODEL: dict[str, Any] = {
    "n_layers": 2,
    "hidden_size": 256,
    "n_heads": 16,
    "max_seq_len": 16,
    "vocab_size": 512,
}


def layout_of(n: int) -> dict[str, Any]:
    """Returns a grid with replicas and two pipeline stages for n = 4, 8, 16, ... processes."""
    side = 1 if n < 16 else 2 if n < 256 else 8
    pp = 2
    return {
        "scheme": "optimus" if side > 1 else "single",
        "rows": side, "cols": side, "pp": pp, "dp": n // (side * side * pp), "micro_batches": 2,
    }  # fmt: skip


def real(n: int, data: Path) -> dict[str, Any]:
    """Starts n processes and returns what they counted."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers"
        answers.mkdir()
        file = Path(folder) / "run.yaml"
        sizes = layout_of(n)
        file.write_text(
            json.dumps(
                {
                    "model": {k: v for k, v in MODEL.items() if k != "vocab_size"},
                    "data": {"path": str(data)},
                    "layout": sizes,
                    "train": {"steps": 1, "global_batch": 2 * sizes["dp"] * sizes["rows"],
                              "eval_batches": 1, "eval_every": 0, "device": "cpu", "memory_gib": 1},
                }
            )
        )  # fmt: skip
        run = read_run(file)
        plan = plan_checked(run, Path(folder) / "run")
        warm_up("benchmarks.startup.rank")
        launch(counted_run, (plan, answers, time.time()), n)
        found = [json.loads((answers / f"{rank}.json").read_text()) for rank in range(n)]
    first, others = found[0], found[1:]
    return {
        "ranks": n,
        "met_s": max(one["met_s"] for one in found),
        "done_s": max(one["done_s"] for one in found),
        **{what: max(one[what] for one in others) for what in ("groups", "store", "files")},
        **{f"{what}_0": first[what] for what in ("groups", "store", "files")},
    }


def fake(n: int) -> dict[str, Any]:
    """Plays three ranks of n and returns the most that one of them did."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from gridformer.comm import P2PChannel
    from gridformer.parallel import build_parallel
    from gridformer.parallel.axes import build_axes

    layout = LayoutConfig(**layout_of(n))
    new_group, groups, seconds = dist.new_group, [], []
    for rank in (0, n // 2, n - 1):
        made = 0

        def counted(*args: Any, **how: Any) -> Any:
            nonlocal made
            made += 1
            return new_group(*args, **how)

        dist.init_process_group("fake", rank=rank, world_size=n, store=FakeStore())
        try:
            began = time.process_time()
            with patch.object(dist, "new_group", counted):
                axes = build_axes(layout, "cpu")
                P2PChannel(axes, ring=False)
                build_parallel(ModelConfig(**MODEL), layout, axes, 1, _cpu())
            seconds.append(time.process_time() - began)
        finally:
            dist.destroy_process_group()
        groups.append(made)
    return {"ranks": n, "groups": max(groups), "seconds": max(seconds)}


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="real ones")
    parser.add_argument("--fake", type=int, nargs="*", default=[], help="numbers of fake ranks")
    parser.add_argument("--data", type=Path, help="a token folder, for real processes")
    options = parser.parse_args()
    for n in [*options.processes, *options.fake]:
        if n < 4 or not math.log2(n).is_integer():
            parser.error(f"{n} processes: use powers of two from 4 on")
    for n in options.processes:
        if options.data is None:
            parser.error("real processes need --data, a folder that gridformer prepare wrote")
        print(json.dumps(real(n, options.data)), flush=True)
    for n in options.fake:
        print(json.dumps(fake(n)), flush=True)


if __name__ == "__main__":
    main()
