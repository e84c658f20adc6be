"""Benchmarks of cutfuse against PyTorch: `python -m bench SUITE`."""

# The suites by their names on the command line, with their modules and what help says of them: it imports no torch.
SUITES = {
    "reference": ("bench.reference", "five models with and without a product"),
    "fp32": ("bench.fp32_suite", "fp32 products beside PyTorch's"),
    "chains": ("bench.chain_suite", "chains of operations behind products, interpreted and specialized"),
    "accuracy": ("bench.accuracy_suite", "fp32 products of every precision against fp64"),
    "host": ("bench.host_suite", "the host's time of a call, and stacks of layers from end to end"),
    "random": ("bench.random_suite", "layers drawn anew for each --seed, beside eager PyTorch"),
    "head": ("bench.head_suite", "the loss of language models' heads, in time and memory, beside other libraries"),
    "mlp": ("bench.mlp_suite", "whole MLPs: forward, training step and what a step keeps"),
    "bits": ("bench.bits_suite", "whether rows have their own bits and layers PyTorch's, and what that takes"),
    "fit": ("bench.fit", "every way of computing a layer, for the tables by which the planner chooses"),
    "models": ("bench.model_suite", "whole models through torch.compile, with cutfuse and without"),
}
