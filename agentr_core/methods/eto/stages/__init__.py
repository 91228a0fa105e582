"""The stages of ETO: explore, prefer."""
