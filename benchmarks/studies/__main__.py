"""Lists the studies with their questions.

python -m benchmarks.studies
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from benchmarks import studies
from benchmarks.studies.study import Study


def all_studies() -> Iterator[Study]:
    """Return the studies of this package's modules by name."""
    for found in pkgutil.iter_modules(studies.__path__):
        if found.name != "__main__":
            module = importlib.import_module(f"{studies.__name__}.{found.name}")
            if isinstance(study := getattr(module, "STUDY", None), Study):
                yield study


def main() -> None:
    for study in all_studies():
        sys.stdout.write(f"python -m {studies.__name__}.{study.name}: {study.question}\n")


if __name__ == "__main__":
    main()
