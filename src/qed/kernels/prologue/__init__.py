"""From the output of `in_proj` to the operands of the recurrence, in one pass over memory."""
