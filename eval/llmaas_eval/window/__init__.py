"""Study of texts that are longer than the window: moved cells against cells evaluated again."""
