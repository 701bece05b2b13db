"""BLEU during training: translates validation pairs with the model that is being trained.

BLEU is that of sacrebleu (Papineni et al. 2002; Post 2018) on text, so it does not depend on the
tokenizer. A pair counts if it fits the lengths of the run, as for the validation loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gridformer.config import RunConfig
from gridformer.data import Tokenizer, TokenSplit
from gridformer.data.run_data import RunData
from gridformer.evaluate.beams import BeamSearch, search_in_batches
from gridformer.evaluate.loading import Trained
from gridformer.mesh import Axis
from gridformer.models.blocks import SequenceRows
from gridformer.train.metrics import complete_lines
from gridformer.train.step import Stepper
from gridformer.utils.files import writing

SAMPLES_FILE = "samples.jsonl"
_SHOWN = 5  # pairs of each evaluation that are written to SAMPLES_FILE


def pairs_of(
    split: TokenSplit, run: RunConfig, tokenizer: Tokenizer
) -> list[tuple[list[int], str, str]]:
    """Returns the first `train.bleu_pairs` pairs, or all, that fit the lengths of a run.

    Of each the tokens of the source, the source and the target. A pair is two documents in a row,
    each with the end of text.
    """
    pairs: list[tuple[list[int], str, str]] = []
    for number in range(0, split.n_documents, 2):
        if run.train.bleu_pairs and len(pairs) == run.train.bleu_pairs:
            break
        source, target = split.document(number).tolist(), split.document(number + 1).tolist()
        if len(source) <= run.source_len and len(target) <= run.seq_len:
            pairs.append((source, tokenizer.decode(source[:-1]), tokenizer.decode(target[:-1])))
    return pairs


class Bleu:
    """A measure of evaluations during training; see `gridformer.train.evaluation.Measure`.

    The first translations are written to `samples.jsonl` in the run directory `out`.
    """

    def __init__(self, run: RunConfig, out: Path) -> None:
        self.run, self.out = run, out
        data = RunData.open(run.data)
        self.tokenizer = data.first.tokenizer
        self.sets = {
            name: pairs_of(split, run, self.tokenizer) for name, split in data.validation.items()
        }
        train = run.train
        self.how = BeamSearch(train.bleu_beams, train.bleu_length_penalty, run.seq_len)
        self._trained: Trained | None = None

    def due(self, step: int) -> bool:
        """Returns whether the evaluation after a step, but not before training, measures BLEU."""
        train = self.run.train
        every = train.bleu_every * train.eval_every
        return step == train.steps or (step > 0 and every > 0 and step % every == 0)

    def __call__(self, stepper: Stepper, step: int) -> Mapping[str, float]:
        """See Measure. All ranks translate together and compute the same score."""
        if not self.due(step):
            return {}
        import sacrebleu

        trained, sequence = self._model(stepper), stepper.model.sequence
        stepper.model.reads_tokens(SequenceRows())  # generation divides texts over rows
        scores, shown = {}, []
        for name, pairs in self.sets.items():
            ids = search_in_batches(trained, [source for source, _, _ in pairs], self.how)
            said = [self.tokenizer.decode(target) for target in ids]
            suffix = f"_{name}" if name else ""
            score = sacrebleu.corpus_bleu(said, [[reference for _, _, reference in pairs]])
            scores[f"val_bleu{suffix}"] = float(score.score)
            several = {"set": name} if name else {}
            for (_, source, reference), text in [*zip(pairs, said)][:_SHOWN]:
                line = {"step": step, "prompt": source, "text": text, "reference": reference}
                shown.append({**line, **several})
        stepper.model.reads_tokens(sequence)
        if stepper.axes.world.index == 0:
            self._write(step, shown)
        return scores

    def _model(self, stepper: Stepper) -> Trained:
        """Returns the model that is being trained as one that generates."""
        if self._trained is None:
            layout, axes = self.run.layout, stepper.axes
            if layout.sequence_rows > 1:
                layout = layout.model_copy(update={"rows_over": "batch"})
                axes = replace(axes, batch=axes.row, sequence=Axis("sequence"))
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
