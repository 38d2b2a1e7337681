"""`python -m asyncrl.learner`: train until all steps are done, or a signal.

With `cluster.learner_ranks` of two or more this process starts the ranks, by the same command, and watches them.
"""

from __future__ import annotations

import os
import sys

from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.launcher import Membership, Timeouts, run_ranks
from asyncrl.machine import process


def run(config: TrainConfig) -> None:
    """Train, from the newest checkpoint if there is one. Raises StoppedError on a signal."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun cannot start the learner, since anybody could connect to its store: "
            "set cluster.learner_ranks and start one `python -m asyncrl.learner`, which starts the ranks"
        )
    stop = process.stop_on_signals()
    if config.cluster.learner_ranks > 1 and Membership.of_this_process() is None:
        command = [sys.executable, "-m", "asyncrl.learner", *sys.argv[1:]]
        run_ranks(command, config.cluster.learner_ranks, stop, Timeouts.within(config.learner.rank_timeout_s))
        return
    process.limit_threads(config.cluster.learner_threads)
    from asyncrl.learner.run import run as learn

    learn(config, stop)


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
