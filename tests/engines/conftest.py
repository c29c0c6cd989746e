"""Everything here needs an engine; scripts/test-engines installs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_model

from p2pkv.etcd_server import EtcdCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        item.add_marker(pytest.mark.engines)
        engine = item.path.stem.removeprefix("test_")
        if engine != "interfaces" and find_spec(engine) is None:
            reason = f"{engine} is not installed: scripts/test-engines {engine}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.make(folder)
    return folder
