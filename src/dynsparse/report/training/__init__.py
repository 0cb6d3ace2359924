"""What a training recorded: its connectivity and its curves, as plots."""
