"""Decides which policy version is the oldest that may start an episode.

The age bound counts versions, and the oldest token of a group decides its age. Most episodes start just after a version
was published, since admission then lets in new ones. For a moment, engines still serve the version before. An episode
that starts at once is therefore one version older than it needs to be: with max_lag = 1, it has lost half of its time.

So a ticket asks for the version that was the newest when an actor got it, and the episode waits for the transfer. It
asks for an older version if that is still young enough when its group is trained: an actor with few slots fills the
next batch during a whole version, and waits would only make this take longer.

With the version before, an episode would have max_lag versions of time. With the newest version it has one version
more. So waiting gains time, and episodes wait, as long as they spend less than 1 / max_lag of their time waiting. With
max_lag = 1 this does not limit waits.

A link may be so slow that engines never serve the newest version. Waits then exceed the limit, and the episodes of this
actor start with any version that is young enough. They wait again, as a trial, once old waits are nearly forgotten.

An engine may never get a version, such as one that it cannot read. So an episode that has waited for very long starts
with any version that was young enough when its ticket was given out.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.transaction import Transaction

MARGIN = 0.25
"""The part of a batch by which a group may be trained later than in the order in which groups are opened, since others
end before it."""
FEWEST = 128
"""The number of episodes after which an actor is judged. The first episodes that end are short, so that they seem to
wait for a large part of their time."""
FORGETS = 1 / 2048
"""The share of earlier times that an actor's next episode replaces."""
TRIES_AGAIN = 0.1
"""After waits have exceeded the limit, episodes wait again once the share is below this part of the limit. Waits that
are too long then cost about 1 / (2 max_lag) of the time, since each trial ends soon."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Times:
    """Sums over the latest episodes of an actor, in seconds: their waits for a version, and all of their time. `since`
    is the newest version when the actor delivered its first episode, and `episodes` their number since then."""

    since: int
    episodes: int = 0
    waited: float = 0.0
    all: float = 0.0
    waits: bool = True


class FreshStarts:
    """The starts of the actors of one shard. The times of their waits are only in memory, since few episodes are enough
    to learn them again."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self._limit = 1 / max(1, settings.admission.max_lag)
        self._times: dict[str, _Times] = {}

    def oldest(self, tx: Transaction, actor: str) -> int:
        """The oldest version that may start the next episode of an actor."""
        newest, settings = tx.counter("version"), self._settings
        # The learner waits for old groups by the version of their tickets, so no older version may start them.
        if settings.wait_s:
            return newest
        if not self.waits(actor):
            return max(0, settings.oldest_allowed(newest))
        # A group is opened only if no ticket is left, so that this one's group is the last of those in no plan.
        planned, batch = tx.count("plans"), settings.batch_size
        last = tx.counter("committed") - planned * batch - 1 + math.ceil(MARGIN * batch)
        trained_by = settings.version_at(planned + max(0, last) // batch)
        return max(0, min(newest, settings.oldest_allowed(trained_by)))

    def delivered(self, actor: str, asked: int, newest: int, waited_s: float, seconds: float) -> None:
        """Note that an episode of an actor took `seconds`, of which it first waited `waited_s` for a version. Its
        ticket asked for version `asked`. The newest version is `newest` now."""
        times = self._times.setdefault(actor, _Times(newest))
        if asked <= times.since:
            return  # The first episodes wait until the engines have started.
        times.waited += waited_s - FORGETS * times.waited
        times.all += seconds - FORGETS * times.all
        times.episodes += 1
        limit = self._limit if times.waits else TRIES_AGAIN * self._limit
        waits = times.episodes < FEWEST or times.waited <= limit * times.all
        if times.waits and not waits:
            logger.info(
                "%s: episodes spend %.0f%% of the time waiting for the newest policy version (limit %.0f%%); now they "
                "start with any version that is young enough",
                *(actor, 100 * times.waited / times.all, 100 * self._limit),
            )
        times.waits = waits

    def waits(self, actor: str) -> bool:
        """True if the episodes of an actor wait for a transfer of weights."""
        times = self._times.get(actor)
        return times is None or times.waits

    def forget(self, actor: str) -> None:
        """Note that a process of an actor has ended. The next one may have other engines."""
        self._times.pop(actor, None)
