"""Grading: what a completion answers, whether that is right, and processes in which finding out can be killed. Layer 3."""
