"""Serves the page's files, and answers under /api/, which are made from the run's folder at each request.

| address | answer |
| --- | --- |
| / and /FILE | the page, and the other files of `page/` |
| /api/runs | the runs with their states, and for each metrics file a text that changes when the file does |
| /api/table | the runs with their results and differences |
| /api/runs/RUN/overview | state, warnings, roles, configuration |
| /api/runs/RUN/catalogue | all metrics with their newest values and meanings |
| /api/runs/RUN/series?file=FILE&name=NAME... | columns of numbers |
| /api/runs/RUN/changes | the changes of the configuration in mid-run |
| /api/runs/RUN/episodes... | the kept episodes: `episode_routes` lists these addresses |
| /api/runs/RUN/dead-letters | the attempts that were given up |
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncrl.dashboard.access import Access, guard
from asyncrl.dashboard.episode_routes import EpisodeAnswers
from asyncrl.dashboard.overview import Overviews, changes_of
from asyncrl.dashboard.run_list import ComparedRuns, all_runs
from asyncrl.dashboard.runs import ShownRun
from asyncrl.dashboard.series import Wanted, catalogue, read_series
from asyncrl.dashboard.stores import ReplayStores
from asyncrl.errors import AsyncrlError, RefusedError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.text import reason_of

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_POINTS = 5000
Answer = Callable[[ShownRun, web.Request], Any]
"""Reads a run's folder, in a worker thread, and returns plain values."""


def application(runs: Mapping[str, ShownRun], access: Access) -> web.Application:
    """The server of these runs."""
    app = web.Application(middlewares=[guard(access), _with_reasons(ErrorLogger(log))])
    stores = ReplayStores()
    overviews = Overviews(stores)
    # The part of each address after /api/runs/RUN/. It may have {names}, which are read from `request.match_info`.
    answers: Mapping[str, Answer] = {
        "overview": lambda shown, _: overviews.of(shown.run),
        "catalogue": lambda shown, _: catalogue(shown.run),
        "series": _series,
        "changes": lambda shown, _: changes_of(shown.run, stores),
        **EpisodeAnswers(runs, stores).by_address(),
    }
    app.add_routes([web.get("/", _page_file("index.html"))])
    app.add_routes([web.get(f"/{name}", _page_file(name)) for name in _page_files()])
    app.add_routes([web.get("/api/runs", _in_thread(partial(all_runs, runs)))])
    app.add_routes([web.get("/api/table", _in_thread(ComparedRuns(runs).plain))])
    app.add_routes([web.get(f"/api/runs/{{run}}/{name}", _of_run(runs, answer)) for name, answer in answers.items()])
    return app


def _page_files() -> list[str]:
    return [str(path.relative_to(PAGE)) for path in sorted(PAGE.rglob("*")) if path.suffix in TYPES]


def _page_file(name: str) -> Handler:
    path = PAGE / name

    async def send(_: web.Request) -> web.Response:
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")

    return send


def _in_thread(answer: Callable[[], Any]) -> Handler:
    async def send(_: web.Request) -> web.Response:
        return as_json(await asyncio.to_thread(answer))

    return send


def _of_run(runs: Mapping[str, ShownRun], answer: Answer) -> Handler:
    async def send(request: web.Request) -> web.Response:
        shown = runs.get(request.match_info["run"])
        if shown is None:
            raise web.HTTPNotFound(text="there is no such run on this page")
        return as_json(await asyncio.to_thread(answer, shown, request))

    return send


def _series(shown: ShownRun, request: web.Request) -> dict[str, Any]:
    query = request.query
    file = query.get("file", "")
    if file not in shown.run.metrics_files():
        raise web.HTTPNotFound(text="this run has no such metrics file")
    try:
        wanted = Wanted(
            query.getall("name", []),
            min(MOST_POINTS, max(2, int(query.get("points", "1500")))),
            query.get("after", ""),
            float(query["from"]) if "from" in query else None,
            float(query["to"]) if "to" in query else None,
        )
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    return read_series(shown.run, file, wanted)


def as_json(value: Any) -> web.Response:
    """Plain values as JSON in ASCII, so that text with halves of surrogate pairs arrives unchanged."""
    return web.Response(body=json.dumps(value, allow_nan=False).encode(), content_type="application/json")


def _with_reasons(errors: ErrorLogger) -> Middleware:
    """Answer with the reason if a query makes no sense, or a run's folder cannot be read or has unexpected content."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            return web.json_response({"error": str(error)}, status=400)
        except (AsyncrlError, OSError) as error:
            return web.json_response({"error": str(error)}, status=503)
        except web.HTTPException as error:
            return web.json_response({"error": error.text}, status=error.status)
        except Exception as error:  # noqa: BLE001 - it is logged
            errors.exception(f"{request.path!r:.200} has no answer: {reason_of(error)!r:.500}", error)
            return web.json_response({"error": f"this cannot be shown: {reason_of(error)}"}, status=500)

    return answer
