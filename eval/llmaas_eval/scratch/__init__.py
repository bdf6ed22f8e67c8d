"""Small models that are trained from scratch, as rivals of one model's narrow levels."""
