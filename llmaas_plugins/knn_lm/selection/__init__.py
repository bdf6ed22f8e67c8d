"""Choice of the pairs that represent an archive best (§4)."""
