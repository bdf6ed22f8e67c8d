"""Commands for a store that no app uses: check, clean up, export."""
