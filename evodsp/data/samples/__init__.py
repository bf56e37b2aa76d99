"""From the chains of a set to samples: which are drawn, and what a worker makes of one."""
