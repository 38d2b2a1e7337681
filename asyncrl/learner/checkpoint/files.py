"""Writes the files of one checkpoint, in a thread of every rank while training continues.

The threads communicate by files, since collectives belong to the main threads. Each rank of the model's first copy
(`learner.replicas`) writes its file, then its checksums. Rank 0 waits for all checksums, renames the folder, and marks
it as complete. A rank that cannot write its part removes the folder, so that rank 0 does not wait for it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from xxhash import xxh3_64

from asyncrl.learner.checkpoint.state import write_state
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.files import partial_name, sync, when_there_is_room, write_whole
from asyncrl.machine.long_work import tracked

COMPLETE = "complete"
"""The file that marks a folder as a checkpoint."""
FORMAT = "4"
"""The content of the mark. Earlier versions of asyncrl wrote another number, or nothing."""
PROGRESS = "progress.json"
CHUNK_BYTES = 16 << 20
POLL_S = 0.05
_CHECKSUMS = "checksums-"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The checkpoint that will be the folder `final`."""

    final: Path

    @property
    def partial(self) -> Path:
        """The folder while it is written."""
        return self.final.with_name(f".tmp-{self.final.name}")

    def begin(self) -> None:
        """Make an empty folder, before any rank writes into it. Raises OSError."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def write(self, tensors: Mapping[str, Tensor], progress: str, ranks: Ranks, stop: threading.Event) -> bool:
        """Write this rank's part, as soon as the disk has room for it. Rank 0 waits for the parts of the other ranks,
        and returns True if the checkpoint is complete. Other ranks return False.

        Raises StoppedError: `stop` was set while the disk was full; OSError: the folder cannot be written.
        """
        try:
            when_there_is_room(lambda: self._write_part(tensors, progress, ranks), stop, str(self.final))
            return ranks.rank == 0 and self._complete(ranks.shards, stop)
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _write_part(self, tensors: Mapping[str, Tensor], progress: str, ranks: Ranks) -> None:
        files = [write_state(tensors, self.partial, ranks.rank)]
        if ranks.rank == 0:
            files.append(self.partial / PROGRESS)
            files[-1].write_text(progress)
        for file in files:
            sync(file)
        checksums = {file.name: _checksum(file) for file in files}
        path = self._checksums(ranks.rank)
        written = partial_name(path)
        written.write_text(json.dumps({"ranks": ranks.shards, "files": checksums}))
        sync(written)
        # Once every rank has written its checksums, rank 0 renames the folder. So this rank must not use the folder
        # after the next line.
        written.replace(path)

    def _checksums(self, rank: int) -> Path:
        return self.partial / f"{_CHECKSUMS}{rank:05d}.json"

    def _complete(self, count: int, stop: threading.Event) -> bool:
        """Make the checkpoint appear once `count` ranks have written their parts. Returns False if a rank could not
        write its part."""
        while not all(self._checksums(rank).exists() for rank in range(count)):
            # A rank that failed has removed the files, but the folder may still exist if a rank wrote its checksums
            # meanwhile.
            if not (self.partial / PROGRESS).exists():
                return False
            time.sleep(POLL_S)
        sync(self.partial)
        if self.final.is_dir():
            # An earlier checkpoint of this step is hidden before it is removed: a part of it must not look complete.
            hidden = self.final.with_name(f".tmp-old-{self.final.name}")
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.rmtree(self.final.rename(hidden), ignore_errors=True)
        self.partial.rename(self.final)
        sync(self.final.parent)
        when_there_is_room(lambda: write_whole(self.final / COMPLETE, FORMAT), stop, str(self.final))
        return True


def find_damage(folder: Path, rank: int, ranks: int) -> str | None:
    """Describe the damage of the files in `folder`. Returns None if they are undamaged. Each of the `ranks` ranks
    checks a part of the files. Raises OSError: a file cannot be read."""
    try:
        read = [json.loads(path.read_text()) for path in folder.glob(f"{_CHECKSUMS}*.json")]
        checksums = {name: checksum for each in read for name, checksum in each["files"].items()}
        expected = read[0]["ranks"] if read else 1
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its checksums cannot be read: {error!r}"
    if len(read) != expected:
        return f"it has {len(read)} of {expected} files of checksums"
    names = sorted(checksums)[rank::ranks]
    for name in tracked(names, f"checking {folder.name}", len(names), "files"):
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _checksum(folder / name) != checksums[name]:
            return f"{name} has changed since it was written"
    return None


def _checksum(path: Path) -> list[int | str]:
    """Compute the size and the XXH3 of a file."""
    digest, size = xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return [size, digest.hexdigest()]
