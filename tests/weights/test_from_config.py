"""The routes that a configuration opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.weights.folders import Folder, run_directory, write_folder
from asyncrl.weights.from_config import open_routes
from tests.helpers import OWN_RUN
from tests.weights.fakes import same_bits, some_tensors


@pytest.mark.parametrize(("kind", "unread"), [("sglang", True), ("vllm", True), ("embedded", False)])
async def test_folders_go_unread_to_actors_that_have_servers(tmp_path: Path, kind: str, unread: bool) -> None:
    config = TrainConfig()
    config.engine.kind = kind
    config.run.name, config.run.dir = OWN_RUN.name, str(tmp_path)
    config.weights.to_engines, config.weights.dir = "disk", str(tmp_path)
    write_folder(run_directory(tmp_path, OWN_RUN), 1, some_tensors(), lambda folder: None)

    disk, zmq = open_routes(config, None)
    assert (disk.name, zmq.name) == ("disk", "zmq")
    manifest = await disk.newer_than(0)
    assert manifest is not None
    brought = await disk.fetch(manifest)
    assert isinstance(brought, Folder) is unread
    assert same_bits(brought.read() if isinstance(brought, Folder) else brought, some_tensors())
