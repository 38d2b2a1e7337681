"""Sends a timeline as OpenTelemetry traces, by OTLP over HTTP (the extra asyncrl[otel]).

Each episode is a trace over all roles, and so is each learner step. Any other span is a separate trace. A trace's id is
derived from the ids of the run and of the episode or step, so that sending a run again gives the same ids. The span of
a group in a batch links to the step that trained it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.config.locations import IDENTITY_FILE
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.runs.trace.reading import TraceSpan, text_of

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, TraceFlags
except ImportError as error:
    raise ConfigError(f"--format otlp needs the extra: pip install 'asyncrl[otel]' ({error})") from error

SPANS_A_REQUEST = 512
SCOPE = InstrumentationScope("asyncrl")


def send(spans: Iterable[TraceSpan], run_dir: Path, endpoint: str) -> int:
    """Send the spans to a collector at the URL `endpoint`, and return their number. Raises UnavailableError: the
    collector refuses them."""
    conversion = Conversion(run_dir)
    exporter, sent = OTLPSpanExporter(endpoint=endpoint), 0
    try:
        converted = map(conversion.readable, spans)
        while batch := list(islice(converted, SPANS_A_REQUEST)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise UnavailableError(f"{endpoint} does not take spans; {sent} were sent")
            sent += len(batch)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return sent


class Conversion:
    """Converts the spans of the run in the folder `run_dir` to spans of OpenTelemetry."""

    def __init__(self, run_dir: Path) -> None:
        identity = run_dir / IDENTITY_FILE
        self._run = run_dir.name
        self._id = identity.read_text().strip() if identity.is_file() else run_dir.name
        self._resources: dict[str, Resource] = {}
        self._numbers = count()

    def readable(self, span: TraceSpan) -> ReadableSpan:
        """Convert a span. Spans of an episode become children of the actor's span of the whole episode, and spans of a
        step become children of the learner's span of the whole step.
        """
        episode, step = text_of(span.values, "episode"), span.values.get("step")
        if episode:
            trace, root = f"episode {episode}", span.name == "episode"
        elif span.track == "steps" and step is not None:
            trace, root = f"step {step}", span.name == "step"
        else:
            trace, root = f"{span.role} {next(self._numbers)}", True
        links: Sequence[Link] = ()
        if span.name == "ready" and step is not None:
            links = [Link(self._root(f"step {step}"))]
        parent = self._root(trace)
        return ReadableSpan(
            span.name,
            parent if root else self._context(trace, f"{span.role} {next(self._numbers)}"),
            None if root else parent,
            self._resource(span.role),
            _attributes(span),
            links=links,
            start_time=span.start * 1000,
            end_time=span.end * 1000,
            instrumentation_scope=SCOPE,
        )

    def _root(self, trace: str) -> SpanContext:
        return self._context(trace, "root")

    def _context(self, trace: str, span: str) -> SpanContext:
        name = f"{self._id} {trace}"
        trace_id = xxhash.xxh3_128_intdigest(name.encode())
        span_id = xxhash.xxh3_64_intdigest(f"{name} {span}".encode())
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def _resource(self, role: str) -> Resource:
        kind = role.partition("-")[0]
        return self._resources.setdefault(
            role,
            Resource(
                {"service.name": f"asyncrl.{kind}", "service.instance.id": role, "asyncrl.run": self._run},
            ),
        )


def _attributes(span: TraceSpan) -> Mapping[str, Any]:
    values = {f"asyncrl.{key}": value for key, value in span.values.items() if value is not None}
    return {**values, "asyncrl.track": span.track} if span.track else values
