"""The arrows of the design: which room may import which, and what a light process must not load.

Imports are read from the sources, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asyncrl
from asyncrl.data.writing import write_tasks
from asyncrl.machine.ports import free_ports
from tests.helpers import make_task

pytestmark = pytest.mark.slow

PACKAGE = Path(asyncrl.__file__).parent

FLOORS = (
    ("errors", "masking", "plain", "arithmetic", "version"),
    ("types", "text", "ids"),
    ("msgpack_values",),
    ("grammar", "wire", "machine"),
    ("config", "sandbox", "network"),
    ("data", "modelling", "algorithms", "observe"),
    ("chat", "weights", "replay"),
    ("engine", "tools"),
    ("episode",),
    ("agents",),
    ("actor", "scoring", "learner"),
    ("runs",),
    ("launch", "dashboard", "capacity", "compat"),
    ("commands",),
    ("__main__", ""),
)
"""A room imports itself and rooms that this list names before its own. Rooms of one floor do not import each other. The
last floor has the root, which no room imports."""

ENGINE_FLOORS = (("",), ("fleet",), ("sglang", "vllm", "embedded"), ("opening",), ("from_config",))
"""The same within `engine`, where the first floor is every file that is named on no other."""

LEARNER_FLOORS = (("ranks",), ("batch",), ("model",), ("checkpoint",), ("",))
"""The same within `learner`, where the last floor is the story of the training."""

MOST_FILES = 30
"""Python files of one folder. A folder with more has ideas that want folders of their own."""
MOST_SIGNATURES = 70
"""Functions of the whole package that may take the whole configuration."""
DOORS = ("from_config", "__main__")
"""Files that may take it in any room; `config` and `launch` may in all of their files."""

HEAVY = ("torch", "transformers")


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


SOURCES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@dataclass(frozen=True)
class Names:
    """Names in a module: the modules of asyncrl that it imports, and its public classes."""

    imports: frozenset[str]
    classes: tuple[str, ...]


@cache
def _names(module: str) -> Names:
    tree = ast.parse(SOURCES[module].read_text())
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(source), names=names, level=0):
                found |= {f"{source}.{name.name}" if f"{source}.{name.name}" in SOURCES else source for name in names}
            case ast.Import(names=names):
                found |= {name.name for name in names}
    classes = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return Names(frozenset(found & SOURCES.keys()), tuple(name for name in classes if not name.startswith("_")))


def imports(module: str) -> frozenset[str]:
    """The modules of asyncrl that a module imports."""
    return _names(module).imports


@cache
def _edges() -> list[tuple[str, str]]:
    return [(module, imported) for module in SOURCES for imported in sorted(imports(module))]


def _room(module: str, within: str, floors: Sequence[Sequence[str]]) -> tuple[int, str] | None:
    """The floor of a module and its room, which is the longest name that fits; None outside of `within`."""
    if module != within and not module.startswith(f"{within}."):
        return None
    rest = module.removeprefix(within).removeprefix(".")
    rooms = [(floor, room) for floor, names in enumerate(floors) for room in names]
    fitting = [each for each in rooms if not each[1] or rest == each[1] or rest.startswith(f"{each[1]}.")]
    return max(fitting, key=lambda each: len(each[1]), default=None)


def _against(within: str, floors: Sequence[Sequence[str]]) -> list[str]:
    wrong = []
    rooms = {module: _room(module, within, floors) for module in SOURCES}
    for module, imported in _edges():
        ours, theirs = rooms[module], rooms[imported]
        if ours is not None and theirs is not None and ours != theirs and theirs[0] >= ours[0]:
            wrong.append(f"{module} imports {imported}")
    return wrong


def test_every_room_stands_on_a_floor() -> None:
    rooms = {name.split(".")[1] for name in SOURCES if "." in name}
    assert rooms <= {room.split(".")[0] for floor in FLOORS for room in floor}


@pytest.mark.parametrize(
    ("within", "floors"), [("asyncrl", FLOORS), ("asyncrl.engine", ENGINE_FLOORS), ("asyncrl.learner", LEARNER_FLOORS)]
)
def test_rooms_import_only_what_is_below_them(within: str, floors: Sequence[Sequence[str]]) -> None:
    assert _against(within, floors) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: imports(module) for module in SOURCES}).prepare()


def test_no_folder_has_many_files() -> None:
    files = Counter(str(path.parent.relative_to(PACKAGE)) for path in SOURCES.values())
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def test_no_folders_import_each_other_in_a_circle() -> None:
    folders: dict[str, set[str]] = {str(path.parent): set() for path in SOURCES.values()}
    for module, imported in _edges():
        ours, theirs = SOURCES[module].parent, SOURCES[imported].parent
        # A folder and one within it are one room.
        if not (ours.is_relative_to(theirs) or theirs.is_relative_to(ours)):
            folders[str(ours)].add(str(theirs))
    TopologicalSorter(folders).prepare()


def test_nothing_imports_an_entry_point() -> None:
    assert [(module, imported) for module, imported in _edges() if imported.endswith(".__main__")] == []


def _names_configuration(annotation: ast.expr | None) -> bool:
    return annotation is not None and re.search(r"\bTrainConfig\b", ast.unparse(annotation)) is not None


@cache
def _with_configuration() -> dict[str, ast.Module]:
    """The modules that name `TrainConfig` anywhere."""
    texts = {module: path.read_text() for module, path in SOURCES.items()}
    return {module: ast.parse(text) for module, text in texts.items() if "TrainConfig" in text}


def _signatures_with_configuration() -> Iterator[tuple[str, str]]:
    """Each function that takes `TrainConfig`, with its module."""
    for module, tree in _with_configuration().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                parameters = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
                if any(each is not None and _names_configuration(each.annotation) for each in parameters):
                    yield module, node.name


def _is_a_door(module: str) -> bool:
    room, file = module.split(".")[1], module.rpartition(".")[2]
    return room in ("config", "launch") or file in DOORS


def test_the_configuration_stays_at_the_doors_and_few_signatures_take_it() -> None:
    found = list(_signatures_with_configuration())
    assert [f"{module}.{name}" for module, name in found if not _is_a_door(module)] == []
    assert len(found) <= MOST_SIGNATURES


def test_no_class_outside_of_config_holds_the_configuration() -> None:
    holders = [
        f"{module}.{node.name}"
        for module, tree in _with_configuration().items()
        if module.split(".")[1:2] != ["config"]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and _names_configuration(field.annotation)
    ]
    assert holders == []


def test_no_two_public_classes_have_the_same_name() -> None:
    modules = defaultdict(list)
    for module in SOURCES:
        for name in _names(module).classes:
            # The parameters of a plugin belong to its file, which a reader always names with them.
            if name != "Params":
                modules[name].append(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["completion", "words", "--", "train", "x"]])
def test_help_and_completion_load_only_the_standard_library(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "asyncrl", *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = _loaded(output.stderr)
    # `copy` looks for Jython's `org`.
    assert {name.split(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "asyncrl", "org", *_started_with()}
    assert {name.split(".")[1] for name in loaded if name.startswith("asyncrl.")} <= {
        "__main__",
        "config",
        "errors",
        "masking",
        "version",
    }


def test_a_replay_serves_without_having_loaded_torch_or_transformers(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.parquet", [make_task(number) for number in range(4)])
    options = {
        "model.path": tmp_path,
        "data.train": tmp_path / "tasks.parquet",
        "run.dir": tmp_path,
        "network.replay_port": free_ports(1),
    }
    command = [sys.executable, "-X", "importtime", "-m", "asyncrl.replay"]
    overrides = [f"{name}={value}" for name, value in options.items()]
    with subprocess.Popen([*command, *overrides], stderr=subprocess.PIPE, text=True) as replay:
        assert replay.stderr is not None
        lines = []
        for line in replay.stderr:
            lines.append(line)
            if "replay serves" in line:
                replay.send_signal(signal.SIGTERM)
    assert replay.returncode == 0, "".join(lines[-5:])
    loaded = _loaded("".join(lines))
    assert "asyncrl.replay.store.store" in loaded
    assert {name.split(".")[0] for name in loaded}.isdisjoint(HEAVY)


def _loaded(report: str) -> set[str]:
    """The modules in a report of `-X importtime`."""
    return set(re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s*(\S+)$", report, re.MULTILINE))


@cache
def _started_with() -> set[str]:
    """Return what this Python loads before any program: packages of its environment may hook into its start."""
    output = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "pass"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in _loaded(output.stderr)}


def test_no_part_decides_by_the_wall_clock() -> None:
    wall = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|\bfrom time import\b")
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if wall.search(path.read_text())}
    assert users <= {
        *(
            "observe/sinks/json_lines.py",
            "observe/sinks/tensorboard.py",
            "observe/spans.py",
            "agents/chat_api/server.py",
        ),
        *("learner/from_config.py", "launch/doctor/sharing.py", "dashboard/overview.py"),
        *(
            "runs/environment.py",
            "runs/elapsed.py",
            "machine/activity.py",
            "runs/state/situation.py",
            "runs/state/watch.py",
        ),
    }, "these may write down or tell people when something was, and doctor compares the clocks of hosts"


def test_no_part_loses_a_cancellation_in_wait_for() -> None:
    # In Python 3.11, `asyncio.wait_for` ignores a cancellation that arrives when its work has just ended.
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "asyncio.wait_for(" in path.read_text()
    }
    assert not users, "use `async with asyncio.timeout(seconds)`"
