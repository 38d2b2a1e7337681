"""Forward passes of fixed shapes, which the embedded engine replays on a GPU as CUDA graphs.

A pass of the engine's usual kind launches more than a thousand kernels one by one, and then waits for the sampled
tokens. Here a pass is one launch. It takes its inputs from tensors that never move, and samples on the device. The next
pass starts before the host has read the sampled tokens.

Files in reading order:

- inputs.py has the inputs of a pass, and static_pass.py the pass as a function over static tensors
- attention.py and kernel.py compute attention over the cache, and norms.py the norms
- capture.py records a function as a CUDA graph
- decoding.py has the sequences on the device, and unread.py the sampled tokens that requests do not have yet
- passes.py has `GraphedPasses`, with the methods of `engine.passes.Passes`, and opening.py chooses one of these classes

Tests run all of it on a CPU, without graphs.
"""
