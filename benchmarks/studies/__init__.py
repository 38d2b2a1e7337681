"""Studies of learning. Each file that declares a Study answers one question by real runs on the ladder of tasks."""
