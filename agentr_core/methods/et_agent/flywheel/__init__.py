"""The flywheel: a policy's trajectories, varied round by round.

    question -> fresh trajectories -> [parent -> children by operators] * rounds

Source: ET-Agent (arXiv 2601.06860), self-evolving data flywheel. Operators of a right parent:

    C0  a fresh trajectory
    C1  the editor rewrites the first redundant step; it is carried out, and the policy goes on
    C2  the editor rewrites all thoughts; calls, results and answer stay the same to the byte

and of a wrong one:

    I0  the editor names the first flawed step, for I1 and I2; it makes no child
    I1  the reflector reviews that step and rewrites it; it is carried out, and the policy goes on
    I2  the policy goes on after that step, with a hint
    I3  the policy goes on after the whole trajectory, with a hint
    I4  as I3, with the reflector's review in place of the hint
"""
