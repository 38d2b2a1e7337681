from __future__ import annotations

import multiprocessing
import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import RefusedError
from asyncrl.replay.client import link as replay_link
from asyncrl.replay.messages import encode_request
from asyncrl.replay.store import images as replay_images
from asyncrl.replay.store.records import forget
from asyncrl.types import Ticket
from tests.helpers import GENEROUS_S, make_trajectory
from tests.replay.support import Core, ReplayThread, make_settings

pytestmark = pytest.mark.slow

RED, BLUE = b"red picture", b"blue picture" * 100
NAMES = {sha256(each).digest(): each for each in (RED, BLUE)}
OF_RED, OF_BLUE = NAMES


def showing(ticket: Ticket, *names: bytes) -> Any:
    """An episode whose first tokens are images."""
    spans = np.array([(index, index + 1) for index in range(len(names))], np.int32).reshape(-1, 2)
    digests = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32)
    return make_trajectory(ticket, image_spans=spans, image_digests=digests)


def rows(core: Core) -> list[int]:
    with core.store.transaction() as tx:
        return [tx.count(table) for table in replay_images.TABLES]


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings(max_attempts=1))


def test_an_image_is_kept_once_for_a_group_and_goes_with_the_last_trajectory_that_shows_it(core: Core):
    first, second, *_ = core.tickets(4)
    assert first.group_id == second.group_id
    assert core.put(showing(first, OF_RED, OF_BLUE, OF_RED), [RED, BLUE]) == "stored"
    assert core.put(showing(second, OF_RED)) == "stored"
    assert rows(core) == [2, 3, 3]
    assert core.image(second.id, OF_RED) == RED
    with core.store.transaction() as tx:
        replay_images.forget_images(tx, first.id)
    assert rows(core) == [1, 1, 1]
    assert core.image(second.id, OF_RED) == RED
    core.restart()
    assert core.image(second.id, OF_RED) == RED
    with core.store.transaction() as tx:
        replay_images.forget_images(tx, second.id)
    assert rows(core) == [0, 0, 0]
    with pytest.raises(RefusedError, match="it was deleted"):
        core.image(second.id, OF_RED)


def test_a_plan_shares_no_tokens_behind_the_placeholders_of_other_images(core: Core):
    first, second, *_ = core.tickets(4)
    one, same, other = (
        showing(first, OF_RED, OF_BLUE),
        showing(second, OF_RED, OF_BLUE),
        showing(second, OF_RED, OF_RED),
    )
    assert same.begins_as(one) == make_trajectory(second).begins_as(make_trajectory(first)) > 1
    assert other.begins_as(one) == one.begins_as(other) == 1
    assert make_trajectory(second).begins_as(one) == 0


def test_trained_trajectories_take_their_images_with_them(core: Core):
    for ticket in core.tickets(4):
        core.put(showing(ticket, OF_RED), [RED])
    assert rows(core) == [2, 4, 4]
    core.label_all()
    core.planned(0)
    assert rows(core)[0] == 2
    core.checkpointed(1)
    core.publish(1)
    assert rows(core) == [0, 0, 0]


def test_a_trajectory_without_its_images_is_incomplete_and_changes_nothing(core: Core):
    ticket, *_ = core.tickets(1)
    for sent in ([], [RED]):
        assert core.put(showing(ticket, OF_RED, OF_BLUE), sent) == "incomplete"
        assert rows(core) == [0, 0, 0]
    assert core.put(showing(ticket, OF_RED, OF_BLUE), [BLUE, RED]) == "stored"
    assert core.put(showing(ticket, OF_RED, OF_BLUE)) == "duplicate"


