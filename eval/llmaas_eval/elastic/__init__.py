"""The evaluation of elastic models: their quality by width, beside other ways to shrink them."""
