"""Our worker groups compared with verl's own, if ASYNCRL_VERL_PYTHON names a Python that has verl: every worker gets
the same arguments, and the same results come back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from asyncrl.errors import WorkerError
from tests.compat.verl.controller import calls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
    ),
]
Verl = Callable[[Any], Any]


@pytest.fixture(scope="module")
def verl() -> Iterator[Verl]:
    """Carries out a call with verl, in a process of its own."""
    command = [os.environ["ASYNCRL_VERL_PYTHON"], str(Path(calls.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(call: Any) -> Any:
            process.stdin.write(json.dumps(call) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@st.composite
def worker_calls(draw: st.DrawFn) -> Any:
    mode = draw(
        st.sampled_from(["ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_METRIC", calls.MESH])
    )
    data, copies = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    world = data * copies
    ranks = [[worker // copies, worker % copies == 0] for worker in range(world)]
    batches = mode in ("DP_COMPUTE_PROTO", "DP_COMPUTE_METRIC", calls.MESH)
    values = st.lists(st.integers(), min_size=1, max_size=4)
    argument = draw(
        st.integers(1, 7) if batches else st.one_of(values, values.map(lambda each: (each * world)[:world]))
    )
    padding = batches and mode == "DP_COMPUTE_PROTO" and draw(st.booleans())
    return {"mode": mode, "world": world, "arguments": [argument], "padding": padding, "ranks": ranks}


@given(worker_calls())
@settings(max_examples=300, deadline=None)
def test_every_worker_gets_what_verl_gives_it_and_the_same_comes_back(verl: Verl, call: Any) -> None:
    theirs, ours = verl(call), json.loads(json.dumps(calls.as_told(DataProto, call, _performing(call))))
    if "error" in theirs:
        assert "AssertionError" in ours.get("error", []), (theirs, ours)
    else:
        assert sorted(map(str, ours["given"])) == sorted(map(str, theirs["given"]))
        assert ours["result"] == theirs["result"]


def _performing(call: Any) -> Callable[[Callable[..., Any], Sequence[Any]], Any]:
    mode: Any = (
        make_nd_compute_dataproto_dispatch_fn(calls.MESH) if call["mode"] == calls.MESH else Dispatch[call["mode"]]
    )

    def perform(method: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        class Performer(Worker):
            def __init__(self) -> None:
                super().__init__()
                self._register_dispatch_collect_info(calls.MESH, *call["ranks"][self.rank])

            @register(dispatch_mode=mode)
            def perform(self, *given: Any) -> Any:
                return method(*given)

        with LocalWorkerGroup(ClassWithInitArgs(Performer), ResourcePool([call["world"]])) as group:
            try:
                return group.perform(*arguments)  # type: ignore[attr-defined]
            except WorkerError as error:
                raise error.cause or error from error

    return perform
