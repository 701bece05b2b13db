"""BLEU during training: translates validation pairs with the model that is being trained.

BLEU is that of sacrebleu (Papineni et al. 2002; Post 2018) on text, so it does not depend on the
tokenizer. A pair counts if it fits the lengths of the run, as for the validation loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.config import RunConfig
from gridformer.data import Tokenizer, TokenSplit
from gridformer.data.run_data import RunData
from gridformer.evaluate.beams import BeamSearch, search_in_batches
from gridformer.evaluate.loading import Trained
from gridformer.train.metrics import complete_lines
from gridformer.train.step import Stepper
from gridformer.utils.files import writing

SAMPLES_FILE = "samples.jsonl"
_SHOWN = 5  # pairs of each evaluation that are written to SAMPLES_FILE


@dataclass(frozen=True)
class Pairs:
    """The pairs of a validation set on which BLEU is measured.

    Attributes:
        sources: The tokens of each source, with the end of text.
        texts: Each source as text.
        references: Each target as text.
    """

    sources: list[list[int]]
    texts: list[str]
    references: list[str]

    @classmethod
    def of(cls, split: TokenSplit, run: RunConfig, tokenizer: Tokenizer) -> Pairs:
        """Reads the first pairs of a split that fit the lengths of a run.

        Args:
            split: Pairs, each of them two documents in a row.
            run: Its source_len and seq_len are the most tokens, with the end of text, and
                `train.bleu_pairs` is the most pairs; 0 takes all.
            tokenizer: Turns tokens into text.
        """
        found = cls([], [], [])
        for number in range(0, split.n_documents, 2):
            if run.train.bleu_pairs and len(found.sources) == run.train.bleu_pairs:
                break
            source, target = split.document(number).tolist(), split.document(number + 1).tolist()
            if len(source) <= run.source_len and len(target) <= run.seq_len:
                found.sources.append(source)
                found.texts.append(tokenizer.decode(source[:-1]))
                found.references.append(tokenizer.decode(target[:-1]))
        return found


class Bleu:
    """A measure of evaluations during training; see `gridformer.train.evaluation.Measure`.

    Args:
        run: The run, which trains on pairs.
        out: Its run directory, where the first translations are written to `samples.jsonl`.
    """

    def __init__(self, run: RunConfig, out: Path) -> None:
        self.run, self.out = run, out
        data = RunData.open(run.data)
        self.tokenizer = data.first.tokenizer
        self.sets = {
            name: Pairs.of(split, run, self.tokenizer) for name, split in data.validation.items()
        }
        train = run.train
        self.how = BeamSearch(train.bleu_beams, train.bleu_length_penalty, run.seq_len)
        self._trained: Trained | None = None

    def due(self, step: int) -> bool:
        """Returns whether the evaluation after a step measures BLEU. That before training never."""
        train = self.run.train
        every = train.bleu_every * train.eval_every
        return step == train.steps or (step > 0 and every > 0 and step % every == 0)

    def __call__(self, stepper: Stepper, step: int) -> Mapping[str, float]:
        """See Measure. All ranks translate together and compute the same score."""
        if not self.due(step):
            return {}
        import sacrebleu

        trained = self._model(stepper)
        found, shown = {}, []
        for name, pairs in self.sets.items():
            ids = search_in_batches(trained, trained.special, pairs.sources, self.how)
            said = [self.tokenizer.decode(target) for target in ids]
            suffix = f"_{name}" if name else ""
            score = sacrebleu.corpus_bleu(said, [pairs.references])
            found[f"val_bleu{suffix}"] = float(score.score)
            several = {"set": name} if name else {}
            for source, text, reference in [*zip(pairs.texts, said, pairs.references)][:_SHOWN]:
                line = {"step": step, "prompt": source, "text": text, "reference": reference}
                shown.append({**line, **several})
        if stepper.axes.world.index == 0:
            self._write(step, shown)
        return found

    def _model(self, stepper: Stepper) -> Trained:
        """Returns the model that is being trained as one that generates."""
        if self._trained is None:
            layout, axes = self.run.layout, stepper.axes
            self._trained = Trained(self.run, stepper.model, self.tokenizer, layout, axes)
            # It has the channels between stages; the property would open further ones.
            vars(self._trained)["executor"] = stepper.executor
        return self._trained

    def _write(self, step: int, shown: Sequence[Mapping[str, Any]]) -> None:
        """Adds the translations of a step, and removes those of steps that run again."""
        path = self.out / SAMPLES_FILE
        lines = [line for line in complete_lines(path) if line["step"] < step]
        swap = path.with_suffix(".tmp")
        with writing(path):
            content = (json.dumps(line, ensure_ascii=False) + "\n" for line in [*lines, *shown])
            swap.write_text("".join(content), encoding="utf-8")
            os.replace(swap, path)
