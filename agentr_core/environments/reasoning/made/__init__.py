"""Question sets made from a seed: their answers are derived, never written down."""
