"""verl's tools: classes with an instance in each episode, functions, and their schemas.

In reading order:
- schemas.py: verl's types of schemas and of responses
- base.py: the base class of tools
- functions.py: tools that are functions
- registry.py: the tools of a configuration of verl
- playing.py: the same tools as tools of a run's episodes
- gsm8k.py: verl's example of a tool
"""
