"""An exported folder is whole, also where two processes write it at once."""

from __future__ import annotations

import threading
from pathlib import Path

from asyncrl.learner.checkpoint.export import write_anew


def test_two_who_write_a_folder_at_once_write_it_one_after_the_other(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def write(name: str, partial: Path) -> None:
        partial.mkdir()
        order.append(f"{name} begins")
        begun.set()
        may_end.wait()
        (partial / "file").write_text(name)
        order.append(f"{name} ends")

    first, second = (
        threading.Thread(target=write_anew, args=[tmp_path / "model", lambda partial, name=name: write(name, partial)])
        for name in ("first", "second")
    )
    first.start()
    begun.wait()
    second.start()
    may_end.set()
    first.join()
    second.join()
    assert order == ["first begins", "first ends", "second begins", "second ends"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "file").read_text() == "second"
