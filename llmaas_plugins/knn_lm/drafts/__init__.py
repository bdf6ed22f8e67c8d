"""Draft tokens from stored conversations, verified by the model."""
