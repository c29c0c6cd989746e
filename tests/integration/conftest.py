"""One etcd for all tests that leave it alone; what the nodes printed, when a test fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import clusters


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    """Shared: clusters have names of their own. Not to be killed or paused."""
    with EtcdCluster(1) as cluster:
        yield cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for cluster in list(clusters):
            report.sections.append((f"cluster {cluster.name}", cluster.logs()))
    return report
