"""The replay: feed, admission, durable store and sampler behind one socket; knows neither torch nor transformers."""
