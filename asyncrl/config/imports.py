"""Imports the objects that a configuration names by a dotted path, or by file and name, and finds an object's path."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from hashlib import sha256
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.keys import nearest
from asyncrl.errors import ConfigError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.text import is_own, reason_of

MEND = 'move it into a function, or into a block that begins with if __name__ == "__main__":'
"""The advice for code that must not run when its module is imported."""
FROM_FILE = "asyncrl_file_"
"""The names of modules that `load_file` makes begin with this."""


def imported(path: str, setting: str, form: str = "module.function") -> Any:
    """The object at `path`: module.attribute, or FILE.py:NAME. Error messages quote `setting` and `form`.

    - `setting`: the option with its value, such as `scoring.rule=a.b`
    - `form`: the expected form of the path

    Raises ConfigError: the object cannot be imported.
    """
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        return _of_file(file, name, setting)
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or f"{module}.".startswith(f"{error.name}."):
            raise _refusal(setting, error, form, path) from error
        raise ConfigError(
            f"{setting} cannot be imported: it needs the module {error.name}, which is not found; install it in the "
            f"environment of asyncrl, put its folder on PYTHONPATH, or move {attribute} into a file of its own "
            "without that import"
        ) from error
    except Exception as error:
        raise _refusal(setting, error, form, path) from error
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{setting} cannot be imported ({reason_of(error)}): {MEND}") from error


def module_of(path: str) -> str:
    """The module of `path` as `imported` takes it: a dotted name, or the file FILE.py."""
    file = path.rpartition(":")[0]
    return file if file.endswith(".py") else path.rpartition(".")[0]


def is_new_module(path: str) -> bool:
    """True if importing `path` would run a module of the user's own which this process has not imported yet."""
    module = module_of(path)
    if module.endswith(".py"):
        return _name_of(module) not in sys.modules
    if module in sys.modules:
        return False
    origin = _origin(module)
    return origin is not None and is_own(origin)


def file_of(path: str) -> str:
    """The file of the module of `path`. For a module in a package, it may be the file of the package."""
    module = module_of(path)
    return module if module.endswith(".py") else _origin(module) or module


def _origin(module: str) -> str | None:
    """The file of the top-level package or module of `module`. Empty if that package has no file; None if it does not
    exist. Nothing is imported."""
    try:
        spec = find_spec(module.partition(".")[0])
    except ValueError:  # The package is not a module of a file, such as the main program.
        return None
    return None if spec is None else spec.origin or ""


def load_file(path: str) -> ModuleType:
    """The module of the Python file `path`, which may be in any folder. A process runs the file once.

    Raises OSError: the file cannot be read. Passes on the errors of the file.
    """
    file, name = Path(path).expanduser().resolve(), _name_of(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = module_from_spec(spec)
    # Classes of the file are pickled by the name of their module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_of(path: str) -> str:
    """The name of the module that `load_file` makes of the file."""
    file = Path(path).expanduser().resolve()
    return f"{FROM_FILE}{sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"


def files_in(pickled: bytes) -> list[str]:
    """The files of `load_file` whose objects are in a pickle. A process must load them before it reads the pickle."""
    # Only a copy is safe: while the items are listed, garbage may be collected, and another thread may import a module.
    loaded = [(name, module) for name, module in sys.modules.copy().items() if name.startswith(FROM_FILE)]
    return [str(module.__file__) for name, module in loaded if name.encode() in pickled]


def path_of(value: Any, key: str) -> str:
    """The dotted path by which the processes of a run import the function or class `value`, which is given for `key`.

    Raises ConfigError: they cannot import it. It is defined in a script, a notebook or a function, or its module is in
    a folder that only the script searches.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__name__)
    if module == "__main__" or getattr(sys.modules.get(str(module)), name, None) is not value:
        own = name.rpartition(".")[2]
        new = f"my_rewards.{own if own.isidentifier() else 'NAME'}"
        raise ConfigError(
            f"{key}={name}: the run's processes import it by name: move it to a file of its own, such as "
            f"my_rewards.py, and pass {new}"
        )
    if folder := _only_of_script(str(module)):
        raise ConfigError(
            f"{key}={module}.{name}: the run's processes do not find its module in {folder}: start the script in that "
            "folder, or put the folder on PYTHONPATH"
        )
    return f"{module}.{name}"


def _only_of_script(module: str) -> str:
    """The folder of the running script, if `module` is in it and other processes do not search this folder. Otherwise
    empty."""
    script, file = (
        getattr(sys.modules.get("__main__"), "__file__", None),
        getattr(sys.modules[module], "__file__", None),
    )
    if not script or not file or not is_own(file):
        return ""
    folder = Path(script).resolve().parent
    found = {Path(each).resolve() for each in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    inside = folder == Path(file).resolve().parents[module.count(".") + (Path(file).stem == "__init__")]
    return str(folder) if inside and folder not in found else ""


def _of_file(file: str, name: str, setting: str) -> Any:
    try:
        module = load_file(file)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{setting}: {file} cannot be imported ({reason_of(error)})") from error
    if not hasattr(module, name):
        near = nearest(name, [each for each in vars(module) if not each.startswith("_")])
        raise ConfigError(f"{setting}: {file} has no {name}" + (f"; did you mean {near}?" if near else ""))
    return getattr(module, name)


def _refusal(setting: str, error: BaseException, form: str, path: str) -> ConfigError:
    fix = _near(path, error) or f"; give {form}, with the module's folder on PYTHONPATH, or FILE.py:NAME"
    return ConfigError(f"{setting} cannot be imported ({reason_of(error)}){fix}")


def _near(path: str, error: BaseException) -> str:
    """A text such as `; did you mean my_rewards.length_bonus?`, if a module or an object has a similar name."""
    module, _, attribute = path.rpartition(".")
    if isinstance(error, AttributeError) and module in sys.modules:
        near = nearest(attribute, [name for name in vars(sys.modules[module]) if not name.startswith("_")])
        return f"; did you mean {module}.{near}?" if near else ""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    parent, _, missing = error.name.rpartition(".")
    # Search only the user's own folders: installed packages have thousands of modules, and one with a similar name
    # would be no help.
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else filter(is_own, sys.path)
    near = nearest(missing, [each.name for each in pkgutil.iter_modules(folders)])
    rest = path.removeprefix(error.name)
    return f"; did you mean {error.name.removesuffix(missing)}{near}{rest}?" if near else ""
