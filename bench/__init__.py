"""Benchmarks of cutfuse against PyTorch: `python -m bench SUITE`."""
