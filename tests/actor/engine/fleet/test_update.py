"""An update and its folders: what a server is reading stays, whatever the learner and newer versions do."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.actor.engine.sglang.server import SglangServer
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.types import Sampling
from asyncrl.weights.folders import TENSORS, Folder, read_folder, write_folder
from tests.actor.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.helpers import OWN_RUN, async_until
from tests.weights.fakes import same_bits, some_tensors

SHORT = Sampling(1.0, 5)


def nothing(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def pushed(directory: Path, version: int, weights: Any = None) -> Folder:
    """As the learner writes it."""
    return read_folder(write_folder(directory, version, weights or tensors(version), nothing, OWN_RUN), version)


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def test_what_a_server_reads_is_kept_however_many_versions_follow(tmp_path: Path):
    async def scenario():
        folders = Folders(tmp_path / "held", nothing, OWN_RUN)
        slow = Update(0, "0-me", some_tensors(0), folders)
        async with slow.folder() as path:
            for version in range(1, 5):
                async with Update(version, f"{version}-me", some_tensors(version), folders).folder():
                    pass
            assert names(path.parent) == ["v00000000", "v00000003", "v00000004"]
            assert same_bits(read_folder(path, 0).read(), some_tensors(0))
        folders.write(5, some_tensors(5))
        assert not path.exists()
        folders.close()
        assert not list((tmp_path / "held").iterdir())

    run(scenario)


def test_a_version_that_a_server_comes_to_late_is_there_though_newer_ones_were_written(tmp_path: Path):
    async def scenario():
        folders = Folders(tmp_path / "held", nothing, OWN_RUN)
        written = Update(0, "0-me", some_tensors(0), folders)
        held = Update(9, "9-me", folders.hold(pushed(tmp_path / "pushed", 9, some_tensors(9))), folders)
        async with written.folder():
            pass
        with held.kept():
            for version in range(10, 14):
                folders.write(version, some_tensors(version))
            for late in (written, held):
                async with late.folder() as path:
                    assert same_bits(read_folder(path, late.version).read(), some_tensors(late.version))
        folders.write(14, some_tensors(14))
        assert names(folders.directory) == ["v00000013", "v00000014"]

    run(scenario)


def test_a_folder_is_read_and_tensors_are_written_once_for_all_servers(tmp_path: Path, monkeypatch):
    reads: list[Path] = []
    read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self: reads.append(self.path) or read(self))

    async def scenario():
        folders = Folders(tmp_path / "held", nothing, OWN_RUN)
        update = Update(2, "2-me", folders.hold(pushed(tmp_path / "pushed", 2, some_tensors(2))), folders)
        assert not reads
        shutil.rmtree(tmp_path / "pushed")
        first, second = await asyncio.gather(update.tensors(), update.tensors())
        assert first is second
        assert same_bits(first, some_tensors(2))
        async with update.folder() as path:
            assert path.parent == folders.directory

    run(scenario)
    assert len(reads) == 1


def test_a_folder_that_went_before_it_could_be_held_is_unavailable_and_one_that_went_later_is_an_error(tmp_path: Path):
    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
    folder = pushed(tmp_path / "pushed", 2)
    shutil.rmtree(folder.path)
    with pytest.raises(UnavailableError, match="a newer one will follow"):
        folders.hold(folder)
    with pytest.raises(WeightsError, match="cannot be read"):
        run(lambda: Update(2, "2-me", folder, folders).tensors())


def test_a_directory_that_cannot_hold_folders_is_named(tmp_path: Path):
    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
    folders.directory.rmdir()
    folders.directory.write_text("in the way")
    with pytest.raises(WeightsError, match="must be writable here"):
        folders.hold(pushed(tmp_path / "pushed", 2))


def test_servers_load_the_learners_folder_which_may_go_at_once_and_a_late_joiner_gets_the_newest(tmp_path: Path):
    first, late = FakeSglang(), FakeSglang()
    servers: list[FakeSglang] = [first]

    async def discover():
        return [server.url for server in servers]

    async def scenario():
        folders = Folders(tmp_path / "held", nothing, OWN_RUN)
        options = {"transports": ("disk",), "folders": folders, "discover": discover}
        async with serving(first, late), fleet_over(**options) as fleet:
            for version in range(4):
                folder = pushed(tmp_path / "pushed", version)
                taken = asyncio.create_task(fleet.update_weights(version, folder))
                await async_until(lambda version=version: folders.path(version).exists())
                assert (folders.path(version) / TENSORS).samefile(folder.path / TENSORS)
                shutil.rmtree(folder.path)
                await taken
            servers.append(late)
            await async_until(lambda: fleet.stats().counters["servers_ready"] == 2)
            assert late.weights == 3
            return await asyncio.gather(*(fleet.generate(ids(), SHORT, (), f"s{i}") for i in range(4)))

    for got in run(scenario):
        assert_true(got)


def test_a_folder_of_another_model_is_refused_before_any_server_hears_of_it(tmp_path: Path):
    server = FakeSglang()

    async def scenario():
        folders = Folders(tmp_path / "held", nothing, OWN_RUN)
        async with serving(server), fleet_over(server, transports=("disk",), folders=folders) as fleet:
            with pytest.raises(WeightsError, match="unknown"):
                await fleet.update_weights(1, pushed(tmp_path / "pushed", 1, some_tensors()))

    run(scenario)
    assert "update_weights_from_disk" not in server.calls


def test_a_server_that_cannot_read_the_folder_gets_its_tensors(tmp_path: Path):
    server = FakeSglang()
    server.refuses.add("update_weights_from_disk")

    async def scenario():
        options = {"transports": ("disk", "tensor"), "folders": Folders(tmp_path / "held", nothing, OWN_RUN)}
        async with serving(server), fleet_over(server, **options) as fleet:
            await fleet.update_weights(3, pushed(tmp_path / "pushed", 3))
            return await fleet.generate(ids(), SHORT, (), "s")

    assert_true(run(scenario))


@pytest.mark.parametrize("given", ["tensors", "folder"])
def test_servers_are_given_what_is_staged_on_the_configured_device(tmp_path: Path, monkeypatch, given: str):
    server, devices = FakeSglang(), set()

    async def load(self: Any, update: Update) -> None:
        devices.update(each.device.type for each in (await update.tensors()).values())
        server.label = self._label = update.label

    monkeypatch.setattr(SglangServer, "load", load)

    async def scenario():
        weights = tensors(1) if given == "tensors" else pushed(tmp_path / "pushed", 1)
        options = {"folders": Folders(tmp_path / "held", nothing, OWN_RUN), "staging": torch.device("meta")}
        async with serving(server), fleet_over(server, **options) as fleet:
            await fleet.update_weights(1, weights)

    run(scenario)
    assert devices == {"meta"}
