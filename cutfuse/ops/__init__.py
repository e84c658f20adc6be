"""The operators `torch.ops.cutfuse.*`: their schemas, and their CUDA, CPU and fake implementations."""
