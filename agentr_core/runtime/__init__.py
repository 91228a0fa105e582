"""What a stage needs: recipe, store, models and environments, the instances of a run, and shards
for other machines.
"""
