"""The demo: a calculator task, its tokenizer, warm start, step scorer and report."""
