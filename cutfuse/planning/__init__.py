"""Asks the planner for a linear layer's plan, allocates the memory of the plan, and makes its kernel launches."""
