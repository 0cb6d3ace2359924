"""How long a plan takes on a pattern, without simulating it: the execution model."""
