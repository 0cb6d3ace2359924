"""What the control of the propagation loop takes."""

CONTROL_INSTRUCTIONS = 20
"""Worker instructions of a vertex that reads, computes and writes one number. 10 to 40."""

LOOP_STEPS = 4
"""Supersteps of one turn that exchange anything: the loop's condition and two choices, each told to
all tiles, and the buckets passed on. What else there is in a turn needs no tile but its own, so no
synchronisation. The original's loop has a choice more."""

LOOP_CONTROL = 5 * CONTROL_INSTRUCTIONS
"""Worker instructions of a turn's control: five such vertices."""
