"""The judge: what it is asked, its verdicts, and the first error of a bad path."""
