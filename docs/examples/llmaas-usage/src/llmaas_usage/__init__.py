"""Who used how many tokens, and a budget for the day."""

from llmaas_usage.plugin import Usage, UsageConfig

__all__ = ["Usage", "UsageConfig"]
