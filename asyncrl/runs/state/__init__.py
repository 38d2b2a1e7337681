"""The state of a running run: what each role does now, which role waits for which, and what to change.

In reading order:
- `status.py`, `live.py`: the replay described as plain values, and the requests to a running replay
- `situation.py`: all facts about a run at one moment, from its files and from the replay
- `working.py`: what the run works at now
- `stalls.py`: the chain of waits, from the role that waits to the cause
- `advice.py`: what to change, based on the shares of idle time
- `watch.py`: all of this for a run that is found by its name
"""
