"""Checks of the repository's own text that no linter offers; ``make lint`` runs them."""
