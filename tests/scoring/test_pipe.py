import socket
import struct
import time
from contextlib import closing

import pytest

from asyncrl.errors import WireError
from asyncrl.scoring.pipe import MOST_BYTES, TimedPipe


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with closing(theirs):
        yield ours, theirs


def test_a_message_that_stops_in_its_middle_ends_the_wait_at_the_deadline(ends):
    with closing(TimedPipe(ends[0], lambda: False)) as pipe:
        ends[1].send(struct.pack("!Q", 100) + b"a part")
        with pytest.raises(TimeoutError):
            pipe.receive(time.monotonic() + 0.2)


def test_a_message_that_nobody_reads_ends_the_wait_at_the_deadline(ends):
    with closing(TimedPipe(ends[0], lambda: False)) as pipe, pytest.raises(TimeoutError):
        pipe.send(bytes(3_000_000), time.monotonic() + 0.2)


def test_the_end_of_the_process_ends_both_waits_though_others_hold_its_pipe(ends):
    with closing(TimedPipe(ends[0], lambda: True)) as pipe:
        ends[1].send(struct.pack("!Q", 100) + b"a part")
        with pytest.raises(EOFError):
            pipe.receive()
        with pytest.raises(EOFError):
            pipe.send(bytes(3_000_000))


def test_a_forged_length_is_refused_before_anything_is_read(ends):
    with closing(TimedPipe(ends[0], lambda: False)) as pipe:
        ends[1].send(struct.pack("!Q", MOST_BYTES + 1))
        with pytest.raises(WireError, match="announces"):
            pipe.receive()
