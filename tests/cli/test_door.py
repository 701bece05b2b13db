"""Numbers that no command takes: the refusal says the nearest one that works."""

from __future__ import annotations

import pytest

from gridformer.cli.door import checked
from gridformer.utils.errors import ConfigError
from gridformer.utils.units import LARGEST_INTEGER


@pytest.mark.parametrize(
    ("value", "shown", "remedy"),
    [
        (10**23, str(10**23), f"is too large: use at most {LARGEST_INTEGER}"),
        (-(10**23), str(-(10**23)), f"is too small: use at least -{LARGEST_INTEGER}"),
        (float("inf"), "inf", f"is too large: use at most {LARGEST_INTEGER}"),
        (float("nan"), "nan", "is not a number"),
    ],
)
def test_a_number_that_is_too_large(value: float, shown: str, remedy: str) -> None:
    taken = []

    @checked
    def command(seed: float) -> None:
        taken.append(seed)

    with pytest.raises(ConfigError) as refused:
        command(seed=value)
    assert str(refused.value).startswith(f"--seed: {shown} ")
    assert remedy in str(refused.value)
    for works in (LARGEST_INTEGER, -LARGEST_INTEGER):
        command(seed=works)
    assert taken == [LARGEST_INTEGER, -LARGEST_INTEGER]
