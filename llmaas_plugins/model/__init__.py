"""Model files: their headers and identity, forward passes, and llama.cpp's quantizer."""
