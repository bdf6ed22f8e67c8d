"""Study of what distillation wins back of the accuracy that sparse tokens lose (ActiveFlow §5)."""
