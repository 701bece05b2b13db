"""Answers to questions are those of a search over all spans of all windows, as published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gridformer.data import Tokenizer
from gridformer.data.samples.examples import AnswerExamples
from gridformer.data.samples.sample import SpecialIds
from gridformer.train.scorers import AnswerSpans, answer_scores, best_spans
from tests.support.tasks import examples

SEQ, STRIDE, LONGEST = 24, 7, 4


def searched(
    tokenizer: Tokenizer, asked: dict[str, Any], logits: Iterator[Tensor], may_be_none: bool
) -> str:
    """Return the answer to a question as Devlin et al. 2019 define it, empty for none.

    Args:
        tokenizer: The tokenizer.
        asked: The question and its context.
        logits: The logits [2, SEQ] of the windows of this question, and of those after it.
        may_be_none: Whether a question may have no answer.
    """
    context = asked["context"]
    offsets = tokenizer.encode_with_offsets([context])[0][1]
    before = 1 + len(tokenizer.encode(asked["question"])) + 1  # [CLS] question [SEP]
    room = SEQ - before - 1
    firsts = [0]
    while firsts[-1] + room < len(offsets):
        firsts.append(firsts[-1] + STRIDE)
    windows = [range(first, min(first + room, len(offsets))) for first in firsts]

    def has_most_context(token: int) -> range:
        def n_tokens(window: range) -> float:
            sides = min(token - window.start, window.stop - 1 - token)
            return sides + 0.01 * len(window)

        return max((window for window in windows if token in window), key=n_tokens)

    spans, nulls = [], []
    for window in windows:
        begins, ends = next(logits)
        nulls.append(float(begins[0] + ends[0]))
        at = before - window.start
        spans += [
            (float(begins[at + i] + ends[at + j]), i, j)
            for i in window
            if has_most_context(i) is window
            for j in window
            if i <= j < i + LONGEST
        ]
    score, first, last = max(spans)
    if may_be_none and min(nulls) > score:
        return ""
    return str(context[offsets[first][0] : offsets[last][1]].strip())


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", ["squad", "squad2"])
def test_answers_are_those_of_a_search_over_all_windows(
    tmp_path: Path, name: str, split: str
) -> None:
    folder = examples(name, tmp_path)
    tokenizer, version = folder.tokenizer, "v2.0" if name == "squad2" else "v1.1"
    file = tmp_path / name / f"{'train' if split == 'train' else 'dev'}-{version}.json"
    (article,) = json.loads(file.read_text(encoding="utf-8"))["data"]
    asked = [
        {"context": one["context"], **question}
        for one in article["paragraphs"]
        for question in one["qas"]
    ]
    opened = folder.train if split == "train" else folder.val
    special = SpecialIds.of("bert", "answer", tokenizer, 0)
    samples = AnswerExamples(opened, SEQ, special, STRIDE, evaluating=True)
    draw = np.random.default_rng(0)
    context = np.stack([samples.sample(i, draw)["context"] for i in range(samples.n_samples)])
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(context), 2, SEQ, generator=generator, dtype=torch.float64)
    logits[:, :, 0] += 3.5  # so that about half of the questions have no answer

    read = iter(logits)
    want = [searched(tokenizer, one, read, name == "squad2") for one in asked]
    assert next(read, None) is None, "there are as many windows as samples"
    scorer = AnswerSpans(samples, folder, split)
    found = best_spans(logits, torch.from_numpy(context), LONGEST)
    assert scorer.said(found) == want
    if name == "squad2":
        assert 0.3 < want.count("") / len(want) < 0.7
    assert len({*want}) > len(want) / 3, "the answers differ"
    right = [[one["text"] for one in question["answers"]] for question in asked]
    assert scorer.scores(found) == answer_scores(want, right)
