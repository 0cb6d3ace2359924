"""Cycles of vertices and exchanges as the planner counts them, and how rows meet workers."""
