"""Opens the reports of a process: its spans, and its rows of metrics with its use of the machine."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace

from asyncrl.config.schema import ObserveConfig
from asyncrl.observe.metrics import Sink
from asyncrl.observe.sinks import open_learner_metrics, open_metrics
from asyncrl.observe.sinks.source import Source
from asyncrl.observe.spans import Spans
from asyncrl.observe.usage import WithUsage, usage_of_this_process


class Reports:
    """Opens the reports of the process that `source` names, and closes them with `stack`.

    The rows of the sink that is opened first also have the process's use of the machine.
    """

    def __init__(self, source: Source, options: ObserveConfig, spans: Spans, stack: ExitStack) -> None:
        self.name, self.spans = source.role, spans
        self._source, self._options, self._stack = source, options, stack
        self._is_counted = False

    def metrics(self, name: str | None = None, console: bool = True, gpus: bool = True) -> Sink:
        """Open the sinks of the file of metrics `name`, by default the name of the process. With `console` the metrics
        may also go to the log. `gpus` is true if the process may use GPUs. Raises ConfigError as `open_metrics`
        does."""
        source = replace(self._source, role=name or self.name)
        sink = open_metrics(source, self._options, console)
        return self._counted(self._stack.enter_context(closing(sink)), gpus)

    def learner_metrics(self) -> tuple[Sink, Sink]:
        """Open the sinks of the learner's steps and of its evaluations. Raises ConfigError as `open_metrics` does."""
        steps, evaluations = open_learner_metrics(self._source, self._options)
        self._stack.callback(evaluations.close)
        return self._counted(self._stack.enter_context(closing(steps)), gpus=True), evaluations

    def _counted(self, sink: Sink, gpus: bool) -> Sink:
        if self._is_counted:
            return sink
        self._is_counted = True
        return WithUsage(sink, self._stack.enter_context(usage_of_this_process(gpus)))
