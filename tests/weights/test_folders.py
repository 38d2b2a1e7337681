"""The disk route: folders that appear whole, and who reads them."""

import asyncio
import shutil
import threading
import weakref
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.learner.checkpoint.export import folder_writer
from asyncrl.types import RunIdentity
from asyncrl.weights.disk_route import DiskRoute
from asyncrl.weights.folders import (
    KEPT,
    MANIFEST,
    TENSORS,
    Folder,
    FolderWriter,
    link_folder,
    read_folder,
    remove_older,
    run_directory,
    versions_in,
    write_folder,
)
from asyncrl.weights.receiver import Receiver
from tests.helpers import GENEROUS_S, OWN_RUN, async_until, until
from tests.learner.support import write_model
from tests.weights.fakes import HoldingEngine, Killed, following, publisher, route, same_bits, shapes, some_tensors

pytestmark = pytest.mark.slow


own_directory = partial(run_directory, run=OWN_RUN)


def nothing(folder):
    (folder / "config.json").write_text("{}")


async def test_versions_written_in_the_background_are_followed_bit_for_bit_and_old_ones_go(tmp_path):
    engine = HoldingEngine()
    writer = FolderWriter(tmp_path / "weights", nothing, OWN_RUN)
    async with following(DiskRoute(tmp_path / "weights", OWN_RUN), engine, shapes(some_tensors())):
        for version in range(4):
            writer.write(version, some_tensors(version))
            await async_until(lambda version=version: engine.version == version)
            assert same_bits(engine.tensors, some_tensors(version))
    writer.close()
    assert sorted(versions_in(writer.directory)) == list(range(4))[-KEPT:]
    assert writer.failures == 0


OTHERS = [RunIdentity("other", OWN_RUN.id), RunIdentity(OWN_RUN.name, "another")]


def contents(directory):
    """Every file and folder, with its bytes and time."""
    return {each: (each.stat().st_mtime_ns, each.is_file() and each.read_bytes()) for each in directory.rglob("*")}


def killed_while_writing(directory, run):
    """Leave the files of a learner that is killed in the middle of a write."""

    def die(folder):
        raise Killed

    writer = FolderWriter(directory, die, run)
    writer.write(3, some_tensors())
    writer.close()
    [left] = writer.directory.iterdir()
    return left


