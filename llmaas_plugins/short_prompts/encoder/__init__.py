"""Tiny encoder that scores words (ElastiLM §3.3): its weights, its files, and how it is run."""
