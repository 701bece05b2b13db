"""gridformer as a model of lm-evaluation-harness (Gao et al. 2021), registered as `gridformer`.

    gridformer evaluate runs/demo --tasks lm-eval:lambada_openai

or, in a script of one process, after `import gridformer.evaluate.harness`,

    lm_eval.simple_evaluate(model="gridformer", model_args="run_dir=runs/demo", tasks=[...])

Importing this module needs the package lm-eval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager

from gridformer.evaluate.continuing import Sampling
from gridformer.evaluate.loading import load_model
from gridformer.evaluate.scoring import after, prefix_id, sliding
from gridformer.evaluate.team import Team


@register_model("gridformer")
class GridformerLM(TemplateLM):
    """A model that predicts next tokens, as the harness uses it. On rank 0 only."""

    def __init__(
        self,
        run_dir: str = "",  # loaded on one process
        batch_size: int | str | None = None,
        device: str | None = None,  # None means cuda if there is a GPU
        team: Team | None = None,  # the processes of a layout, instead of `run_dir`
        max_length: int = 0,  # 0 means `max_seq_len`
        **_: Any,
    ) -> None:
        super().__init__()
        if team is None:
            chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
            size = batch_size if isinstance(batch_size, int) else 8
            team = Team(load_model(Path(run_dir), torch.device(chosen)), size)
        self.team, self._length = team, max_length
        self.tokenizer_of_run = team.trained.tokenizer

    @property
    def max_length(self) -> int:
        return self._length or self.team.trained.model.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer_of_run.eos_id

    @property
    def prefix_token_id(self) -> int:
        return prefix_id(self.tokenizer_of_run)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        tokenizer = self.tokenizer_of_run
        if add_special_tokens is None:  # as the tokenizer does, unless the text has it already
            add_special_tokens = not string.startswith(tokenizer.decode([self.prefix_token_id]))
        begin = tokenizer.begin_ids if add_special_tokens else []
        return [*begin, *tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        windows = [after(context, ids, self.max_length) for _, context, ids in requests]
        return [(one.log_likelihood, one.greedy) for one in self.team.score(windows)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [
            [*sliding(self.tok_encode(text), self.prefix_token_id, *[self.max_length] * 2)]
            for (text,) in (request.args for request in requests)
        ]
        scores = iter(self.team.score([window for text in texts for window in text]))
        return [sum(next(scores).log_likelihood for _ in text) for text in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts: dict[int, str] = {}
        groups: defaultdict[str, list[int]] = defaultdict(list)
        asked = [request.args for request in requests]
        for number, (_, settings) in enumerate(asked):
            groups[repr(settings)].append(number)
        for numbers in groups.values():
            continued = self._continued([asked[i][0] for i in numbers], dict(asked[numbers[0]][1]))
            texts |= dict(zip(numbers, continued))
        return [texts[number] for number in range(len(asked))]

    def _continued(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        max_tokens = int(settings.get("max_gen_toks", 256))
        how = Sampling(temperature=0.0)
        if settings.get("do_sample", False):
            temperature, top_p = (float(settings.get(k, 1.0)) for k in ("temperature", "top_p"))
            how = Sampling(temperature, int(settings.get("top_k", 0)), top_p)
        room = max(1, self.max_length - max_tokens)
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        texts = []
        for ids in self.team.continue_ids(prompts, max_tokens, until, how):
            text = self.tokenizer_of_run.decode(ids)
            for words in filter(None, until):
                text = text.split(words)[0]
            texts.append(text)
        return texts


def measured(team: Team, task: str, limit: int, length: int = 0) -> dict[str, float]:
    """Returns the measures of a task of the harness, or of its YAML file. On rank 0 only.

    The first `limit` documents are measured; 0 means all. The model reads `length` tokens at once.
    """
    results = simple_evaluate(
        model=GridformerLM(team=team, max_length=length),
        tasks=[task],
        limit=limit or None,
        bootstrap_iters=0,
        log_samples=False,
        task_manager=manager_of(task),
    )
    assert results is not None
    measures: dict[str, float] = {}
    several = len(results["results"]) > 1
    for name, numbers in results["results"].items():
        for key, value in numbers.items():
            measure, _, kind = key.partition(",")
            if isinstance(value, int | float) and not measure.endswith("_stderr") and kind:
                measure += f" ({kind})" if kind != "none" else ""
                measures[f"{name}: {measure}" if several else measure] = value
    return measures


def manager_of(task: str) -> TaskManager:
    """Returns the harness's manager of tasks, which reads its own tasks only if they are needed."""
    return TaskManager(include_defaults=not task.endswith(".yaml"))


def knows(task: str) -> bool:
    """Returns whether the harness has a task, a group or a tag of that name."""
    return bool(manager_of(task).match_tasks([task]))
