"""Metrics that every file may have."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, _ = made_by("any")

METRICS = (
    gauge("step", "", "the position of the row; the section of each file says what it counts"),
    gauge("time", "s", "seconds from 1970 until the row was written"),
    counter(
        "metrics/lost",
        "rows",
        "rows, single values and other data, such as episodes, that a sink could not take, since the start; only "
        "written if there are any",
    ),
    gauge(
        "usage/cpu_cores",
        "cores",
        "processor seconds that the role's process and its children took per second since the last row: 2 means two "
        "cores that were always busy",
    ),
    gauge(
        "usage/memory_gb",
        "GB",
        "resident memory of the role's process and its children now. A page that several of them share counts once "
        "for each. Pages of mapped files, such as the replay's store, count too",
    ),
    gauge("usage/gpu_memory_gb", "GB", "memory that all processes together use on the GPUs that this process sees"),
    gauge(
        "usage/gpu_utilisation",
        "share",
        "share of the time since the last row in which a kernel ran; the mean over the GPUs that the process sees",
    ),
)
