"""A layer from its request to its launches: plans, operators with their autograd, and prepared weights."""
