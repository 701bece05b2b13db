"""Lets rank 0 decide what all processes of a layout compute, where only it knows what comes next.

Requests travel as JSON, so nothing that is received is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from gridformer import comm
from gridformer.evaluate.continuing import Prompt, Sampling
from gridformer.evaluate.generate import continued_ids
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import Score, ScoredWindow, score

LABEL = "request"


class Team:
    """All processes of a layout. Rank 0 calls `score`, `continue_ids` and finally `release`.

    The others call `follow`, which returns after `release`.

    Args:
        trained: The model.
        batch_size: About how many windows or texts go through the model together.
    """

    def __init__(self, trained: Trained, batch_size: int) -> None:
        self.trained, self.batch_size = trained, batch_size

    def score(self, windows: Sequence[ScoredWindow]) -> list[Score]:
        """Returns `gridformer.evaluate.scoring.score`."""
        found: list[Score] = self._ask("score", [[list(w.tokens), w.n_targets] for w in windows])
        return found

    def continue_ids(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        until: Sequence[str],
        sampling: Sampling,
    ) -> list[list[int]]:
        """Returns `gridformer.evaluate.generate.continued_ids`, prompt i with seed `seed` + i.

        Args:
            prompts: The tokens of each prompt.
            max_tokens: The most tokens to sample for each.
            until: A continuation also ends when it contains one of these texts.
            sampling: Settings.
        """
        settings = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed]
        request = [[list(ids) for ids in prompts], max_tokens, list(until), settings]
        found: list[list[int]] = self._ask("continue", request)
        return found

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
            prompts, max_tokens, until, settings = values
            how = Sampling(*settings)
            work = [Prompt(ids, max_tokens, how.seed + i) for i, ids in enumerate(prompts)]
            return continued_ids(self.trained, work, how, self.batch_size, until=until)
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
