"""Settings of the libraries under the data tests: no network, no writing outside of pytest's."""

import os

import pytest
from hypothesis import settings

# Examples write files on machines that others use too: a deadline would fail by chance.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set before the first test imports `datasets`, which reads these once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
