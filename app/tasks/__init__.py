"""Data plane: prompts and rewards. Imports the messages and nothing else of ours; never torch."""
