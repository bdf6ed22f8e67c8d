"""Studies of shorter prompts and narrow prefills (ElastiLM §3.3)."""
