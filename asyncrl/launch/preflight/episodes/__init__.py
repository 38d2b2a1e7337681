"""The checks of what episodes are made of: tools, environments, simulated users and agents.

- `play.py`: their use with the rows of the data
- `creation.py`: the creation of tools and environments
- `episode.py`: one whole episode, played and scored
- `made_up.py`: arguments for the calls of that episode
- `own_code.py`: the user's code that failed, with its file and line
"""
