"""Copies folders of remote stores, such as s3://bucket/model, to this host: each folder once, and atomically.

- A process that needs a folder locks the place of the copy on this host. Other processes wait, and then find the copy.
- Files are copied one by one into a hidden folder, which is renamed after the last file. If the process is killed, the
  next one keeps the complete files and copies the rest.
- A copy belongs to one listing of the store: names, sizes and tags (ETags, checksums or times of change). Each file
  must have its listed size, and the listing must be the same before and after the copy. If the listing changes later,
  the folder is copied again, and the old copy stays for the processes that read it.
- While the store cannot be listed, the newest copy is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.machine.files import sync
from asyncrl.machine.long_work import Advance, long_work

logger = logging.getLogger(__name__)

DEFAULT_PLACE = "~/.cache/asyncrl/models"
ATTEMPTS = 3
"""The maximum number of tries to copy a folder that changes meanwhile."""
MB = 1e6
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PARTIAL = ".partial-"
_TAGS = ("ETag", "etag", "md5Hash", "checksum", "mtime", "last_modified", "LastModified", "created")


def is_url(path: str) -> bool:
    """True if a path names a folder of a remote store."""
    return _URL.match(path) is not None


@dataclass(frozen=True, slots=True)
class _File:
    """A file as a store lists it: its size in bytes, and a tag that changes with its contents."""

    size: int
    tag: str


def local_copy(url: str, place: str | None = None) -> Path:
    """Return a copy on this host of the remote folder `url`, within the folder `place` (None: `DEFAULT_PLACE`).
    Downloads the folder if there is no copy. Raises ConfigError: the store cannot be reached and there is no copy, the
    folder is empty, or the copy cannot be written.
    """
    home = _home(url, place)
    try:
        system, base = _opened(url)
        listed = _listed(system, base)
    except ConfigError:
        raise
    # Each kind of store raises its own errors.
    except Exception as error:
        if (known := known_copy(url, place)) is not None:
            logger.warning("%s cannot be listed (%s); this host's copy of it is used", url, error)
            return known
        raise ConfigError(f"{url} cannot be read: {error!r}") from error
    if not listed:
        raise ConfigError(f"{url} has no files: name the folder of a model")
    try:
        home.mkdir(parents=True, exist_ok=True)
        if (copy := home / _digest(listed)).exists():
            return copy
        with _locked(home / "lock", url):
            return _copied(url, system, base, home)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{url} cannot be copied to {home}: {error!r}") from error


def known_copy(url: str, place: str | None = None) -> Path | None:
    """Return the newest copy of `url` on this host, or None, without a request to the store."""
    copies = [each for each in _home(url, place).glob("*") if each.is_dir() and not each.name.startswith(".")]
    return max(copies, key=lambda copy: copy.stat().st_mtime_ns, default=None)


def read_remote(url: str) -> str:
    """Read the text of one file of a remote store. Raises OSError: it cannot be read."""
    try:
        system, path = _opened(url)
        return str(system.cat_file(path).decode())
    except Exception as error:
        raise OSError(f"{url} cannot be read: {error!r}") from error


def _opened(url: str) -> tuple[Any, str]:
    # Imported only here, since most processes read local folders.
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, str(path).rstrip("/")


def _home(url: str, place: str | None) -> Path:
    name = re.sub(r"[^\w.-]", "-", url.rstrip("/").rpartition("/")[2]).lstrip(".")
    return Path(place or DEFAULT_PLACE).expanduser() / f"{name}-{_short_hash(url.rstrip('/'))}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _listed(system: Any, base: str) -> dict[str, _File]:
    """Return the files below `base` by their paths, which are relative to `base`. Hidden files are left out, and so are
    the empty files that some stores keep for folders. Raises ConfigError: `base` is a file, or a path leads out of
    `base`.
    """
    system.invalidate_cache()
    found, prefix = {}, f"{base.strip('/')}/".lstrip("/")
    for path, info in sorted(system.find(base, detail=True).items()):
        if path.rstrip("/") == base or path.endswith("/"):
            if int(info["size"]):
                raise ConfigError(f"{path} is a file: name the folder that it is in")
            continue
        name = path.lstrip("/").removeprefix(prefix)
        if not path.lstrip("/").startswith(prefix) or ".." in name.split("/"):
            raise ConfigError(f"the store lists {path!r} in {base}, which is outside of it")
        if not any(part.startswith(".") for part in name.split("/")):
            tag = next((str(info[each]) for each in _TAGS if info.get(each) is not None), "")
            found[name] = _File(int(info["size"]), tag.strip('"'))
    return found


def _digest(listed: Mapping[str, _File]) -> str:
    named = {name: [file.size, file.tag] for name, file in listed.items()}
    return _short_hash(json.dumps(named, sort_keys=True))


@contextmanager
def _locked(file: Path, url: str) -> Iterator[None]:
    """Hold a lock during the block. The kernel frees it when the process dies, for any reason."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process copies %s; waiting for it", url)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _copied(url: str, system: Any, base: str, home: Path) -> Path:
    for _ in range(ATTEMPTS):
        listed = _listed(system, base)
        copy, partial = home / _digest(listed), home / f"{_PARTIAL}{_digest(listed)}"
        if copy.exists():
            return copy
        for old in home.glob(f"{_PARTIAL}*"):
            if old != partial:
                shutil.rmtree(old)
        total = sum(file.size for file in listed.values()) / MB
        logger.info("copying %s, %.0f MB, to %s", url, total, copy)
        with long_work(f"copying {url}", total, "MB") as advance:
            for name, file in listed.items():
                _fetch(system, f"{base}/{name}", partial / name, file, advance)
        if _listed(system, base) == listed:
            for folder in (partial, *filter(Path.is_dir, partial.rglob("*"))):
                sync(folder)
            partial.rename(copy)
            sync(home)
            return copy
        logger.warning("%s changed while it was copied; copying what changed", url)
    raise ConfigError(f"{url} changes all the time; wait until it is written")


def _fetch(system: Any, source: str, target: Path, file: _File, advance: Advance) -> None:
    """Copy one file, unless it was copied already. Raises ConfigError: its size differs from the store's listing."""
    if target.exists() and target.stat().st_size == file.size:
        advance(file.size / MB)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    system.get_file(source, str(part), callback=_progress(advance))
    size = part.stat().st_size
    if size != file.size:
        raise ConfigError(f"{source} came with {size} bytes instead of {file.size}; start again")
    sync(part)
    part.rename(target)


def _progress(advance: Advance) -> Any:
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc]
        def relative_update(self, inc: float = 1) -> None:
            advance(inc / MB)

    return Progress()
