"""Benchmarks of the op, the model, a training step and an evaluation; nothing is timed before it is shown correct."""