def test_a_learner_removes_what_its_run_left_half_written_or_not_and_nothing_else(tmp_path):
    for other in OTHERS:
        killed_while_writing(tmp_path, other)
        write_folder(run_directory(tmp_path, other), 2, some_tensors(2), nothing)
    for name in ("v00000003/notes", "held/notes", "run-notes/v00000001"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("a person's")
    theirs = contents(tmp_path)
    own = killed_while_writing(tmp_path, OWN_RUN).parent
    write_folder(own, 2, some_tensors(), nothing)
    FolderWriter(tmp_path, nothing, OWN_RUN).close()
    assert not list(own.iterdir())
    own.rmdir()
    assert contents(tmp_path) == theirs


@pytest.mark.parametrize("name", ["run", "../up", "a/b", "with-dash", ""])
async def test_an_engine_takes_its_own_runs_folders_only(tmp_path, name):
    own, others = (
        RunIdentity(name, "1"),
        [RunIdentity("other", "1"), RunIdentity(name, "2"), RunIdentity(f"{name}-1", "1")],
    )
    link = DiskRoute(tmp_path, own)
    for other in others:
        directory = run_directory(tmp_path, other)
        assert directory.parent == tmp_path
        write_folder(directory, 90, some_tensors(9), nothing)
    with pytest.raises(UnavailableError, match="no learner of run"):
        await link.newer_than(-1)
    shutil.rmtree(run_directory(tmp_path, others[1]))
    (run_directory(tmp_path, own) / "v99").mkdir(parents=True)
    write_folder(run_directory(tmp_path, own), 2, some_tensors(2), nothing)
    for run in (own, RunIdentity(name)):
        link = DiskRoute(tmp_path, run)
        assert same_bits(await link.fetch(await link.newer_than(-1)), some_tensors(2))


async def test_an_engine_whose_directory_is_not_there_waits_for_it_and_does_other_work_meanwhile(tmp_path):
    engine = HoldingEngine()
    async with following(DiskRoute(tmp_path / "weights", OWN_RUN), engine, shapes(some_tensors())):
        await asyncio.sleep(0)
        write_folder(own_directory(tmp_path / "weights"), 1, some_tensors(1), nothing)
        await async_until(lambda: engine.version == 1)


@pytest.mark.parametrize("fault", ["flipped", "cut", "manifest", "gone", "no directory"])
async def test_what_is_damaged_or_gone_is_an_error_of_its_kind(tmp_path, fault):
    folder = write_folder(own_directory(tmp_path), 1, some_tensors(), nothing)
    link = DiskRoute(tmp_path, OWN_RUN)
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


def test_nothing_newer_is_none_where_a_learner_writes_and_unavailable_where_none_does(tmp_path):
    link = DiskRoute(tmp_path, OWN_RUN)
    with pytest.raises(UnavailableError, match="no learner of run"):
        asyncio.run(link.newer_than(-1))
    FolderWriter(tmp_path, nothing, OWN_RUN).close()
    assert asyncio.run(link.newer_than(-1)) is None
    write_folder(own_directory(tmp_path), 1, some_tensors(), nothing)
    assert asyncio.run(link.newer_than(1)) is None


def test_a_directory_that_cannot_be_written_is_counted_and_ends_nothing(tmp_path):
    writer = FolderWriter(tmp_path / "weights", nothing, OWN_RUN)
    writer.directory.rmdir()
    writer.directory.write_text("in the way")
    writer.write(0, some_tensors())
    writer.close()
    assert writer.failures == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bad generation config")])
async def test_a_version_that_was_not_written_comes_by_the_next_route_and_later_ones_from_the_directory_again(
    tmp_path, context, error
):
    engine, fails = HoldingEngine(), True

    def write_config(folder):
        if fails:
            raise error

    with publisher(context) as source:
        async with route(source.endpoint) as link:
            writer = FolderWriter(tmp_path, write_config, OWN_RUN)
            receiver = Receiver([DiskRoute(tmp_path, OWN_RUN), link], shapes(some_tensors()))
            receiving = asyncio.create_task(receiver.run(engine))
            for version in (0, 1):
                source.publish(version, some_tensors(version))
                writer.write(version, some_tensors(version))
                await async_until(lambda version=version: engine.version == version)
                await async_until(lambda version=version: writer.failures == version + 1)
            assert receiver.fallbacks == 2
            fails = False
            writer.write(2, some_tensors(2))
            await async_until(lambda: engine.version == 2)
            assert receiver.fallbacks == 2
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            writer.close()


def test_a_folder_is_one_that_transformers_loads_tied_embeddings_and_all(tmp_path):
    model = write_model(tmp_path / "model")
    config = ModelConfig(path=str(model), dtype="bfloat16")
    tensors = {
        name: torch.randn(each.shape).to(torch.bfloat16)
        for name, each in AutoModelForCausalLM.from_pretrained(model).named_parameters()
    }
    folder = write_folder(own_directory(tmp_path), 3, tensors, folder_writer(config))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert same_bits(dict(loaded.named_parameters()), tensors)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


async def test_an_engine_that_cannot_read_the_folder_pulls_instead_which_is_counted(tmp_path, context):
    engine = HoldingEngine()
    with publisher(context) as source:
        async with route(source.endpoint) as link:
            receiver = Receiver([DiskRoute(tmp_path / "nowhere", OWN_RUN), link], shapes(some_tensors()))
            following = asyncio.create_task(receiver.run(engine))
            source.publish(0, some_tensors(0))
            await async_until(lambda: engine.version == 0)
            assert receiver.fallbacks == 1
            (tmp_path / "nowhere").mkdir()
            write_folder(own_directory(tmp_path / "nowhere"), 1, some_tensors(1), nothing)
            await async_until(lambda: engine.version == 1)
            assert receiver.counters()["weights_updates"] == 2
            assert receiver.counters()["weights_bytes"] == 2 * sum(each.nbytes for each in some_tensors().values())
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_route_for_servers_gives_the_folder_unread_once_its_header_is_that_of_the_manifest(tmp_path):
    path = write_folder(own_directory(tmp_path), 1, some_tensors(), nothing)
    link = DiskRoute(tmp_path, OWN_RUN, read=False)
    manifest = await link.newer_than(0)
    folder = await link.fetch(manifest)
    assert isinstance(folder, Folder)
    assert (folder.path, folder.manifest, link.received) == (path, manifest, 0)
    assert same_bits(folder.read(), some_tensors())
    whole = (path / TENSORS).read_bytes()
    (path / TENSORS).write_bytes(whole[:-5])
    with pytest.raises(WeightsError, match="damaged"):
        await link.fetch(manifest)
    shutil.rmtree(path)
    write_folder(path.parent, 1, {**some_tensors(), "scale": torch.zeros(2)}, nothing)
    with pytest.raises(WeightsError, match="other tensors"):
        await link.fetch(manifest)
    shutil.rmtree(path)
    with pytest.raises(UnavailableError, match="removed"):
        await link.fetch(manifest)


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
    paths = [write_folder(own_directory(tmp_path), version, some_tensors(), nothing) for version in range(5)]
    remove_older(paths[0].parent, [paths[1]])
    assert sorted(versions_in(paths[0].parent)) == [1, 3, 4]


def test_a_version_that_cannot_be_removed_is_named_and_the_others_go(tmp_path, caplog):
    *_, newest = [write_folder(own_directory(tmp_path), version, some_tensors(), nothing) for version in range(4)]
    (newest.parent / ".v00000000.removed").write_text("in the way")
    remove_older(newest.parent)
    assert sorted(versions_in(newest.parent)) == [0, 2, 3]
    assert f"{newest.parent / 'v00000000'} could not be removed" in caplog.text


def test_a_folder_that_holds_another_version_than_its_name_says_is_damaged(tmp_path):
    path = write_folder(own_directory(tmp_path), 1, some_tensors(), nothing)
    with pytest.raises(WeightsError, match="holds version 1"):
        read_folder(path.rename(path.with_name("v00000002")), 2)


def test_a_version_that_a_newer_one_overtakes_is_not_written(tmp_path):
    begun, goes_on, written = threading.Event(), threading.Event(), []

    def write_config(folder):
        written.append(folder.name)
        begun.set()
        assert goes_on.wait(GENEROUS_S)

    writer = FolderWriter(tmp_path, write_config, OWN_RUN)
    writer.write(1, some_tensors())
    assert begun.wait(GENEROUS_S)
    for version in (2, 3):
        writer.write(version, some_tensors())
    goes_on.set()
    until(lambda: 3 in versions_in(writer.directory))
    writer.close()
    assert written == [".v00000001.partial", ".v00000003.partial"]


def test_versions_that_newer_ones_overtake_leave_memory_at_once(tmp_path):
    begun, goes_on = threading.Event(), threading.Event()

    def write_config(folder):
        begun.set()
        assert goes_on.wait(GENEROUS_S)

    writer = FolderWriter(tmp_path, write_config, OWN_RUN)
    kept = []
    for version in range(12):
        tensor = torch.zeros(3)
        writer.write(version, {"w": tensor})
        kept.append(weakref.ref(tensor))
        assert begun.wait(GENEROUS_S)
    del tensor
    assert sum(each() is not None for each in kept) == 2
    goes_on.set()
    writer.close()
