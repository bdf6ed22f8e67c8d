"""What sparse decoding costs in quality, and how local the channels are that it reads."""
