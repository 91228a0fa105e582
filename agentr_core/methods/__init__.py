"""The shipped methods, each in a package of its own, and the table of all methods."""
