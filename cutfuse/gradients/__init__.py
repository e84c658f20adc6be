"""The gradients of the operators."""
