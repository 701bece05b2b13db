"""One rank that counts what it does until its first step is over."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gridformer.train.plan import Plan


def counted_run(plan: Plan, answers: Path, began: float) -> None:
    """The entrypoint of a real process: trains a step and writes what it cost."""
    import torch.distributed as dist

    from gridformer.mesh import process_group, rendezvous
    from gridformer.mesh.process_group import close_process_groups, init_process_groups
    from gridformer.train.trainer import Trainer

    counts = {"files": 0, "groups": 0, "store": 0}

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            counts["files"] += 1

    class Counting(dist.Store):
        """Passes everything on and counts it; torch's C++ code calls it, too."""

        def __init__(self, store: dist.Store) -> None:
            super().__init__()
            self.store = store

        def set(self, key: str, value: Any) -> None:
            counts["store"] += 1
            self.store.set(key, value)

        def get(self, key: str) -> bytes:
            counts["store"] += 1
            found: bytes = self.store.get(key)
            return found

        def add(self, key: str, amount: int) -> int:
            counts["store"] += 1
            found: int = self.store.add(key, amount)
            return found

        def check(self, keys: list[str]) -> bool:
            found: bool = self.store.check(keys)
            return found

        def wait(self, keys: list[str], *timeout: Any) -> None:
            counts["store"] += 1
            self.store.wait(keys, *timeout)

        def set_timeout(self, timeout: Any) -> None:
            self.store.set_timeout(timeout)

    new_group, plain = dist.new_group, rendezvous.store_of
    stores: list[dist.Store] = []

    def counted_store(place: Any) -> dist.Store:
        if not stores:
            stores.append(Counting(plain(place)))
        return stores[0]

    def counted_group(*args: Any, **how: Any) -> Any:
        counts["groups"] += 1
        return new_group(*args, **how)

    sys.addaudithook(audit)
    with (
        patch.object(rendezvous, "store_of", counted_store),
        patch.object(process_group, "store_of", counted_store),
        patch.object(dist, "new_group", counted_group),
    ):
        world = init_process_groups("cpu", plan.n_processes, 600.0)
        met = time.time() - began
        trainer = Trainer(plan, world)
        trainer.fit()
    done = time.time() - began
    answer = {**counts, "met_s": met, "done_s": done, "rank": world.rank}
    (answers / f"{world.rank}.json").write_text(json.dumps(answer))
    close_process_groups()
