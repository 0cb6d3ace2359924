"""What the control of the propagation loop takes."""

__all__ = ["CONTROL_INSTRUCTIONS", "LOOP_CONTROL", "LOOP_STEPS"]

CONTROL_INSTRUCTIONS = 20
"""Worker instructions of a vertex that reads, computes and writes one number. 10 to 40."""

LOOP_STEPS = 10
"""Supersteps of one turn: loop condition, predicate, buffer switch, compute, decrement, if, toggle,
switch, exchange, increment."""

LOOP_CONTROL = 5 * CONTROL_INSTRUCTIONS
"""Worker instructions of a turn's control: five such vertices."""
