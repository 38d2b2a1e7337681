"""Environments: classes whose objects hold the state of one episode, and whose public methods are its tools."""
