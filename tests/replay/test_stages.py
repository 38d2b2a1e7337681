"""The timeline has the stages of an episode and of its group."""

from __future__ import annotations

from pathlib import Path

from asyncrl.replay.client.clock_probe import PROBE_S, ClockProbe
from asyncrl.replay.messages import OK, Reply, decode_reply, decode_request, encode_reply
from asyncrl.replay.protocol import GetClock
from tests.helpers import FakeSpans
from tests.replay.support import Core, make_settings


def test_an_episode_is_held_queued_and_scored_and_its_group_is_ready_until_a_plan(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    tickets = core.tickets(4)
    core.now = 3.0
    core.deliver(tickets)
    core.now = 5.0
    core.lease()
    core.now = 6.0
    for ticket in tickets:
        core.label(ticket.id)
    core.now = 10.0
    core.plan(0)
    first = tickets[0].id
    stages = [(name, values) for name, values, _ in core.spans.spans if values.get("episode") == first]
    assert stages == [
        ("ticket", {"episode": first, "worker": "a", "outcome": "stored", "seconds": 3.0}),
        ("label queue", {"episode": first, "seconds": 2.0}),
        ("label", {"episode": first, "worker": "s", "seconds": 1.0}),
    ]
    groups = sorted({ticket.group_id for ticket in tickets})
    assert [(each["group"], each["step"], each["seconds"]) for each in core.spans.of("ready")] == [
        (group, 0, 4.0) for group in groups
    ]
    assert first in core.spans.of("ready")[0]["episodes"]
    assert core.spans.of("plan") == [{"step": 0, "version": 0, "episodes": 4, "seconds": 0.0}]


def test_a_failed_episode_and_an_evicted_group_say_why(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    tickets = core.tickets(4)
    core.fail(tickets[0].id)
    assert core.spans.of("ticket") == [
        {"episode": tickets[0].id, "worker": "a", "outcome": "failed", "reason": "broken", "seconds": 0.0}
    ]
    core.deliver(tickets[1:] + core.tickets(1, holding=[ticket.id for ticket in tickets[1:]]))
    core.label_all()
    core.publish(1)
    core.publish(2)
    evicted = core.spans.of("ready")
    assert {each["outcome"] for each in evicted} == {"evicted"}
    assert [each["group"] for each in core.spans.of("evicted")] == [each["group"] for each in evicted]


def test_the_learner_s_wait_is_recorded_by_what_was_missing(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings())
    assert core.plan(0) is None
    core.deliver(core.tickets(4))
    core.tick(2.0)
    core.now = 5.0
    core.label_all()
    core.plan(0)
    waits = [(name, values["seconds"]) for name, values, track in core.spans.spans if track == "learner waits"]
    assert waits == [("no episodes", 2.0), ("no labels", 3.0)]


def test_a_client_asks_for_the_clock_now_and_then(tmp_path: Path) -> None:
    now = 10.0
    spans = FakeSpans(lambda: now)
    probe = ClockProbe("tcp://replay", spans)
    assert probe.is_due()
    assert isinstance(decode_request(probe.message(7)).request, GetClock)
    probe.sends(6)
    probe.sends(7)
    now += 1.0
    for sequence in (6, 7):
        probe.received(decode_reply(encode_reply(OK, sequence, Reply(99.0))))
    assert spans.clocks == [("tcp://replay", 99.0)]
    assert not probe.is_due()
    now += PROBE_S
    assert probe.is_due()


def test_an_episode_whose_group_is_dropped_while_it_is_scored_ends_that_stage(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_attempts=1))
    kept, failing = core.tickets(2)
    core.deliver([kept])
    core.lease()
    core.now = 4.0
    core.fail(failing.id)
    assert core.spans.of("label") == [{"episode": kept.id, "outcome": "ended", "seconds": 4.0}]
