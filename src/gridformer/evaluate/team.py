"""Lets rank 0 decide what all processes of a layout compute, where only it knows what comes next.

Requests travel as JSON, so nothing that is received is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from gridformer import comm
from gridformer.evaluate.continuing import Prompt, Sampling
from gridformer.evaluate.generate import Generation, continued_ids
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import Score, ScoredWindow, score

LABEL = "request"


class Team:
    """All processes of a layout. Rank 0 calls `score`, `continue_ids` and finally `release`.

    The others call `follow`, which returns after `release`. About `batch_size` windows or texts go
    through the model together.
    """

    def __init__(self, trained: Trained, batch_size: int) -> None:
        self.trained, self.batch_size = trained, batch_size

    def score(self, windows: Sequence[ScoredWindow]) -> list[Score]:
        """Returns `gridformer.evaluate.scoring.score`."""
        scores: list[Score] = self._ask("score", [astuple(window) for window in windows])
        return scores

    def continue_ids(
        self, prompts: list[list[int]], max_tokens: int, until: list[str], sampling: Sampling
    ) -> list[list[int]]:
        """Returns `gridformer.evaluate.generate.continued_ids`, prompt i with seed `seed` + i."""
        request = [prompts, max_tokens, until, astuple(sampling)]
        continued: list[list[int]] = self._ask("continue", request)
        return continued

    def release(self) -> None:
        """Lets the other processes go on."""
        self._ask("release", [])

    def follow(self) -> None:
        """Computes what rank 0 asks for."""
        while True:
            what, values = json.loads(self._told(""))
            if what == "release":
                return
            self._do(what, values)

    def _ask(self, what: str, values: list[Any]) -> Any:
        # Rank 0 computes what the others have received, too, so that no number differs.
        return self._do(*json.loads(self._told(json.dumps([what, values]))))

    def _do(self, what: str, values: list[Any]) -> Any:
        if what == "score":
            windows = [ScoredWindow(tokens, n) for tokens, n in values]
            return score(self.trained, windows, self.batch_size)
        if what == "continue":
            prompts, max_tokens, until, sampling = values
            how = Generation(Sampling(*sampling), batch_size=self.batch_size)
            seed = how.sampling.seed
            work = [Prompt(ids, max_tokens, seed + i) for i, ids in enumerate(prompts)]
            return continued_ids(self.trained, work, how, until)
        return None

    def _told(self, text: str) -> str:
        """Returns the text of rank 0."""
        world, device = self.trained.axes.world, self.trained.device
        content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        size = torch.tensor([len(content)], device=device)
        n = int(comm.broadcast(size, world, 0, LABEL))
        if world.index:
            content = torch.empty(n, dtype=torch.uint8, device=device)
        return bytes(comm.broadcast(content, world, 0, LABEL).tolist()).decode()
