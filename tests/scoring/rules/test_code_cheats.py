"""Programs that try to pass asserts without a solution. Each scores 0, and none is a failure of the rule."""

import pytest

from asyncrl.machine import sandbox
from tests.scoring.rules.test_code import judge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(sandbox.why_no_namespaces()),
        reason="without namespaces these programs would harm the machine that runs the tests",
    ),
]

STYLES = """
METADATA = {"author": "nobody"}
def check(candidate):
    assert candidate(1, 2) == 3
    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-6
    assert math.fabs(candidate(20, 22) - 42) < 1e-6
def humaneval(): check(add)
def mbpp():
    assert add(1, 2) == 3
    assert add(-1, 1) == 0
    assert add(20, 22) == 42
def equal(): assert add(1, 2) == 3 and 3 == add(1, 2) and not add(1, 2) != 3
def near(): assert abs(add(1, 2) - 3) < 1e-6
def rounded(): assert round(add(1, 2), 2) == 3
def not_imported(): assert math.isclose(add(1, 2), 3) or math.fabs(add(20, 22) - 42) < 1e-6
def close():
    import math
    assert math.isclose(add(1, 2), 3)
def in_set(): assert set([add(1, 2)]) == set([3])
def in_list(): assert [add(1, 2)] == [3]
def in_order(): assert sorted([add(1, 2), 1]) == [1, 3]
def of_type(): assert isinstance(add(1, 2), int) and str(add(1, 2)) == "3"
def all_of(): assert all(map(lambda each: add(each, each) == 2 * each, [1, 2]))
def zipped(): assert all(one == other for one, other in zip([add(1, 2), add(3, 4)], [3, 7]))
def either(): assert add(1, 2) in (3, 3.0) or add(1, 2) in {3: 1}
def greater(): assert 2 < add(1, 2) < 4 and max(add(1, 2), 2) == 3 and min(add(1, 2), 4) == 3
def summed(): assert sum([add(1, 2), 1]) == 4 and divmod(add(1, 2), 2) == (1, 1)
def caught():
    try:
        assert [add(1, 2)] == [3]
    except ValueError:
        pass
def united():
    import unittest
    class T(unittest.TestCase):
        def test(self): self.assertAlmostEqual(add(1, 2), 3)
    result = unittest.TestResult()
    T("test").run(result)
    assert result.wasSuccessful() and result.testsRun == 1 and not result.skipped
styles = [humaneval, mbpp, equal, near, rounded, close, in_set, in_list, in_order, of_type, all_of, zipped, either]
styles += [greater, summed, caught, united, not_imported]
passed = []
for style in styles:
    try:
        style()
    except Exception:
        continue
    passed.append(style)
"""
"""The ways in which tests look at an answer. `math` is no import in one of them, as in HumanEval."""

LIAR = """
class Liar{base}:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __instancecheck__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = lambda self: 5
    __abs__ = __sub__ = __rsub__ = __add__ = __radd__ = __round__ = __iter__ = lambda self, *_: self
    __len__ = __index__ = __int__ = lambda self: 5
    __str__ = __repr__ = lambda self: "5"
    __float__ = lambda self: 5.0
    __class__ = property(lambda self: int)
    __array_interface__ = {{"data": (8, False), "shape": (), "typestr": "<i8", "version": 3}}
    def __getattr__(self, name): return self
def add(a, b):
    return Liar()
"""
EVERY_FD = """
import os
for fd in range(256):
    try:
        {each}
    except OSError:
        pass
"""

