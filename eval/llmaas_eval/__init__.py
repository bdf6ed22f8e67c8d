"""Test models, workloads and studies that check the suite's claims against vanilla llama.cpp."""
