"""The search for the best partition, what it costs, and why it won."""
