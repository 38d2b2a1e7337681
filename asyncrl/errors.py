"""One hierarchy of errors: everything that asyncrl raises on purpose derives from `AsyncrlError`.

A message gives the fault and its fix; the command line prints it without a traceback.
"""


class AsyncrlError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncrlError):
    """The configuration is impossible: the message names the key, its value and the fix."""


class DataError(AsyncrlError):
    """A data file cannot be used as tasks."""


class InvariantError(AsyncrlError, ValueError):
    """A data type (of `types`, for one) was constructed with values that break its invariants."""


class WireError(AsyncrlError):
    """A message is malformed: it was refused whole, and nothing was stored."""


class RefusedError(AsyncrlError):
    """The other side understood the request and refused it."""


class BusyError(AsyncrlError):
    """The other side cannot take more at the moment; the same request may succeed later."""


class UnavailableError(AsyncrlError):
    """The other side cannot be reached, or did not answer in time."""


class StoppedError(AsyncrlError):
    """This process was asked to stop while it waited."""


class RunOverError(AsyncrlError):
    """The run is done: the replay has no more work, and the process ends with status 0."""


class EngineError(AsyncrlError):
    """An engine could not generate, or does not support the request."""


class WeightsError(AsyncrlError):
    """A weight update was refused: names, shapes, checksums or versions do not fit. Nothing was changed."""


class ToolError(AsyncrlError):
    """A tool itself failed (not the policy's use of it): the episode is retried, never scored as zero."""


class InteractionError(AsyncrlError):
    """A simulated user failed: the episode is retried, never scored as zero."""


class ScoringError(AsyncrlError):
    """A scorer or verifier failed: the trajectory is retried, then dead-lettered, never scored as zero."""


class TooManyFailuresError(AsyncrlError):
    """Too many episodes or scorings failed, so the run ends. It can resume once the cause is fixed."""


class DataProtoError(AsyncrlError, AssertionError, RuntimeError):
    """The fields of a batch of verl's kind do not fit together. It is an AssertionError, which verl raises for this,
    and a RuntimeError, which tensordict raises."""


class DispatchError(AsyncrlError, AssertionError):
    """A call of a worker group does not fit its dispatch mode or its workers. It is an AssertionError, which verl
    raises for this."""


class WorkerError(AsyncrlError):
    """A method of a worker in a worker group failed; the message names the rank. `cause` is the worker's own error,
    where that could be sent to the caller."""

    def __init__(self, message: str, cause: Exception | SystemExit | None = None) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(AsyncrlError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class StoreError(AsyncrlError):
    """The replay store cannot be opened, or its content is not valid."""
