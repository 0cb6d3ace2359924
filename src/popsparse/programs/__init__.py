"""The program on the machine: variables, vertices and steps of the three passes."""
