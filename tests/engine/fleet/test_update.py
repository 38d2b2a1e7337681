"""An update and its folders: a folder that a server reads stays, although the learner and newer versions go on."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.update import BUFFER_BYTES, BUFFERS, Update, copy_through, on_device
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.types import Sampling
from asyncrl.weights.folders import TENSORS, Folder, read_folder, write_folder
from tests.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.helpers import OWN_RUN, async_until
from tests.weights.fakes import same_bits, some_tensors

pytestmark = pytest.mark.slow

SHORT = Sampling(1.0, 5)


def nothing(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def pushed(directory: Path, version: int, weights: Any = None) -> Folder:
    """Write a folder as the learner does."""
    return read_folder(write_folder(directory, version, weights or tensors(version), nothing), version)


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


async def test_what_a_server_reads_is_kept_however_many_versions_follow(tmp_path: Path):
    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
    slow = Update(0, "0-me", some_tensors(0), folders)
    with slow.kept():
        path = await slow.folder()
        for version in range(1, 5):
            await Update(version, f"{version}-me", some_tensors(version), folders).folder()
        assert names(path.parent) == ["v00000000", "v00000003", "v00000004"]
        assert same_bits(read_folder(path, 0).read(), some_tensors(0))
    folders.write(5, some_tensors(5))
    assert not path.exists()
    folders.close()
    assert not list((tmp_path / "held").glob("*/*"))


async def test_a_version_that_a_server_comes_to_late_is_there_though_newer_ones_were_written(tmp_path: Path):
    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
    written = Update(0, "0-me", some_tensors(0), folders)
    held = Update(9, "9-me", folders.hold(pushed(tmp_path / "pushed", 9, some_tensors(9))), folders)
    await written.folder()
    with held.kept():
        for version in range(10, 14):
            folders.write(version, some_tensors(version))
        for late in (written, held):
            with late.kept():
                assert same_bits(read_folder(await late.folder(), late.version).read(), some_tensors(late.version))
    folders.write(14, some_tensors(14))
    assert names(folders.directory) == ["v00000013", "v00000014"]


async def test_a_folder_is_read_and_tensors_are_written_once_for_all_servers(tmp_path: Path):
    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
    update = Update(2, "2-me", folders.hold(pushed(tmp_path / "pushed", 2, some_tensors(2))), folders)
    shutil.rmtree(tmp_path / "pushed")
    first, second = await asyncio.gather(update.tensors(), update.tensors())
    assert first is second
    assert same_bits(first, some_tensors(2))
    assert (await update.folder()).parent == folders.directory
    assert await update.tensors() is first


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
        async with serving(first, late), fleet_over(folders=folders, discover=discover) as fleet:
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


async def test_a_folder_of_another_model_is_refused_before_any_server_hears_of_it(tmp_path: Path):
    server = FakeSglang()

    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
    async with serving(server), fleet_over(server, folders=folders) as fleet:
        with pytest.raises(WeightsError, match="unknown"):
            await fleet.update_weights(1, pushed(tmp_path / "pushed", 1, some_tensors()))
    assert "update_weights_from_disk" not in server.calls


async def test_tensors_are_copied_to_a_device_once_and_not_at_all_where_they_are_there_already():
    weights = some_tensors()
    update = Update(1, "1-me", weights)
    elsewhere = torch.device("meta")
    first, second = await asyncio.gather(update.tensors(elsewhere), update.tensors(elsewhere))
    assert first is second
    assert {each.device for each in first.values()} == {elsewhere}
    here = await update.tensors()
    assert same_bits(here, weights)
    assert all(here[name].data_ptr() == weights[name].data_ptr() for name in weights)


def test_tensors_of_any_kind_pass_through_buffers_that_are_smaller_than_they_are():
    tensors, buffers = some_tensors(), []
    copies = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()}

    def new_buffer():
        buffers.append(torch.empty(24, dtype=torch.uint8))
        return buffers[-1]

    copy_through(new_buffer, list(tensors.values()), list(copies.values()), 24)
    assert same_bits(copies, tensors)
    assert len(buffers) == BUFFERS


def test_an_error_of_making_a_buffer_reaches_the_caller():
    def new_buffer():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        copy_through(new_buffer, [torch.ones(3)], [torch.empty(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_on_a_gpu_have_the_same_bits():
    gpu = torch.device("cuda", 0)
    tensors = some_tensors() | {"large": torch.randn(3, BUFFER_BYTES // 4)}
    copies = on_device(tensors, gpu)
    assert {each.device for each in copies.values()} == {gpu}
    assert same_bits({name: each.cpu() for name, each in copies.items()}, tensors)
    again = on_device(copies, gpu)
    assert all(again[name].data_ptr() == copies[name].data_ptr() for name in copies)
