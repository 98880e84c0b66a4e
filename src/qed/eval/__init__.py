"""Evaluation: frozen examples, batched greedy answers, scores, and where each figure comes from."""
