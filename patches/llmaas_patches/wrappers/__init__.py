"""Replacements of llama-cpp-python's functions, one module for each group; ``table`` lists them."""
