"""Cells whose processes are woken after a session was stopped, by each means that the kernel has, and then compute.

A busy machine may stop a session late. So each comes again, or at several times of which the last are far away.
"""

TRAPS = """
import ctypes, fcntl, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
class Event(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_int * 12)
    ]
def after(seconds, number, again=0.0):
    # A POSIX timer of this process, which goes on while the process is stopped.
    timer = ctypes.c_void_p()
    assert libc.timer_create(1, ctypes.byref(Event(None, number, 0)), ctypes.byref(timer)) == 0
    times = [part for each in (again, seconds) for part in (int(each), int(each % 1 * 10**9))]
    assert libc.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(*times)), None) == 0
def burn():
    while True:
        pass
def in_child(prepare):
    # True in a new process. Its parent goes on when it is prepared.
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        return False
    prepare()
    os.write(tell, b"x")
    return True
def again():
    # SIGSTOP takes away a SIGCONT that waits, and with it the timer.
    for delay in DELAYS:
        after(delay, signal.SIGCONT, 0.5)
signal.signal(signal.SIGCONT, lambda *_: None)
DELAYS = [2 ** n / 2 for n in range(8)]
"""

WAKING = {
    "by a timer": "again(); threading.Thread(target=burn, daemon=True).start()",
    "by a timer, and stops itself again after each millisecond": """
if in_child(again):
    while True:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
""",
    "in a thread whose process has no first thread any more": """
def prepare():
    again()
    threading.Thread(target=burn).start()
if in_child(prepare):
    libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
""",
    "by a file, when another process dies": """
for delay in DELAYS:
    read, write = os.pipe()
    if in_child(lambda: after(delay, signal.SIGKILL)):
        burn()
    os.close(write)
    fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(read, 10, signal.SIGCONT)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
threading.Thread(target=burn, daemon=True).start()
""",
    "by the death of its parent": """
def prepare():
    if in_child(lambda: libc.prctl(1, signal.SIGCONT, 0, 0, 0)):
        burn()
    after(delay, signal.SIGKILL)
for delay in DELAYS:
    if in_child(prepare):
        burn()
""",
    "by a message": """
NAME = b"/asyncrl-test-%d" % os.getpid()
queue = libc.mq_open(NAME, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600, None)
assert queue >= 0, ctypes.get_errno()
assert libc.mq_unlink(NAME) == 0
def expect(*_):
    while libc.mq_receive(queue, ctypes.create_string_buffer(1 << 16), 1 << 16, None) >= 0:
        pass
    libc.mq_notify(queue, ctypes.byref(Event(None, signal.SIGCONT, 0)))
if in_child(again):
    while True:
        time.sleep(0.1)
        libc.mq_send(queue, b"x", 1, 0)
signal.signal(signal.SIGCONT, expect)
expect()
threading.Thread(target=burn, daemon=True).start()
""",
    "by another process of the session": """
own = os.getpid()
if in_child(again):
    while True:
        os.kill(own, signal.SIGCONT)
        time.sleep(0.01)
threading.Thread(target=burn, daemon=True).start()
""",
    "by two that wake each other": """
for _ in range(2):
    if in_child(again):
        while True:
            os.killpg(0, signal.SIGCONT)
threading.Thread(target=burn, daemon=True).start()
""",
    "and takes memory": """
for _ in range(6):
    if in_child(again):
        os.kill(os.getpid(), signal.SIGSTOP)
        kept = b"x" * (100 << 20)
        burn()
""",
}
WAKING = {name: TRAPS + cell for name, cell in WAKING.items()}
