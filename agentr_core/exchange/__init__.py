"""Training sets in the formats of other programs: export to folders, and import of files."""
