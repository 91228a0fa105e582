"""The flywheel: a policy's trajectories, varied round by round; `operators` lists how."""
