"""Known chunks, their RAM and disk tiers, and the index (LLMS §3.1, §3.4)."""
