"""Evaluation of the memory budget: its division while requests run, against fixed divisions."""