def test_images_that_are_not_shown_or_too_large_are_refused(core: Core, monkeypatch: pytest.MonkeyPatch):
    ticket, *_ = core.tickets(1)
    with pytest.raises(RefusedError, match="an image that is not part of it"):
        core.put(showing(ticket, OF_RED), [RED, BLUE])
    monkeypatch.setattr(replay_images, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(RefusedError, match="1200 bytes; at most 100 are taken"):
        core.put(showing(ticket, OF_BLUE), [BLUE])
    monkeypatch.setattr(replay_images, "MAX_IMAGES", 1)
    with pytest.raises(RefusedError, match="shows 2 images; at most 1"):
        core.put(showing(ticket, OF_RED, OF_RED), [RED])
    assert rows(core) == [0, 0, 0]
    assert core.put(make_trajectory(ticket)) == "stored"


def test_members_of_a_group_send_an_image_once_over_real_sockets(tmp_path: Path):
    with ReplayThread(tmp_path) as replay:
        client = replay.client()
        first, second, third, fourth = client.tickets([], 4)
        assert client.put_all([showing(first, OF_RED), make_trajectory(third)], NAMES) == ["stored", "stored"]
        # Without the image at hand, the second could not send it.
        assert client.put(showing(second, OF_RED)) == "stored"
        assert client.image(second.id, OF_RED) == RED
        # Another group has its own.
        with pytest.raises(KeyError):
            client.put(showing(fourth, OF_RED))
        assert client.put(showing(fourth, OF_RED, OF_BLUE), NAMES) == "stored"
        with pytest.raises(RefusedError, match="is missing"):
            client.image(first.id, OF_BLUE)
        with pytest.raises(RefusedError, match="is unknown"):
            client.image("nobody", OF_BLUE)


def test_members_that_are_delivered_together_send_an_image_once(tmp_path: Path):
    class Counting(dict[bytes, bytes]):
        def __getitem__(self, name: bytes) -> bytes:
            sent.append(name)
            return super().__getitem__(name)

    sent: list[bytes] = []
    with ReplayThread(tmp_path) as replay:
        client = replay.client()
        first, second, third, fourth = client.tickets([], 4)
        together = [showing(first, OF_RED), showing(third, OF_BLUE), showing(second, OF_RED), showing(fourth, OF_BLUE)]
        assert {each.group_id for each in (first, second)}.isdisjoint({each.group_id for each in (third, fourth)})
        assert client.put_all(together, Counting(NAMES)) == ["stored"] * 4
        assert sorted(sent) == sorted([OF_RED, OF_BLUE])
        assert [client.image(each.id, OF_BLUE) for each in (third, fourth)] == [BLUE, BLUE]


def test_members_that_show_different_images_bring_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: list[str] = []

    def counting(request: Any, *arguments: Any) -> Any:
        sent.append(request.kind)
        return encode_request(request, *arguments)

    with ReplayThread(tmp_path, make_settings(group_size=4)) as replay:
        client = replay.client()
        first, second, third, fourth = client.tickets([], 4)
        own = [showing(first, OF_RED), showing(second, OF_BLUE), showing(third, OF_RED, OF_BLUE), showing(fourth)]
        monkeypatch.setattr(replay_link, "encode_request", counting)
        assert client.put_all(own, NAMES) == ["stored"] * 4
        assert sent.count("PutTrajectory") == 4 + 2 + 1
        assert [client.image(third.id, name) for name in NAMES] == [RED, BLUE]


def _die_while_storing_and_forgetting(folder: Path) -> None:
    core = Core(folder, make_settings())
    tickets = core.tickets(4)
    for ticket in tickets[:3]:
        core.put(showing(ticket, OF_RED, OF_BLUE), [RED, BLUE])
    with core.store.transaction() as tx:
        for ticket in tickets[:3]:
            forget(tx, ticket.id)
        replay_images.keep_images(tx, showing(tickets[3], OF_RED), {OF_RED: RED})
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_leaves_no_trajectory_without_images_and_no_image_without_a_trajectory(tmp_path: Path):
    process = multiprocessing.get_context("spawn").Process(target=_die_while_storing_and_forgetting, args=(tmp_path,))
    process.start()
    process.join(GENEROUS_S)
    assert process.exitcode == -signal.SIGKILL
    core = Core(tmp_path, make_settings())
    with core.store.transaction() as tx:
        stored = {key.decode() for key in tx.keys("data")}
        images = {key.decode() for key in tx.keys("images")}
        assert {key for name in stored for key in tx.members("images_of", name)} == images
        assert {name for key in images for name in tx.members("image_users", key)} == stored
        assert len(stored) == 3
