"""Quality cost of sparse decoding, and locality of the channels that it reads."""
