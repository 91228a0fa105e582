"""Recipes: one YAML file, parsed once into frozen records. There is one module per section;
`recipe` puts them together.
"""
