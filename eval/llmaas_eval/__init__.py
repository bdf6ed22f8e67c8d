"""Scenarios, models and reports that prove what the suite claims."""
