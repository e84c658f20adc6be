"""Benchmarks of cutfuse against PyTorch: `python -m bench reference|linear|reduce|pointwise|render`."""
