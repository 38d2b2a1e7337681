"""A page that shows runs while they run and afterwards: figures, health and episodes, served to one browser.

Promise 8 (closed by default) is kept here for the page: `access.py` lets in only a request with the token, by a name of
this machine. It only reads, and reads all through `asyncrl.runs`; `stores.py` opens the stores of a replay for a moment
at a time, so that the replay can reuse their space.

In reading order:

- `__main__.py`, `runs.py`: the command, and the runs that it shows.
- `server.py`, `access.py`: the addresses of the page, and who may read them.
- `overview.py`, `series.py`: the state of a run, and its metrics as columns.
- `episode_routes.py`, `episode_list.py`, `episode_page.py`, `group_page.py`: the kept episodes.
- `vocabulary.py`, `pieces.py`, `token_values.py`: token ids to text, and the values of each token.
- `page/`: the page itself, in plain JavaScript without a build.

Addresses and answers may change together with the page, which is their only reader. A test in a browser opens it.
"""
