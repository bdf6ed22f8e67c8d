"""Shorter prompts: requests read only the words that their answers need (ElastiLM §3.3)."""
