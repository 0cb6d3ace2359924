"""Reading files from strangers within limits, and writing files whole."""
