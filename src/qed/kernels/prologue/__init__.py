"""From what `in_proj` gives to what the recurrence takes, in one pass over memory."""
