"""`gridformer generate` refuses what would have no effect, before it looks for a model."""

from __future__ import annotations

import pytest

from tests.support.commands import gridformer_here


@pytest.mark.parametrize("words", ["--temperature 0.7", "--top-k 3", "--top-p 0.5", "--beams 4"])
def test_greedy_refuses_what_it_would_overrule(words: str) -> None:
    done = gridformer_here("generate", "no-run", "--prompt", "x", "--greedy", *words.split())
    assert done.returncode == 2
    assert f"{words} has no effect with --greedy" in done.stderr


@pytest.mark.parametrize("words", ["-t 0", "--beams 1", "--length-penalty 0.5"])
def test_greedy_accepts_what_agrees_with_it(words: str) -> None:
    done = gridformer_here("generate", "no-run", "--prompt", "x", "--greedy", *words.split())
    assert "--greedy" not in done.stderr
    assert "no-run" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["def f(x):"], "write --prompt 'def f(x):'"),
        (["two", "words"], "write --prompt 'two words'"),
        (["x", "--prompt", "y"], "--prompt 'two words'"),
    ],
)
def test_a_text_without_its_option_is_told_the_option(words: list[str], said: str) -> None:
    done = gridformer_here("generate", "no-run", *words)
    assert done.returncode == 2
    assert f"argument {words[0]}: is no setting of the layout" in done.stderr
    assert said in done.stderr
