"""Does it learn? Each file here that declares a Study asks one question, by real runs on the ladder of tasks."""
