"""Simulation of training memory, FLOPs and time on GPUs that are not there."""
