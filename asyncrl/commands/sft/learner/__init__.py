"""The process of `asyncrl sft` that trains, which the command starts and supervises."""
