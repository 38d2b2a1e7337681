"""The sockets between processes: who may listen where, which clients are let in, and how a client handles a refusal.

This package keeps promise 8 of docs/concepts.md (closed by default): `listener.py` lets in only clients whose CURVE
keys are in the list of accepted clients. It counts refused clients, and bounds the size and the number of messages.
`config/checks/deployment.py` refuses a configuration that listens beyond loopback without keys. The bound on messages
is also the network's part of promise 7 (back-pressure): a peer that does not read its messages takes up a bounded
amount of memory here.

In reading order: `keys.py`, `listener.py` (the server's side), `sockets.py` (the client's side), `throttle.py` (a
bounded rate for log lines that clients cause), `http_server.py` (HTTP with keys) and `public.py` (requests to the
internet). `interfaces.py` finds this machine's network interfaces, and `proxies.py` lets clients connect without a
proxy.

The rates and texts of log lines, and time limits, may change freely. `tests/network/` and `tests/security/` attack the
rules by which clients are let in.
"""
