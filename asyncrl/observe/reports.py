"""What a process of a run reports by: its spans, and its rows of metrics with what it takes of its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.observe.metrics import Sink
from asyncrl.observe.sinks import open_learner_metrics, open_metrics
from asyncrl.observe.spans import Spans, open_spans
from asyncrl.observe.usage import WithUsage, usage_of_this_process


class Reports:
    """Opens the reports of the process `name`; all that it opens is closed with `stack`. `spans` may be used at once.

    A process opens its metrics when it needs them. The first that it opens count what it takes of its machine.
    """

    def __init__(self, config: TrainConfig, name: str, spans: Spans, stack: ExitStack) -> None:
        self.name, self.spans = name, spans
        self._config, self._stack = config, stack
        self._is_counted = False

    def metrics(self, name: str | None = None, console: bool = True, gpus: bool = True) -> Sink:
        """The sinks of a file of metrics, by default of the process's name. `console`: the log may have them too.
        `gpus`: the process may have any. Raises ConfigError as `open_metrics` does."""
        sink = open_metrics(self._config, name or self.name, console)
        return self._counted(self._stack.enter_context(closing(sink)), gpus)

    def learner_metrics(self) -> tuple[Sink, Sink]:
        """Sinks of the learner's steps and of its evaluations. Raises ConfigError as `open_metrics` does."""
        steps, evaluations = open_learner_metrics(self._config)
        self._stack.callback(evaluations.close)
        return self._counted(self._stack.enter_context(closing(steps)), gpus=True), evaluations

    def _counted(self, sink: Sink, gpus: bool) -> Sink:
        if self._is_counted:
            return sink
        self._is_counted = True
        return WithUsage(sink, self._stack.enter_context(usage_of_this_process(gpus)))


@contextmanager
def open_reports(config: TrainConfig, name: str, endpoint: str = "") -> Iterator[Reports]:
    """The reports of the process `name` of a run. `endpoint`: where it serves, by which its clients' clocks are aligned
    with its own."""
    with ExitStack() as stack:
        spans = open_spans(config.observe, locations.run_dir(config.run), name, endpoint)
        stack.enter_context(closing(spans))
        yield Reports(config, name, spans, stack)
