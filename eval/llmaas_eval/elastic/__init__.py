"""The evaluation of elastic models: quality by width, compared with other ways to shrink them."""
