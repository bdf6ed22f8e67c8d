"""A day in the life of a device: six apps, one small model, and four ways to switch contexts."""
