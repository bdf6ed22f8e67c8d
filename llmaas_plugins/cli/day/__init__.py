"""A day of six apps in one memory, by vanilla llama.cpp and by the plugins."""
