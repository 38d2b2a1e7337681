"""A whole run in processes whose tools are those of an MCP server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.runs.lines import read_lines
from tests.end_to_end.support import ROOT, Run
from tests.helpers import until

Start = Callable[..., Run]

SERVER = Path(__file__).parent / "calculator_server.py"


@pytest.mark.long
def test_the_demos_policy_trains_with_an_mcp_server_that_dies_again_and_again(
    start: Start, prepared: list[str], tmp_path: Path
) -> None:
    env = f"{{PYTHONPATH: {ROOT}, MARK: {tmp_path}}}"
    server = f"command: {sys.executable}, args: [{SERVER}, 300], env: {env}, shared: true, timeout_s: 60"
    tools = ["actor.tools=[]", f"actor.mcp_servers={{calculator: {{{server}}}}}"]
    run = start("train", *prepared, *tools, "learner.steps=2", "learner.eval_every=0")
    run.finish()
    assert len(run.steps()) == 2
    (rows,) = [list(read_lines(path)) for path in (run.dir / "metrics").glob("actor*.jsonl")]
    last = rows[-1]
    # The run may end before a server that has died is started again.
    assert last["mcp_started"] - last["mcp_lost"] in (0, 1)
    assert last["mcp_started"] > 1
    assert last["tool_failures"] >= last["mcp_lost"], "all calls that wait for the server learn of its end"
    assert (last["failed"], last["mcp_states_lost"]) == (0, 0)
    assert until(lambda: not servers(tmp_path))


def servers(mark: Path) -> list[int]:
    """The processes of the test's servers that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
