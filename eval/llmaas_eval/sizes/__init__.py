"""Models of the sizes that people run, with random weights, and every feature run on them."""
