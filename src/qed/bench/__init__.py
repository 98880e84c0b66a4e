"""Benchmarks: what is timed must first be right."""
