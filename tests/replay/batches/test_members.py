"""Complete groups with damaged members."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.replay.batches.sampling import Oldest
from asyncrl.replay.starts.admission import Admission
from tests.replay.support import Core, make_settings


@pytest.mark.parametrize("harmed", [[0], [0, 1, 3]])
def test_complete_groups_with_a_flipped_bit_are_dropped_and_the_others_are_planned(
    tmp_path: Path, harmed: list[int]
) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=1, per_version=8), sampler=Oldest()))
    tickets = core.tickets(8)
    ids = core.deliver(tickets)
    core.label_all()
    for index in harmed:
        core.damage(ids[index])
    core.restart()
    plan = core.planned(0)
    spoiled = {tickets[index].group_id for index in harmed}
    assert len(plan.ids) == 4
    assert not spoiled & set(plan.group_ids)
    status = core.status()
    assert (status["damaged"], status["dead"]) == (len(harmed), len(harmed))
    assert status["dropped"] == 2 * len(spoiled) - len(harmed)
    dead = core.dead_letters()
    assert list(dead) == [ids[index] for index in harmed]
    assert all("is damaged" in letter.reason for letter in dead.values())
    assert core.requeue(ids[0]) == "task"
