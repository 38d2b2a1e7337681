"""The hierarchy of errors: everything that asyncrl raises on purpose derives from `AsyncrlError`.

A message names the fault and its fix. The command line prints the message without a traceback.
"""


class AsyncrlError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncrlError):
    """The configuration is invalid. The message names the key, its value and the fix."""


class DataError(AsyncrlError):
    """A data file cannot be used as tasks."""


class InvariantError(AsyncrlError, ValueError):
    """The values for an object of a data type, such as `types.Trajectory`, break the invariants of the type."""


class WireError(AsyncrlError):
    """A message is malformed. It was refused, and no part of it was stored."""


class RefusedError(AsyncrlError):
    """The receiver understood the request and refused it."""


class BusyError(AsyncrlError):
    """The receiver cannot take more at the moment. The same request may succeed later."""


class UnavailableError(AsyncrlError):
    """The receiver cannot be reached, or did not answer in time."""


class StoppedError(AsyncrlError):
    """This process was asked to stop while it waited."""


class RunOverError(AsyncrlError):
    """The run is done. The replay has no more work, and the process ends with status 0."""


class EngineError(AsyncrlError):
    """An engine could not generate, or does not support the request."""


class WeightsError(AsyncrlError):
    """A version of the weights was refused: its names, shapes, checksums or number do not fit, or the engine failed its
    canary (`weights/canary.py`)."""


class ToolError(AsyncrlError):
    """A tool failed for another reason than a wrong call. The episode is retried, never scored as zero."""


class InteractionError(AsyncrlError):
    """A simulated user failed. The episode is retried, never scored as zero."""


class ScoringError(AsyncrlError):
    """A scorer or verifier failed. The scoring is tried again. After too many failures the trajectory becomes a dead
    letter, on which the learner never trains. It is never scored as zero."""


class TooManyFailuresError(AsyncrlError):
    """Too many episodes or scorings failed, or filters refuse every group, so the run ends. It can resume once the
    cause is fixed."""


class TasksSolvedError(AsyncrlError):
    """The policy solves the tasks, so that filters refuse every group. The run ends with this result."""


class DataProtoError(AsyncrlError, AssertionError, RuntimeError):
    """The fields of a DataProto do not fit together. verl raises an AssertionError here, tensordict a RuntimeError."""


class DispatchError(AsyncrlError, AssertionError):
    """A call of a worker group does not fit its dispatch mode or its workers. verl raises an AssertionError here."""


class WorkerError(AsyncrlError):
    """A method of a worker in a worker group failed; the message names the rank.

    `cause` is the worker's own error; None if it could not be sent to the caller.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(AsyncrlError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class StoreError(AsyncrlError):
    """The replay store cannot be opened, or its content is not valid."""
