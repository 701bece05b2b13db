"""Settings of the libraries under the data tests: no network, no writing outside of pytest's."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set before the first test imports `datasets`, which reads these once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
