"""The weights of a policy, which the learner publishes version by version, and every engine receives.

This package keeps promise 9 of docs/concepts.md: a weight update is all or nothing, and a version never moves
backwards.

- The manifest of a version covers every tensor, with a checksum: manifest.py.
- An engine gets a version only once all of it has arrived: receiver.py, and folders.py for the disk route.
- An engine serves a version only if it computes the same log-probs as the learner for a short fixed sequence:
  canary.py.
- Back-pressure (promise 7): a receiver pulls chunks with a bounded number of requests: transfers.py.

Files in reading order: routes.py (the routes by which weights travel, and the choice among them), publisher.py (a push:
the learner gives one version to all routes), receiver.py (the engine's side), manifest.py, then the two ends of each
route: server.py and zmq_route.py, broadcast.py and distributed_route.py, folders.py and disk_route.py. delta.py reduces
the bytes of a push to the changes since the last version. from_config.py makes the settings of routes.

Supporting files:

- preparation.py: the checksums and the delta of a version; requests.py: the requests of an engine
- buckets.py: buffers of many tensors; stored_tensors.py: frozen tensors, which need not travel
- group.py, nccl.py: the process group of the learner and engines; threads.py: threads for this work

You may add a route, and change the encoding of deltas, buckets, threads and limits. Ask before you change the manifest
or the protocol in transfers.py: the learner and the engines of a run must use the same ones.
"""
