"""`python -m asyncrl.learner`, or torchrun over several ranks of it: train until all steps are done, or a signal."""

from __future__ import annotations

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig


def run(config: TrainConfig) -> None:
    """Train, from the newest checkpoint if there is one. Raises StoppedError on a signal."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.learner_threads)
    from asyncrl.learner.run import run as learn

    learn(config, stop)


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
