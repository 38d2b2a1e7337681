"""The knowledge about Hugging Face models that several packages share: files, shapes, attention, log-probs.

This package helps to keep promise 6 of docs/concepts.md, that the learner's math is exact. Each line names two ways to
compute, which give the same results:

- packed and unpacked sequences: packed_attention.py
- a group of ranks that divides the tokens of a pass, and a single rank: context.py
- logits in chunks and as a whole: logprobs.py

For promise 9, weight_format.py defines the names under which weights are published.

Files in reading order: opening.py (a model's configuration), shapes.py, weight_format.py, attention.py (which models
may get asyncrl's attention), packed_layout.py, packed_attention.py, logprobs.py. Some models also need routing.py and
routers.py (experts), vision.py and images.py, adapters.py (LoRA) or freezing.py.

Supporting files:

- source.py, overrides.py: a model's files, and changes to its configuration
- tokenizer.py, end_tokens.py: the tokenizer, and the tokens that end a turn
- gpu_attention.py, cudnn_attention.py, plain_attention.py: three ways to compute attention
- devices.py, flops.py: devices, and the work that a model needs

You may add kernels, families of routers and of image models, and rules for freezing. Each needs a test that shows equal
results. Ask before you change the published names (weight_format.py) or the bytes of a token's experts (routing.py):
runs have them in their stores.
"""
