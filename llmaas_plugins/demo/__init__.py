"""Demo: six apps share one small model, and four systems switch between the apps' contexts."""
