"""`gridformer generate` refuses what would have no effect, before it looks for a model."""

import shlex

import pytest

from tests.support.commands import gridformer_here


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (f"--prompt x --greedy {option}", f"{option} has no effect with --greedy")
            for option in ("--temperature 0.7", "--top-k 3", "--top-p 0.5", "--beams 4")
        ),
        # These agree with it, so what is missing is the model.
        *(
            (f"--prompt x --greedy {option}", "error: no-run")
            for option in ("-t 0", "--beams 1", "--length-penalty 0.5")
        ),
        ("'def f(x):'", "argument def f(x):: is no setting of the layout"),
        ("'def f(x):'", "write --prompt 'def f(x):'"),
        ("two words", "write --prompt 'two words'"),
        ("x --prompt y", "--prompt 'two words'"),
    ],
)
def test_refusals(words: str, said: str) -> None:
    done = gridformer_here("generate", "no-run", *shlex.split(words))
    assert done.returncode == 2
    assert said in done.stderr
