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
from asyncrl.weights.folders import KEPT, MANIFEST, TENSORS, FolderWriter, versions_in, write_folder
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
