"""A stub of docker and podman: `run` starts the command of the container on this machine, without any isolation.

Its arguments go to the file of the same name that ends with .calls."""

import ctypes
import json
import os
import sys
from pathlib import Path

arguments = sys.argv[1:]
with Path(sys.argv[0]).with_suffix(".calls").open("a") as calls:
    calls.write(json.dumps(arguments) + "\n")
if arguments[0] == "run":
    if "missing" in arguments:
        sys.stderr.write("Error: missing: image not known\n")
        sys.exit(125)
    # As in a container, orphans become children of the first process.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    # The command follows the image.
    command = arguments[arguments.index("python3") :]
    os.execvp(sys.executable, [sys.executable, *command[1:]])
