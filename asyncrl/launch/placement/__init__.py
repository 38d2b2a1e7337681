"""The placement of a run's processes on hosts, GPUs and CPUs: `placement.py` first, then `pools`, `dealing`,
`sharing`."""
