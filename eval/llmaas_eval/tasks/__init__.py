"""Study of the sparse mode on tasks, with a copy of a model that was tuned to them."""
