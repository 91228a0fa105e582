"""Episodes: building the conversation, rolling out and replaying steps, grading, and running many
episodes concurrently.
"""
