"""Our agent loops and those of verl play the same episodes, where ASYNCRL_VERL_PYTHON names a Python that has verl."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat.verl.agent_loops.base import REGISTRY
from asyncrl.compat.verl.names import provide_verl
from tests.compat.verl.agent_loops import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl: set ASYNCRL_VERL_PYTHON to a Python that has it"
    ),
]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def of_verl() -> dict[str, Any]:
    """The trajectories of verl's own loops, which a process of its own plays."""
    command = [os.environ["ASYNCRL_VERL_PYTHON"], "-m", program.__name__]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def file_of_verl(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a file of verl as the module `name`. What the file imports of verl is asyncrl's."""
    asked = "import importlib.util as u; print(u.find_spec('verl').submodule_search_locations[0])"
    found = subprocess.run(
        [os.environ["ASYNCRL_VERL_PYTHON"], "-c", asked], stdout=subprocess.PIPE, text=True, check=True
    )
    spec = importlib.util.spec_from_file_location(name, Path(found.stdout.strip()) / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    for known, entry in list(REGISTRY.items()):
        # The file registers its loop by a name that asyncrl's own loop has.
        monkeypatch.setitem(REGISTRY, known, entry)
    spec.loader.exec_module(module)


@pytest.mark.parametrize(
    ("file", "loop", "own", "needs"),
    [
        ("single_turn_agent_loop.py", "SingleTurnAgentLoop", "single_turn_agent", "verl.protocol"),
        ("tool_agent_loop.py", "ToolAgentLoop", "tools", "verl.tools.function_tool"),
    ],
)
async def test_files_of_verl_run_on_our_names_where_verl_is_not_installed(
    file: str, loop: str, own: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_verl()
    pytest.importorskip(needs, reason="asyncrl has no counterpart of this module of verl")
    own_loops = {name: entry for name, entry in program.EPISODES.items() if entry[0] == own}
    before = {name: program.described(await program.played(*entry)) for name, entry in own_loops.items()}
    file_of_verl("a_file_of_verl", f"experimental/agent_loop/{file}", monkeypatch)
    given = {"file": {**program.with_tools()["tools"], "_target_": f"a_file_of_verl.{loop}"}}
    for name, (_, *episode) in own_loops.items():
        assert program.described(await program.played("file", *episode, given=given)) == before[name], name


async def test_loops_of_verl_and_our_own_play_the_same_episodes(of_verl: dict[str, Any]) -> None:
    ours = json.loads(json.dumps(await program.trajectories()))
    assert list(of_verl) == list(ours)
    for name, trajectory in ours.items():
        assert of_verl[name] == trajectory, name
