"""The stages of Agent-R: collect, critique, continuation, splice."""
