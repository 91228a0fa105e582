"""The methods that come along, a package each, and the table of all."""
