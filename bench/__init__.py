"""Benchmarks and soaks: each prints one JSON object on its last line. Nothing in app or providers imports them."""
