"""A page that shows runs while they run and afterwards: figures, health and episodes, served to one browser.

This package keeps promise 8 (closed by default) for the page: `access.py` admits only requests that have the token and
name this machine. The page only reads, through `asyncrl.runs`. A store that stays open for reading keeps the replay
from reusing freed space, so `stores.py` opens a store only for a moment.

In reading order:

- `__main__.py`, `runs.py`: the command, and the runs that it shows.
- `server.py`, `access.py`: the addresses of the page, and who may read them.
- `run_list.py`: the table of runs.
- `overview.py`, `series.py`: the state of a run, and its metrics as columns.
- `episode_routes.py`, `episode_list.py`, `episode_texts.py`, `episode_page.py`, `group_page.py`: the kept episodes.
- `vocabulary.py`, `pieces.py`, `token_values.py`: token ids to text, and the values of each token.
- `plain.py`: values as JSON that every browser reads.
- `page/`: the page itself, in plain JavaScript without a build.

Addresses and answers may change together with the page, which is their only reader. A test opens the page in a browser.
"""
