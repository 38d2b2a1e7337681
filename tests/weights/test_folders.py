"""The disk channel: folders that appear whole, and who reads them."""

import asyncio
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.learner.export import described
from asyncrl.weights.channels.disk import DiskChannel
from asyncrl.weights.folders import (
    KEPT,
    MANIFEST,
    TENSORS,
    Folder,
    FolderWriter,
    link_folder,
    read_folder,
    remove_older,
    versions_in,
    write_folder,
)
from asyncrl.weights.receiver import Receiver
from tests.learner.support import write_model
from tests.weights.fakes import HoldingEngine, channel, following, publisher, same_bits, shapes, some_tensors, until


def nothing(folder):
    (folder / "config.json").write_text("{}")


def test_versions_written_in_the_background_are_followed_bit_for_bit_and_old_ones_go(tmp_path):
    async def run():
        engine = HoldingEngine()
        writer = FolderWriter(tmp_path / "weights", nothing)
        async with following(DiskChannel(tmp_path / "weights"), engine, shapes(some_tensors())):
            for version in range(4):
                writer.write(version, some_tensors(version))
                await until(lambda version=version: engine.version == version)
                assert same_bits(engine.tensors, some_tensors(version))
        writer.close()
        assert sorted(versions_in(tmp_path / "weights")) == list(range(4))[-KEPT:]
        assert writer.failures == 0

    asyncio.run(run())


def test_a_new_learner_removes_what_an_earlier_one_left(tmp_path):
    write_folder(tmp_path, 9, some_tensors(), nothing)
    (tmp_path / "notes").write_text("somebody else's")
    FolderWriter(tmp_path, nothing).close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize("fault", ["flipped", "cut", "manifest", "gone", "no directory"])
def test_what_is_damaged_or_gone_is_an_error_of_its_kind(tmp_path, fault):
    async def run():
        folder = write_folder(tmp_path, 1, some_tensors(), nothing)
        link = DiskChannel(tmp_path)
        manifest = await link.newer_than(0)
        data = bytearray((folder / TENSORS).read_bytes())
        match fault:
            case "flipped":
                data[-3] ^= 1
                (folder / TENSORS).write_bytes(data)
            case "cut":
                (folder / TENSORS).write_bytes(data[:40])
            case "manifest":
                (folder / MANIFEST).write_text("{")
            case "gone":
                shutil.rmtree(folder)
            case "no directory":
                shutil.rmtree(tmp_path)
        with pytest.raises(UnavailableError if fault in ("gone", "no directory") else WeightsError):
            await link.fetch(await link.newer_than(0) if fault == "manifest" else manifest)

    asyncio.run(run())


def test_nothing_newer_is_none(tmp_path):
    write_folder(tmp_path, 1, some_tensors(), nothing)
    assert asyncio.run(DiskChannel(tmp_path).newer_than(1)) is None


def test_a_directory_that_cannot_be_written_is_counted_and_ends_nothing(tmp_path):
    writer = FolderWriter(tmp_path / "weights", nothing)
    shutil.rmtree(tmp_path / "weights")
    (tmp_path / "weights").write_text("in the way")
    writer.write(0, some_tensors())
    writer.close()
    assert writer.failures == 1


def test_a_folder_is_one_that_transformers_loads_tied_embeddings_and_all(tmp_path):
    model = write_model(tmp_path / "model")
    config = ModelConfig(path=str(model), dtype="bfloat16")
    tensors = {
        name: torch.randn(each.shape).to(torch.bfloat16)
        for name, each in AutoModelForCausalLM.from_pretrained(model).named_parameters()
    }
    folder = write_folder(tmp_path, 3, tensors, described(config))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert same_bits(dict(loaded.named_parameters()), tensors)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_an_engine_that_cannot_read_the_folder_pulls_instead_which_is_counted(tmp_path, context):
    async def run():
        engine = HoldingEngine()
        with publisher(context) as source:
            async with channel(source.endpoint) as link:
                receiver = Receiver([DiskChannel(tmp_path / "nowhere"), link], shapes(some_tensors()))
                following = asyncio.create_task(receiver.run(engine))
                source.publish(0, some_tensors(0))
                await until(lambda: engine.version == 0)
                assert receiver.fallbacks >= 1
                (tmp_path / "nowhere").mkdir()
                write_folder(tmp_path / "nowhere", 1, some_tensors(1), nothing)
                await until(lambda: engine.version == 1)
                assert receiver.counters()["weights_updates"] == 2
                assert receiver.counters()["weights_bytes"] == 2 * sum(each.nbytes for each in some_tensors().values())
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_a_channel_for_servers_gives_the_folder_unread_once_its_header_is_that_of_the_manifest(tmp_path):
    async def run():
        path = write_folder(tmp_path, 1, some_tensors(), nothing)
        link = DiskChannel(tmp_path, read=False)
        manifest = await link.newer_than(0)
        folder = await link.fetch(manifest)
        assert isinstance(folder, Folder)
        assert (folder.path, folder.manifest, link.received) == (path, manifest, 0)
        assert same_bits(folder.read(), some_tensors())
        whole = (path / TENSORS).read_bytes()
        (path / TENSORS).write_bytes(whole[:-5])
        with pytest.raises(WeightsError, match="damaged"):
            await link.fetch(manifest)
        write_folder(tmp_path, 1, {**some_tensors(), "scale": torch.zeros(2)}, nothing)
        with pytest.raises(WeightsError, match="other tensors"):
            await link.fetch(manifest)
        shutil.rmtree(path)
        with pytest.raises(UnavailableError, match="gone"):
            await link.fetch(manifest)

    asyncio.run(run())


@pytest.mark.parametrize("links", [True, False])
def test_a_folder_under_another_name_stays_when_the_first_goes_and_is_copied_only_where_it_must_be(
    tmp_path, links, monkeypatch
):
    def refuse(source, target):
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    path = write_folder(tmp_path / "pushed", 4, some_tensors(4), nothing)
    held = link_folder(read_folder(path, 4), tmp_path / "held")
    assert held.path == tmp_path / "held" / path.name
    assert (held.path / TENSORS).samefile(path / TENSORS) is links
    shutil.rmtree(path)
    assert same_bits(held.read(), some_tensors(4))
    assert (held.path / "config.json").exists()


def test_the_newest_versions_and_those_that_are_spared_are_never_removed(tmp_path):
    paths = [write_folder(tmp_path, version, some_tensors(), nothing) for version in range(5)]
    remove_older(tmp_path, [paths[1]])
    assert sorted(versions_in(tmp_path)) == [1, 3, 4]
