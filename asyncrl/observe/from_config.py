"""Opens the reports of a process, as the section `observe` of the configuration describes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.config.secrets import masked
from asyncrl.observe.reports import Reports
from asyncrl.observe.sinks.source import Source
from asyncrl.observe.spans import open_spans


@contextmanager
def open_reports(config: TrainConfig, name: str, endpoint: str = "") -> Iterator[Reports]:
    """Open the reports of the process `name` of a run. For a replay, `endpoint` is its address: other
    processes align their clocks with the replay's clock."""
    with ExitStack() as stack:
        spans = open_spans(config.observe, locations.run_dir(config.run), name, endpoint)
        stack.enter_context(closing(spans))
        yield Reports(source_of(config, name), config.observe, spans, stack)


def source_of(config: TrainConfig, role: str) -> Source:
    """The description of a role for its sinks."""
    return Source(
        locations.run_dir(config.run),
        role,
        config.observe.project,
        masked(asdict(config)),
        lambda: locations.run_identity(config.run).id,
    )
