"""The length penalty of a search chooses between a short and a long translation.

The model is replaced by hand-set probabilities, so the scores can be computed with a pencil.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.config import RunConfig, parse_run
from gridformer.data import TokenFolder, resolve
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.evaluate import beams
from gridformer.evaluate.bleu import Bleu
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.tasks import Options, check_tasks, parse_tasks
from gridformer.utils.errors import ConfigError
from tests.support.checkpoints import built, save_model
from tests.support.commands import gridformer_here
from tests.support.data import pairs_source
from tests.support.marks import extra

CPU = torch.device("cpu")
SAID = "QUICK BROWN FOX JUMPS OVER"
MODEL = {"family": "transformer", "n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    out = tmp_path_factory.mktemp("pairs") / "tokens"
    return prepare_corpus([pairs_source(40)], out, vocab_size=270, val_fraction=0.2)


def a_run(folder: TokenFolder, **train: Any) -> RunConfig:
    sections = {"model": MODEL, "data": {"path": str(folder.path), "task": "pairs"}, "train": train}
    return resolve(parse_run(sections), folder)


@pytest.fixture
def hand_set(folder: TokenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the source, say nothing with probability 0.5, and `SAID` with 0.45."""
    words, eos = folder.tokenizer.encode(SAID), folder.tokenizer.eos_id

    class HandSet:
        speaks = True

        def __init__(self, trained: Trained, n: int, sources: Sequence[Sequence[int]]) -> None:
            self.n_rows, self.done, self.v = n, 0, trained.model.config.vocab_size
            self.rows = range(n)

        def select(self, order: Tensor, k: int = 1) -> None:
            self.rows = range(len(order))

        def read(self, tokens: Tensor) -> Tensor:
            found = torch.full((len(tokens), self.v), 1e-6, dtype=torch.float64)
            if self.done == 0:
                found[:, eos], found[:, words[0]] = 0.5, 0.45
            else:
                goes_on = tokens[:, 0] == words[self.done - 1] if self.done <= len(words) else None
                following = [*words, eos][min(self.done, len(words))]
                if goes_on is not None:
                    found[goes_on, following] = 1.0
            self.done += 1
            return found.log()

    monkeypatch.setattr(beams, "Decoder", HandSet)


@pytest.mark.usefixtures("hand_set")
def test_bleu_during_training_searches_as_the_run_says(folder: TokenFolder, tmp_path: Path) -> None:
    n = len(folder.tokenizer.encode(SAID)) + 1
    assert math.log(0.45) / n > math.log(0.5), "a penalty of 1 prefers the long one"
    for penalty, want in ((0.0, ""), (1.0, SAID)):
        run = a_run(folder, bleu_every=1, bleu_beams=2, bleu_length_penalty=penalty)
        trained, how = Trained(run, built(run, 1).eval(), folder.tokenizer), Bleu(run, tmp_path).how
        found = beams.search_in_batches(trained, [[5, 6], [7]], how)
        assert [folder.tokenizer.decode(ids) for ids in found] == [want, want]


@pytest.mark.usefixtures("hand_set")
def test_the_command_evaluate_has_the_options_of_the_search(
    folder: TokenFolder, tmp_path: Path
) -> None:
    extra("sacrebleu")
    run = a_run(folder)
    save_model(tmp_path / "run", run, 0)
    (tmp_path / "run" / "tokenizer.json").write_bytes(folder.tokenizer_file.read_bytes())
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"source": "the quick brown fox", "target": SAID}) + "\n")
    words = ("evaluate", tmp_path / "run", "--tasks", f"bleu:{pairs}", "--json", "--device", "cpu")
    scores = []
    # In greedy search the first token, the end, is the likeliest one, whatever the penalty.
    for options in ("--length-penalty 0", "", "--beams 2 --length-penalty 1", "--beams 1"):
        done = gridformer_here(*words, *options.split())
        assert not done.returncode, done.stderr
        (found,) = json.loads(done.stdout)["tasks"].values()
        scores.append(round(found["bleu"]))
    assert scores == [0, 100, 100, 0]


def test_options_that_no_task_uses_are_refused(folder: TokenFolder) -> None:
    run = a_run(folder)
    with pytest.raises(ConfigError) as refused:
        check_tasks(run, parse_tasks("set:val"), Options(), given=["beams", "length_penalty"])
    assert refused.value.problems == [
        f"--{name} is for bleu:FILE, which translates, and none of the tasks does: leave it out"
        for name in ("beams", "length-penalty")
    ]
