"""Records which scores the algorithm needs in labels, and finds stored labels that lack them.

The learner sends these needs before it publishes its first weights. Later labels that do not meet the needs are
refused. The episode is then scored again, and after too many attempts becomes a dead letter (kept for inspection, but
not trained).
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.store.records import TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import NOTHING_NEEDED, LabelNeeds, Labels
from asyncrl.wire import decode, read_labels, split

NEEDS = "label_needs"
"""The key in the table `meta` under which the needs are stored."""


def label_needs(tx: Transaction) -> LabelNeeds:
    """The needs that the labels of every episode must meet before it is planned."""
    return tx.get("meta", NEEDS, LabelNeeds) or NOTHING_NEEDED


def set_label_needs(tx: Transaction, needs: LabelNeeds) -> bool:
    """Record the needs. True if they have changed."""
    if needs == label_needs(tx):
        return False
    tx.put("meta", NEEDS, needs)
    return True


def unfit_members(tx: Transaction, members: Iterable[str]) -> dict[str, str]:
    """The trajectories whose complete labels do not meet the needs, each with the reason."""
    needs, unfit = label_needs(tx), {}
    for member in members:
        record = TrajectoryRecord.load(tx, member)
        is_labelled = record is not None and record.state in (TrajectoryState.LABELLED, TrajectoryState.PLANNED)
        if is_labelled and (unmet := _unmet(tx, member, needs)):
            unfit[member] = unmet
    return unfit


def _unmet(tx: Transaction, name: str, needs: LabelNeeds) -> str:
    try:
        return needs.unmet(read_labels(decode(split(tx.present(tx.get_bytes("labels", name), "labels", name)))))
    except StoreError as error:
        tx.add("damaged")
        return str(error)


def check_steps(tx: Transaction, labels: Labels) -> None:
    """Raises RefusedError: the step scores do not match the steps of the trajectory; StoreError: it is damaged."""
    if not len(labels.step_ends):
        return
    name = labels.trajectory_id
    data = tx.present(tx.get_bytes("data", name), "data", name)
    ends = {end for _, end in decode(split(data)).body["steps"]}
    unknown = set(labels.step_ends.tolist()) - ends
    if unknown:
        raise RefusedError(
            f"{name} has no steps that end at {sorted(unknown)!r:.200}; its steps end at {sorted(ends)!r:.200}"
        )
