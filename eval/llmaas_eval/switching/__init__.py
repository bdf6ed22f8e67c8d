"""Switching between many contexts on one engine: this suite against other ways (LLMS §4 and §5).

KV cells are moved for real. What a real service would evaluate is injected instead of evaluated;
evaluation that a system makes necessary is charged at its measured cost. Each system runs in its
own process, and all it uses beyond the engine itself counts in one memory budget.
"""
