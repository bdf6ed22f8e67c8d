"""Chats: exports of other programs, and the prompts that chat templates make."""
