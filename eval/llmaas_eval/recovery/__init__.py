"""Study of what recovery wins back of the accuracy that levels lose (ElastiLM §3.2)."""
