"""A cluster for all tests of this folder; without Slurm they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import ClusterError, SlurmCluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes with four GPUs each that no program can use."""
    if reason := missing():
        pytest.skip(reason)
    try:
        with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3, gpus=4) as started:
            yield started
    except ClusterError as error:
        pytest.skip(str(error))
