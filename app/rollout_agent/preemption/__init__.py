"""Notices that the machine itself is given before it is taken away."""
