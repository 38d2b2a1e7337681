"""Decides which policy version is the oldest that may start an episode.

The age bound counts versions, and the oldest token of a group decides its age. Most episodes start just after a version
was published, since admission then lets in new ones. For a moment, engines still serve the previous version. An episode
that starts at once is therefore one version older than it needs to be: with max_lag = 1, it has lost half of its time.

So a ticket asks for the version that was the newest when an actor got it, and the episode waits for the transfer. It
asks for an older version if that version will still be young enough when the ticket's group is trained. For example, an
actor with few slots needs a whole version to fill the next batch, and waits would only make this take longer.

The same rule holds if the transfer of a version takes longer than a step. An engine then serves the newest version that
it has received, and an episode waits for two transfers at most. Without the wait, more episodes start, but they become
too old.

An engine may never get a version, such as one that it cannot read. So an episode that has waited for very long starts
with any version that was young enough when its ticket was given out.
"""

from __future__ import annotations

import math

from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.transaction import Transaction

MARGIN = 0.25
"""The part of a batch by which a group may be trained later than in the order of opening. Groups that were opened later
may end before it."""


def oldest_start(tx: Transaction, settings: ReplaySettings) -> int:
    """The oldest version that may start the next episode."""
    newest = tx.counter("version")
    # A wait for old groups with its own limit must lose no group, so no episode may start with an older version.
    if settings.wait_s:
        return newest
    # A group is opened only if no ticket is left. So of all groups in no plan, the group of this ticket was opened
    # last.
    planned, batch = tx.count("plans"), settings.batch_size
    last = tx.counter("committed") - planned * batch - 1 + math.ceil(MARGIN * batch)
    trained_by = settings.version_at(planned + max(0, last) // batch)
    return max(0, min(newest, settings.oldest_allowed(trained_by)))
