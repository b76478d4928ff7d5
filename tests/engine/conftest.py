"""One small checkpoint for all engine tests, loaded once."""

from pathlib import Path

import pytest

from engine.weights import LoadedModel, load_model
from tests.engine.helpers import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint, "float32", "cpu")
