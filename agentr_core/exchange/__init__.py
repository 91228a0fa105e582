"""Exchange with other programs: export of training sets and evaluations, and import of files."""