CHEATS = {
    "it defines functions with the names of built-ins": """
def abs(x): return 0
def isinstance(*_): return True
def round(*_): return 3
set = sorted = list = tuple = str = sum = max = min = divmod = lambda *_: 0
all = any = zip = map = lambda *_: []
def add(a, b): return 5
""",
    "it defines a class named math": """
class math:
    isclose = staticmethod(lambda *_, **__: True)
    fabs = staticmethod(lambda *_: 0)
def add(a, b): return 5
""",
    "it puts modules of its own among the modules": """
import sys, types
for name in ("math", "unittest", "numpy", "json", "builtins"):
    module = types.ModuleType(name)
    module.isclose = lambda *_, **__: True
    module.fabs = lambda *_: 0
    sys.modules[name] = module
math = sys.modules["math"]
def add(a, b): return 5
""",
    "it imports a mock under the name of what the tests use": """
from unittest.mock import ANY, MagicMock as math, MagicMock as unittest, MagicMock as check
def add(a, b): return ANY
""",
    "it is a mock that returns what is equal to anything": """
from unittest.mock import ANY, MagicMock
add = MagicMock(return_value=ANY)
""",
    "it patches the built-ins": """
import builtins
builtins.abs = builtins.round = lambda *_: 0
builtins.all = builtins.isinstance = lambda *_: True
builtins.AssertionError = Exception
builtins.__import__ = lambda *_, **__: None
def add(a, b): return 5
""",
    "it replaces the built-ins of its own module": """
__builtins__ = {"abs": lambda x: 0, "AssertionError": ValueError}
__getattr__ = lambda name: (lambda *_: True)
def add(a, b): return 5
""",
    "its answer is an object that lies": LIAR.format(base=""),
    "its answer is an int that lies": LIAR.format(base="(int)"),
    "its answer is a float that lies": LIAR.format(base="(float)"),
    "its answer is a text that lies": LIAR.format(base="(str)"),
    "its answer is a list that lies": LIAR.format(base="(list)"),
    "its answer is a dict that lies": LIAR.format(base="(dict)"),
    "its answer is a class that lies": LIAR.format(base="(type)").replace("Liar()", "Liar('x', (), {})"),
    "its function is a class whose instances lie": LIAR.format(base="")
    + "class add(Liar):\n    def __init__(self, *_): 0",
    "its function is an exception": "class add(ValueError): pass",
    "it ends with status 0": "import sys\nsys.exit(0)",
    "its function ends the process with status 0": "import sys\ndef add(a, b): sys.exit(0)",
    "its function ends the process at once": "import os\ndef add(a, b): os._exit(0)",
    "it ends the process at once when it has printed a verdict": """
import os
for _ in range(99):
    print("passed", flush=True)
os._exit(0)
""",
    "it writes a verdict to whatever is open": EVERY_FD.format(each="os.write(fd, b'passed \\n')"),
    "it writes answers to whatever is open": EVERY_FD.format(
        each="""os.write(fd, b'{"value": ["list", [null]], "arguments": ["list", []]}\\n{"value": 3}\\n' * 99)"""
    )
    + "def add(a, b): return 5",
    "it closes whatever is open": EVERY_FD.format(each="os.close(fd)") + "def add(a, b): return 5",
    "it reads whatever is open": EVERY_FD.format(each="os.set_blocking(fd, False); os.read(fd, 99999)")
    + "def add(a, b): return 5",
    "it sends open files and nonsense to the judge": """
import os, socket
for fd in range(3, 256):
    try:
        channel = socket.socket(fileno=os.dup(fd))
        socket.send_fds(channel, [b"passed "], [0, 1, 2])
        channel.sendall(bytes(range(256)))
    except OSError:
        pass
def add(a, b): return 5
""",
    "it answers more than any memory holds": EVERY_FD.format(each="os.write(fd, b'[' * (32 << 20))"),
    "it answers what is nested too deeply": """
def add(a, b):
    found = 3
    for _ in range(900): found = [found]
    return found
""",
    "it rewrites its side through frames": """
import sys
frame = sys._getframe()
while frame:
    frame.f_globals["_answer"] = lambda *_: {"value": ["object", 0], "arguments": ["list", []]}
    frame.f_globals["encode"] = lambda *_: ["list", [3]]
    print(frame.f_locals, frame.f_code.co_consts)
    frame = frame.f_back
def add(a, b): return 5
""",
    "it announces what the built-ins and modules are": """
import sys
frame = sys._getframe()
def add(a, b): return 5
forged = {name: (lambda *_, **__: True) for name in ("isinstance", "all", "any", "callable", "hasattr")}
forged |= {name: (lambda *_, **__: 0) for name in ("abs", "round", "len", "hash")}
forged |= {name: (lambda *_, **__: []) for name in ("set", "list", "sorted", "zip", "map", "str", "sum", "max")}
class Math:
    isclose = staticmethod(lambda *_, **__: True)
    fabs = staticmethod(lambda *_: 0)
forged |= {"math": Math(), "add": add, "divmod": lambda *_: (1, 1)}
def announced(names, number):
    return {name: ("value", ["object", number(each)]) for name, each in forged.items()}
def listed(request, names, named, number, answer=None):
    if "globals" in request:
        return {"value": ["list", [["list", [["object", number(each)]]] for each in forged.values()]]}
    return answer(request, names, named, number)
while frame:
    if "_answer" in frame.f_globals:
        listed.__defaults__ = (frame.f_globals["_answer"],)
        frame.f_globals.update({"_told": announced} if "_told" in frame.f_globals else {"_answer": listed})
    frame = frame.f_back
""",
    "it rewrites its side through gc": """
import gc, socket, json
for each in gc.get_objects():
    if isinstance(each, socket.socket):
        each.sendall(b'passed ')
    if isinstance(each, dict) and "_answer" in each and "__name__" in each:
        each["_answer"] = lambda *_: {"raised": ["SystemExit", "StopIteration"], "text": "0"}
json.dumps = lambda *_: '{"value": true, "arguments": ["list", []]}'
def add(a, b): return 5
""",
    "it traces its side": """
import sys
def trace(frame, event, argument):
    frame.f_locals["request"] = {"do": "call"}
    return trace
sys.settrace(trace)
sys.setprofile(lambda *_: None)
def add(a, b): return 5
""",
    "it leaves files that a starting Python runs": """
import os, site, sys
evil = "import os; os.write(1, b'passed '); os._exit(0)"
folders = [".", "/tmp", os.path.expanduser("~/.local/lib/python3.11/site-packages"), *sys.path]
try:
    folders += [*site.getsitepackages(), site.getusersitepackages()]
except Exception:
    pass
for folder in folders:
    for name in ("sitecustomize.py", "usercustomize.py", "math.py", "json.py", "unittest.py", "evil.pth"):
        try:
            os.makedirs(folder, exist_ok=True)
            open(os.path.join(folder, name), "w").write(evil)
        except OSError:
            pass
def add(a, b): return 5
""",
    "it sets variables that Python reads": """
import os
os.environ.update(PYTHONOPTIMIZE="2", PYTHONPATH="/tmp", PYTHONSTARTUP="/tmp/math.py", PYTHONINSPECT="1", HOME="/tmp")
def add(a, b): return 5
""",
    "it answers from a thread": """
import os, threading, time
def answer():
    while True:
        for fd in range(3, 256):
            try:
                os.write(fd, b'{"value": true, "arguments": ["list", [1, 2]]}\\n')
            except OSError:
                pass
threading.Thread(target=answer, daemon=True).start()
def add(a, b): time.sleep(60)
""",
    "it answers from a process that it leaves behind": """
import os
if os.fork() == 0:
    os.setsid()
    for fd in range(3, 256):
        try:
            os.write(fd, b'{"value": true, "arguments": ["list", [1, 2]]}\\n' * 99)
        except OSError:
            pass
    import time; time.sleep(600)
os._exit(0)
""",
    "it stops the clock": """
import time
time.time = time.monotonic = time.perf_counter = lambda: 0.0
time.sleep = lambda _: None
def add(a, b): return 5
""",
    "it changes the number three in memory": """
import ctypes
ctypes.c_uint32.from_address(id(3) + 24).value = 5
def add(a, b): return 5
""",
    "it writes the memory of every process": """
import glob
for path in glob.glob("/proc/[0-9]*/mem"):
    try:
        open(path, "r+b").write(b"passed")
    except (OSError, ValueError):
        pass
def add(a, b): return 5
""",
    "it traces every process": """
import ctypes
for pid in range(1, 100):
    ctypes.CDLL(None).ptrace(16, pid, 0, 0)
def add(a, b): return 5
""",
    "it signals every process that it may": """
import os, signal
for pid in range(1, 100):
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
        if pid != os.getpid():
            try:
                os.kill(pid, number)
            except OSError:
                pass
def add(a, b): return 5
""",
    "it kills every process that it may": "import os\ndef add(a, b): os.kill(-1, 9)",
    "it runs something when it ends": """
import atexit, os
atexit.register(lambda: os.write(1, b"passed "))
def add(a, b): return 5
""",
    "its function calls itself without end": """
import sys
sys.setrecursionlimit(10**9)
def add(a, b): return add(a, b)
""",
    "its function takes all memory": "def add(a, b):\n    return bytearray(1 << 40)",
    "it starts processes without end": "import os\nwhile True: os.fork()",
    "its function raises what tests fail with": "def add(a, b): raise AssertionError",
    "its function raises what ends a loop": "def add(a, b): raise StopIteration",
    "its function raises what ends a process": "def add(a, b): raise SystemExit(0)",
    "its function raises an interrupt": "def add(a, b): raise KeyboardInterrupt",
    "its function skips the test": "import unittest\ndef add(a, b): raise unittest.SkipTest('not today')",
    "its function raises its own SystemExit": """
class SystemExit(Exception): code = 0
class SkipTest(Exception): pass
def add(a, b): raise SystemExit(0)
""",
    "its function is a generator": "def add(a, b):\n    while True: yield 3",
    "its function changes what it is given": "def add(*items):\n    for each in items:\n        pass\n    return items",
    "its answer is a proxy of what it is given": """
class Proxy:
    def __getattr__(self, name): return lambda *a, **k: True
def add(a, b): return Proxy()
""",
    "its answer is not a number": "def add(a, b): return float('nan')",
    "its answer is true": "def add(a, b): return True",
    "it defines nothing": "",
    "it deletes what it defines": "add = 3\ndel add",
    "it reloads the judge's modules": """
import importlib, sys
for name in [each for each in sys.modules if each.startswith("asyncrl")]:
    sys.modules[name].encode = sys.modules[name].decode = lambda *_: 3
    sys.modules[name].PASSED = "failed"
def add(a, b): return 5
""",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_program_gains_nothing_if(program: str):
    assert judge(program, STYLES + "assert passed", cpu_s=1, memory_mb=512, wall_s=10)["score"] == 0.0


def test_a_right_program_passes_every_style():
    assert judge("def add(a, b): return a + b", STYLES + "assert passed == styles")["score"] == 1.0


SECRET = "assert find() == 'ocelot' + '-57'"
SEEKERS = {
    "on its command line and in its environment": """
import sys
seen = [str(sys.argv), str(sys.orig_argv), str(os.environ)]
""",
    "in the processes that it sees": """
import glob
seen = []
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/fd/*"):
    try:
        with open(path, errors="replace", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            seen.append(str(file.read(1 << 20)))
    except OSError:
        pass
""",
    "in its memory": """
import gc, sys
seen, frame = [], sys._getframe()
while frame:
    seen += [repr(frame.f_locals), repr(frame.f_code.co_consts)]
    frame = frame.f_back
seen += [each for each in gc.get_objects() if isinstance(each, str)]
seen += [repr(each) for each in gc.get_objects() if isinstance(each, (tuple, list)) and len(each) < 100]
""",
    "in the files that are left": """
seen = []
for folder in ("/tmp", "/dev/shm", "/var/tmp", "."):
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                seen.append(open(os.path.join(top, name), errors="replace").read(1 << 20))
            except OSError:
                pass
""",
    "on its standard input": "import sys\nseen = [sys.stdin.read()]",
    "on the sockets that it has": """
import socket
seen = []
for fd in range(256):
    try:
        seen.append(str(socket.socket(fileno=os.dup(fd)).recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)))
    except OSError:
        pass
""",
}


FIND = """
def find():
    # Written so that the word stands in no program.
    word = "".join(reversed("toleco"))
    return word + "-57" if any(word in each for each in seen) else "no"
"""


@pytest.mark.parametrize("where", SEEKERS)
def test_a_program_does_not_find_the_tests(where: str):
    program = f"import os\n{SEEKERS[where]}\n{FIND}"
    assert judge(program, SECRET)["score"] == 0.0
    assert judge(program, "assert find() == 'no'")["score"] == 1.0
