"""Reasons that a client reports, as the replay keeps them."""

from __future__ import annotations

from pathlib import Path

from asyncrl.replay.store.records import DeadLetter
from asyncrl.wire import MAX_REASON_CHARS
from tests.helpers import until
from tests.replay.support import ReplayThread, make_settings


def test_no_part_of_a_secret_that_lies_where_a_reason_is_cut_is_kept(tmp_path: Path) -> None:
    secret = "hf_" + "s3cret" * MAX_REASON_CHARS
    with ReplayThread(tmp_path, make_settings()) as replay:
        client = replay.client("a")
        [ticket] = until(lambda: client.tickets([], 1))
        client.fail(ticket.id, f"the server refused the key {secret}")
        with replay.store.transaction(write=False) as tx:
            [letter] = dict(DeadLetter.all(tx)).values()
    assert "s3cret" not in letter.reason
    assert letter.reason.startswith("the server refused the key (hidden)")
