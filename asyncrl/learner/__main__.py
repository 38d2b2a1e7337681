"""`python -m asyncrl.learner`: train until all steps are done, or a signal arrives.

If `cluster.learner_ranks` or `learner.nodes` is two or more, this process starts the ranks of this host with the same
command, and watches them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.ranks.from_config import host_settings
from asyncrl.learner.ranks.hosts import open_host
from asyncrl.learner.ranks.launcher import Membership, Timeouts, run_ranks
from asyncrl.machine import process
from asyncrl.machine.activity import Activity, heartbeat


def run(config: TrainConfig) -> None:
    """Train, from the newest checkpoint if there is one. Raises StoppedError on a signal."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun cannot start the learner, since anybody could connect to torchrun's store: "
            "set cluster.learner_ranks and start one `python -m asyncrl.learner` on each host, which starts its ranks"
        )
    stop, activity = process.stop_on_signals(), Activity()
    ranks, hosts, limit_s = config.cluster.ranks, config.learner.nodes, config.learner.rank_timeout_s
    with heartbeat(activity, config.cluster.hang_timeout_s, limit_s):
        if ranks * hosts > 1 and Membership.of_this_process() is None:
            command = [sys.executable, "-m", "asyncrl.learner", *sys.argv[1:]]
            timeouts = Timeouts.within(limit_s)
            host = open_host(host_settings(config), timeouts, stop) if hosts > 1 else None
            run_ranks(command, ranks, stop, timeouts, host, activity)
            return
        process.set_at_once(stop)
        process.limit_threads(config.cluster.learner_threads)
        from asyncrl.learner.from_config import run as learn

        learn(config, stop, activity)


def main(argv: Sequence[str]) -> int:
    """Run this role with command-line arguments, and return the exit status."""
    return role_main(run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
