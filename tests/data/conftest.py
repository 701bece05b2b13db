"""Settings of libraries for the data tests: no network, no writing outside pytest's folders."""

import os

import pytest

from gridformer.data import TokenFolder
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.reading import TextSource
from tests.support.data import labeled_source, listed, pairs_source, sentences


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set these before the first test imports `datasets`, which reads them only once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def _folder(factory: pytest.TempPathFactory, source: TextSource) -> TokenFolder:
    out = factory.mktemp(source.kind) / "t"
    return prepare_corpus([source], out, vocab_size=300, val_fraction=0.2)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return _folder(tmp_path_factory, listed(*sentences(300)))


@pytest.fixture(scope="session")
def pairs_folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return _folder(tmp_path_factory, pairs_source(120))


@pytest.fixture(scope="session")
def labeled_folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return _folder(tmp_path_factory, labeled_source(120))
