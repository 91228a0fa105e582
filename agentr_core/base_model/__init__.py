"""How the shipped tiny base model is made."""
