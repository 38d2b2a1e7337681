"""Metrics that every file may have."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, _ = made_by("any")

METRICS = (
    gauge("step", "", "what the row is about: see each file below"),
    gauge("time", "s", "when the row was written, since 1970"),
    counter("metrics/lost", "rows", "rows that a sink could not take, since the start; only if there are any"),
    gauge(
        "usage/cpu_cores",
        "cores",
        "processor seconds a second that the role's process and its children took since the last row: 2 is two cores "
        "that are always busy",
    ),
    gauge(
        "usage/memory_gb",
        "GB",
        "resident memory of the role's process and its children now. Pages that several of them share count for each, "
        "and pages of files, such as the replay's store, count as well",
    ),
    gauge("usage/gpu_memory_gb", "GB", "memory that is taken on the GPUs that the process sees, by whomever"),
    gauge(
        "usage/gpu_utilisation",
        "share",
        "time since the last row in which a kernel ran, a mean over the GPUs that the process sees",
    ),
)
