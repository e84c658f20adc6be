"""The direct path: a call with the same key as an earlier call runs in one C++ function (csrc/call)."""
