"""The judge: its prompt, its verdicts, and the first error of a bad path."""
