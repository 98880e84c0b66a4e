"""The recurrence as Triton kernels: tiles, forward, backward, step (decode), tuning (checked-in settings)."""
