"""Datasets of reasoning-gym whose answers are only compared as texts.

Invariant: what stands here computes nothing from an answer. The others read it: some as JSON or numbers, and nine, with
`eval` or sympy's parser, as Python, so that whoever writes an answer runs code where it is scored. Answers come from a
policy, and from rented machines; such datasets are scored in the sandbox only.
"""

from __future__ import annotations

PLAIN = frozenset({
    "acre", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation", "caesar_cipher",
    "count_bits", "count_primes", "course_schedule", "gcd", "isomorphic_strings", "largest_island", "lcm",
    "leg_counting", "letter_counting", "list_functions", "mahjong_puzzle", "maze", "modulo_grid", "number_filtering",
    "number_sequence", "ransom_note", "rotate_matrix", "rotten_oranges", "simple_equations", "simple_geometry",
    "spell_backward", "string_manipulation", "string_splitting", "string_synthesis", "syllogism",
    "word_sequence_reversal",
})  # fmt: skip
