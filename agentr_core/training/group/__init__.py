"""Training on groups of sampled episodes, driven by the process that samples: advantages, loss,
learner.
"""
