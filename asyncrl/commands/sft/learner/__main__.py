"""`python -m asyncrl.commands.sft.learner`: fine-tune until all steps are done, or a signal arrives.

`asyncrl sft` starts this process once the demonstrations are rendered. With several ranks, this process starts the
ranks with the same command, and watches them.
"""

from __future__ import annotations

import sys

from asyncrl.config import locations
from asyncrl.config.load import role_main
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.schema import TrainConfig
from asyncrl.launch.processes import role_command
from asyncrl.learner.ranks.launcher import Membership, Timeouts, run_ranks
from asyncrl.machine import process
from asyncrl.machine.activity import Activity, heartbeat


def run(config: TrainConfig) -> None:
    """Fine-tune, from the newest checkpoint if there is one. Raises StoppedError: a signal came."""
    stop, activity, cluster = process.stop_on_signals(), Activity(), config.cluster
    limit_s = config.learner.rank_timeout_s
    with heartbeat(activity, cluster.hang_timeout_s, limit_s):
        if cluster.ranks > 1 and Membership.of_this_process() is None:
            command = role_command("commands.sft.learner", locations.run_dir(config.run) / CONFIG_FILE)
            run_ranks(command, cluster.ranks, stop, Timeouts.within(limit_s), activity=activity)
            return
        process.set_at_once(stop)
        process.limit_threads(cluster.learner_threads)
        from asyncrl.commands.sft.from_config import run_rank

        run_rank(config, stop, activity)


if __name__ == "__main__":
    sys.exit(role_main(run, sys.argv[1:]))
