"""`asyncrl trace RUN`: writes the timeline of a run for Perfetto, or explains why a step or an episode took so long.

RUN is the folder of a run, running or finished, a copy of it, or the name of a run. https://ui.perfetto.dev opens the
file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from asyncrl.config.commands import command_name
from asyncrl.config.exits import exit_status
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.masking import masked_text
from asyncrl.runs.finding import run_with_spans
from asyncrl.runs.trace.explain import explain_episode, explain_step
from asyncrl.runs.trace.perfetto import write_perfetto
from asyncrl.runs.trace.reading import US, Trace, TraceSpan, in_order, number_of

EXAMPLES = """examples:
  asyncrl trace runs/NAME                               the whole run, into runs/NAME/trace.json.gz
  asyncrl trace runs/NAME --steps 310:314               the time of these learner steps
  asyncrl trace runs/NAME --explain-step 312            why the learner was idle
  asyncrl trace runs/NAME --explain-episode t000000012.3.0
  asyncrl trace runs/NAME --format otlp --endpoint http://localhost:4318/v1/traces
"""


def main(argv: Sequence[str]) -> None:
    """The entry of the command line. Raises RefusedError: there is nothing to show."""
    given = parser().parse_args(argv)
    _run(given)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog=command_name(),
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    window = top.add_mutually_exclusive_group()
    window.add_argument("--steps", type=_span_of_numbers, metavar="A:B", help="only the time of learner steps A to B")
    window.add_argument("--seconds", type=_span_of_numbers, metavar="A:B", help="only seconds A to B after the start")
    top.add_argument("--out", type=Path, metavar="FILE", help="the file to write (RUN/trace.json.gz)")
    top.add_argument("--format", choices=("perfetto", "otlp"), default="perfetto", help="otlp: send to --endpoint")
    top.add_argument("--endpoint", metavar="URL", help="OTLP endpoint (HTTP) of an OpenTelemetry collector")
    top.add_argument("--explain-step", type=int, metavar="K", help="say why the learner took so long for step K")
    top.add_argument("--explain-episode", metavar="ID", help="say why an episode took so long")
    return top


def _run(given: argparse.Namespace) -> None:
    run = run_with_spans(given.run)
    trace = run.trace()
    if given.explain_step is not None:
        _say(explain_step(trace, given.explain_step))
    elif given.explain_episode is not None:
        _say(explain_episode(trace, given.explain_episode))
    else:
        spans = _within(trace, given)
        if given.format == "otlp":
            if given.endpoint is None:
                raise ConfigError("--format otlp needs --endpoint, such as http://localhost:4318/v1/traces")
            # This import needs the extra asyncrl[otel].
            from asyncrl.runs.trace.otlp import send

            _say([f"{send(spans, run.folder, given.endpoint)} spans were sent to {masked_text(given.endpoint)}"])
        else:
            _write(trace, spans, given.out or run.folder / "trace.json.gz")
    _warn(trace)


def _write(trace: Trace, spans: Iterable[TraceSpan], path: Path) -> None:
    about = {
        "run": trace.run_dir.name,
        "dropped": sum(role.dropped for role in trace.roles),
        "lost": sum(role.lost for role in trace.roles),
        "clocks_aligned": trace.is_aligned,
    }
    count = write_perfetto(path, in_order(spans), about)
    if not count:
        raise RefusedError("there are no spans in this window")
    _say([f"{count} spans of {len(trace.roles)} roles are in {path}; open it at https://ui.perfetto.dev"])


def _warn(trace: Trace) -> None:
    if dropped := sum(role.dropped for role in trace.roles):
        sys.stderr.write(f"{dropped} older spans were dropped (observe.spans_mb)\n")
    if lost := sum(role.lost for role in trace.roles):
        sys.stderr.write(f"{lost} spans were lost; the logs of the roles say why\n")
    if trace.unreadable:
        sys.stderr.write(f"{trace.unreadable} lines could not be read; killed processes leave such lines\n")
    if not trace.is_aligned:
        sys.stderr.write("the clocks of some hosts are not known yet: their spans may be shifted\n")


def _within(trace: Trace, given: argparse.Namespace) -> Iterator[TraceSpan]:
    """The spans that reach into the window. Raises RefusedError: the steps have no spans."""
    if given.steps is not None:
        begin, end = _time_of_steps(trace, *given.steps)
    elif given.seconds is not None:
        start = min((span.start for span in trace.spans()), default=0)
        begin, end = (start + round(edge * US) for edge in given.seconds)
    else:
        return trace.spans()
    return (span for span in trace.spans() if span.start <= end and span.end >= begin)


def _time_of_steps(trace: Trace, first: float, last: float) -> tuple[int, int]:
    learner = trace.spans(lambda role: role.kind == "learner")
    steps = [
        span for span in learner if span.track == "steps" and first <= (number_of(span.values, "step") or 0) <= last
    ]
    if not steps:
        raise RefusedError(f"there are no spans of steps {first:g} to {last:g}")
    return min(span.start for span in steps), max(span.end for span in steps)


def _span_of_numbers(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    try:
        begin, end = float(first), float(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, such as 310:314") from None
    if end < begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return begin, end


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl trace"))
